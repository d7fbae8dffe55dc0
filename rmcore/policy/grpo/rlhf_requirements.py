"""Requirements of a training against a reward model, checked before anything runs, and the rewards next to its own.

Imports torch only for a reward model.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence

from rmcore.config.judging import JudgingConfig, is_endpoint, is_function
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.extras import require_extra
from rmcore.core.named_function import REWARD_MEANING, load_function
from rmcore.data.pair import Prompt
from rmcore.judging.judge import Judge
from rmcore.policy.judge import HookJudge, ModelJudge, require_model_folder, require_named_judge, require_people

MORE_REWARDS = "rlhf.more_rewards"
FEWEST_PAIRS = 4
"""Pairs of a look."""
NOBODY_WATCHES = (
    "rlhf.watch wants a judge, and nobody judges: only the synthetic benchmark judges itself. Name a function of "
    "(prompt, response) in policy.judge, or a folder for people's files in rlhf.watch.people, or go "
    "without (--set rlhf.watch=null, and rlhf.kl_target=null where one is set)."
)


def require_trl() -> None:
    """Refuse where TRL is not installed.

    Raises:
        ConfigError: it is not.
    """
    require_extra("trl", "rl", "GRPO")


def require_rlhf(settings: RlhfConfig, judge: str | None, judging: JudgingConfig | None, *, is_gold: bool) -> None:
    """Check that everything is there that the training of a policy names.

    Args:
        settings: of the training.
        judge: who judges.
        judging: how it is asked.
        is_gold: whether the pairs are the synthetic benchmark's, which judges itself.

    Raises:
        ConfigError: TRL or a named vLLM is missing, the judge or a further reward is not there, people's folder is not
            one, a watch has no judge, or a judge of pairs is to give the true reward of single responses.
    """
    require_trl()
    if "vllm" in (settings.rewards, settings.rollouts):
        from rmcore.serving.vllm_process import find_vllm  # imports an HTTP client, which a cached run does not need

        find_vllm()
    watch = settings.watch
    if judge is not None:
        require_named_judge(judge, judging)
    require_more_rewards(settings.more_rewards)
    if watch is None and judging is not None and judging.mode != "pointwise":
        raise ConfigError(
            "without a watch, the true reward of each measurement is compared with that of the start, on one scale, "
            "and a judge of pairs has none across measurements. Set policy.judging.mode=pointwise, or keep rlhf.watch."
        )
    if watch is not None:
        if watch.people is None and judge is None and not is_gold:
            raise ConfigError(NOBODY_WATCHES)
        if watch.people is not None:
            require_people(watch.people)
        num_looks = math.ceil(settings.steps / settings.measure_every)
        require_labels(watch, num_looks, 2 if watch.people is None else 1)


def require_labels(settings: WatchConfig, num_looks: int, labels_per_pair: int) -> None:
    """Refuse a watch whose looks would see next to nothing.

    Raises:
        ConfigError: a look has fewer than `FEWEST_PAIRS` pairs.
    """
    if settings.labels < FEWEST_PAIRS * labels_per_pair * num_looks:
        raise ConfigError(
            f"{settings.labels} labels for {num_looks} looks of {labels_per_pair} labels a pair are fewer than "
            f"{FEWEST_PAIRS} pairs a look, from which nothing can be seen; raise rlhf.watch.labels, or look more "
            "rarely (rlhf.measure_every)."
        )


def is_served(settings: RlhfConfig) -> bool:
    """Whether a vLLM reward server gives the rewards."""
    if settings.rewards == "auto":
        from rmcore.serving.vllm_process import find_vllm

        with contextlib.suppress(ConfigError):
            find_vllm()
            return True
    return settings.rewards == "vllm"


def require_more_rewards(named: Mapping[str, float] | None) -> None:
    """Check that all further rewards are there, and read none of them.

    Raises:
        ConfigError: one is neither a function that can be imported nor the folder of a reward model.
    """
    for name in named or {}:
        if is_endpoint(name):
            raise ConfigError(
                f"{MORE_REWARDS} names {name}, a language model, which costs a question for each sample of each step; "
                "name the folder of a reward model or module:function."
            )
        if is_function(name):
            load_function(MORE_REWARDS, name, REWARD_MEANING)
        else:
            require_model_folder(name, MORE_REWARDS)


def further_rewards(named: Mapping[str, float] | None, prompts: Sequence[Prompt], device: str) -> tuple[Judge, ...]:
    """Load the rewards next to the run's own one, in the order of the setting; reward models in this process.

    TRL normalises each within its groups before it sums them (`multi_objective_aggregation="normalize_then_sum"`), so
    that the unit of a reward does not count.

    Args:
        named: `rlhf.more_rewards`.
        prompts: that the policy is trained on, which each reward model must be able to read.
        device: cpu or cuda.

    Raises:
        ConfigError: see `require_more_rewards`.
        DataError: a reward model's chat template cannot show a prompt.
        ModelError: a reward model cannot be loaded.

    Source:
        Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv:2601.05242, eq. 4 to 6.
    """
    require_more_rewards(named)
    return tuple(_load_reward(one, prompts, device) for one in named or {})


def _load_reward(named: str, prompts: Sequence[Prompt], device: str) -> Judge:
    if is_function(named):
        return HookJudge(named, load_function(MORE_REWARDS, named, REWARD_MEANING), MORE_REWARDS)
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(named, device=device)
    refused = [
        side for side in rm.renderer.try_sides([(prompt, "") for prompt in prompts]) if isinstance(side, DataError)
    ]
    if refused:
        raise DataError(
            f"{MORE_REWARDS} names {named}, which cannot read {len(refused)} of the {len(prompts)} prompts that the "
            f"policy is trained on: {refused[0]} Leave those prompts out, or take a reward model that reads them."
        )
    return ModelJudge(named, rm)
