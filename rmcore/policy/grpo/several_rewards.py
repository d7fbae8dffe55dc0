"""Several rewards in one training: each is normalised within its groups before they are summed (GDPO).

A sum of rewards as they are is led by whichever has the larger unit, and equal sums of different rewards become equal
advantages. Normalised first, each counts by its weight alone, whatever its unit.

Source:
    Liu et al. 2026, GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv:2601.05242, eq. 4 to 6;
    TRL's `multi_objective_aggregation="normalize_then_sum"` (huggingface/trl pull request 4785) with 1e-4 added to
    each standard deviation. Nothing is added here, so that a reward's unit changes nothing, and a group whose rewards
    are equal to rounding adds nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.config.judging import is_endpoint, is_function
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.named_function import REWARD_MEANING, load_function
from rmcore.data.pair import Prompt
from rmcore.judging.judge import Judge
from rmcore.policy.judge import HookJudge, ModelJudge, require_model_folder

SETTING = "rlhf.more_rewards"
ROUNDING, FUNCTION_ROUNDING = 1e-6, 1e-12
"""A spread within a group that is below this share of its largest reward is rounding: a reward model's of float32,
1.2e-7 a step; a function's of what it adds up in float64, 2.2e-16 a step."""


@dataclass(frozen=True, slots=True)
class FurtherReward:
    """A reward next to the run's own.

    judge: gives the rewards of prompts and responses; its name is that in the setting.
    weight: of the normalised reward, the own one's being 1; below 0 it is a price.
    """

    judge: Judge
    weight: float

    @property
    def rounding(self) -> float:
        """Share of a group's largest reward below which a spread is rounding."""
        return ROUNDING if isinstance(self.judge, ModelJudge) else FUNCTION_ROUNDING


def require_more_rewards(named: Mapping[str, float] | None) -> None:
    """Check that all further rewards are there, and read none of them.

    Raises:
        ConfigError: one is neither a function that can be imported nor the folder of a reward model.
    """
    for one in named or {}:
        if is_endpoint(one):
            raise ConfigError(
                f"{SETTING} names {one}, a language model, which costs a question for each sample of each step; name "
                "the folder of a reward model or module:function."
            )
        if is_function(one):
            load_function(SETTING, one, REWARD_MEANING)
        else:
            require_model_folder(one, SETTING)


def further_rewards(
    named: Mapping[str, float] | None, prompts: Sequence[Prompt], device: str
) -> tuple[FurtherReward, ...]:
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
    return tuple(FurtherReward(_load(one, prompts, device), weight) for one, weight in (named or {}).items())


def _load(named: str, prompts: Sequence[Prompt], device: str) -> Judge:
    if is_function(named):
        return HookJudge(named, load_function(SETTING, named, REWARD_MEANING), SETTING)
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(named, device=device)
    refused = [found for found in rm.renderer.try_sides([(one, "") for one in prompts]) if isinstance(found, DataError)]
    if refused:
        raise DataError(
            f"{SETTING} names {named}, which cannot read {len(refused)} of the {len(prompts)} prompts that the policy "
            f"is trained on: {refused[0]} Leave those prompts out, or take a reward model that reads them."
        )
    return ModelJudge(named, rm)


def normalized(rewards: FloatArray, group_size: int, roundings: Sequence[float]) -> FloatArray:
    """(reward - mean) / standard deviation within each group, 0 where all of a group are equal.

    Args:
        rewards: (K, N) of K rewards, finite; groups are `group_size` neighbours.
        group_size: divides N.
        roundings: K shares of a group's largest reward below which its spread is 0.

    Returns:
        (K, N) of mean 0 in each group; scaling a reward by a positive number changes it by rounding alone.
    """
    groups = rewards.reshape(len(rewards), -1, group_size)  # (K, N / G, G)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    scale = np.where(largest > 0, largest, 1.0)
    inside = groups / scale  # so that squares neither overflow nor vanish
    away = inside - inside.mean(axis=2, keepdims=True)
    varies = np.ptp(inside, axis=2, keepdims=True) > np.asarray(roundings)[:, None, None]
    spread = np.sqrt((away**2).sum(axis=2, keepdims=True) / max(1, group_size - 1))
    return np.where(varies, away / np.where(varies, spread, 1.0), 0.0).reshape(rewards.shape)


def weighted_parts(
    rewards: FloatArray, weights: Sequence[float], group_size: int, roundings: Sequence[float]
) -> FloatArray:
    """Each normalised reward times its weight: (K, N), whose sum over K is what a step is trained on."""
    return np.asarray(weights, dtype=np.float64)[:, None] * normalized(rewards, group_size, roundings)


def summed(parts: FloatArray) -> list[float]:
    """The sum over K of (K, N), which does not depend on their order to the last bit."""
    return [math.fsum(column) for column in parts.T]


def shares(parts: FloatArray) -> list[float] | None:
    """How much of the variance of the sum each of K parts (K, N) makes: its covariance with the sum; together 1.

    A share is below 0 where a part worked against the sum. None where the sum is 0 throughout.
    """
    total = np.array(summed(parts))
    power = float(total @ total)
    return None if power == 0 else [float(part @ total) / power for part in parts]
