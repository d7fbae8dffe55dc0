"""Requirements of a training against a reward model, checked before anything runs. Imports no torch."""

import contextlib
import math

from rmcore.config.judging import JudgingConfig
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.core.errors import ConfigError
from rmcore.core.extras import require_extra
from rmcore.policy.grpo.several_rewards import require_more_rewards
from rmcore.policy.judge import require_named_judge, require_people
from rmcore.serving.vllm_process import find_vllm

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
        with contextlib.suppress(ConfigError):
            find_vllm()
            return True
    return settings.rewards == "vllm"
