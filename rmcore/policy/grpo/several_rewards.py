"""Several rewards in one training: folders of reward models and functions next to the run's own reward.

TRL normalises each within its groups before it sums them (`multi_objective_aggregation="normalize_then_sum"`), so that
the unit of a reward does not count.

Source:
    Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv:2601.05242, eq. 4 to 6.
"""

from collections.abc import Mapping, Sequence

from rmcore.config.judging import is_endpoint, is_function
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.named_function import REWARD_MEANING, load_function
from rmcore.data.pair import Prompt
from rmcore.judging.judge import Judge
from rmcore.policy.judge import HookJudge, ModelJudge, require_model_folder

SETTING = "rlhf.more_rewards"


def require_more_rewards(named: Mapping[str, float] | None) -> None:
    """Check that all further rewards are there, and read none of them.

    Raises:
        ConfigError: one is neither a function that can be imported nor the folder of a reward model.
    """
    for name in named or {}:
        if is_endpoint(name):
            raise ConfigError(
                f"{SETTING} names {name}, a language model, which costs a question for each sample of each step; name "
                "the folder of a reward model or module:function."
            )
        if is_function(name):
            load_function(SETTING, name, REWARD_MEANING)
        else:
            require_model_folder(name, SETTING)


def further_rewards(named: Mapping[str, float] | None, prompts: Sequence[Prompt], device: str) -> tuple[Judge, ...]:
    """Load the further rewards, in the order of the setting; reward models in this process.

    Args:
        named: `rlhf.more_rewards`.
        prompts: that the policy is trained on, which each reward model must be able to read.
        device: cpu or cuda.

    Raises:
        ConfigError: see `require_more_rewards`.
        DataError: a reward model's chat template cannot show a prompt.
        ModelError: a reward model cannot be loaded.
    """
    require_more_rewards(named)
    return tuple(_load(one, prompts, device) for one in named or {})


def _load(named: str, prompts: Sequence[Prompt], device: str) -> Judge:
    if is_function(named):
        return HookJudge(named, load_function(SETTING, named, REWARD_MEANING), SETTING)
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(named, device=device)
    refused = [
        side for side in rm.renderer.try_sides([(prompt, "") for prompt in prompts]) if isinstance(side, DataError)
    ]
    if refused:
        raise DataError(
            f"{SETTING} names {named}, which cannot read {len(refused)} of the {len(prompts)} prompts that the policy "
            f"is trained on: {refused[0]} Leave those prompts out, or take a reward model that reads them."
        )
    return ModelJudge(named, rm)
