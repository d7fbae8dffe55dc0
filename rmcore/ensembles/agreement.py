"""Scaling that makes rewards of different members comparable, and the disagreement that counts as high.

Bradley-Terry fixes neither a reward's offset nor how it compares between models, and a longer training gives larger
rewards. So on held-out data each member is centred by its mean and divided by its standard deviation within prompts:
rewards are then in standard deviations within prompts, and shifting or stretching a member changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.pair import Prompt, prompt_key


@dataclass(frozen=True, slots=True)
class Calibration:
    """Offset and scale of M members, and the threshold of their disagreement, from N held-out responses."""

    offsets: tuple[float, ...]
    """Mean reward of each member, in its logits."""
    scales: tuple[float, ...]
    """Standard deviation within prompts of each member's rewards, in its logits."""
    threshold: float
    """Disagreement above which a response counts as unlike the held-out ones, in standard deviations within prompts."""
    share: float
    """Share of the held-out responses that stay at or below the threshold."""
    num_responses: int
    num_prompts: int

    def apply(self, rewards: FloatArray) -> FloatArray:
        """Rewards (M, N) of the members in standard deviations within prompts."""
        return (rewards - np.array(self.offsets)[:, None]) / np.array(self.scales)[:, None]


def calibration_of(rewards: FloatArray, prompts: Sequence[Prompt], share: float, names: Sequence[str]) -> Calibration:
    """Fit a `Calibration` to raw rewards (M, N) of responses to N prompts.

    The threshold is the ceil((N + 1) share)-th smallest disagreement, as in split conformal prediction: of new
    responses exchangeable with these at most 1 - share exceed it on average, whatever the distribution. Two things
    make that approximate. Offsets and scales, 2 M numbers, are fitted on the same responses. Responses to one prompt
    are not exchangeable with those to another, so the share varies between samples as for fewer responses than N.

    Raises:
        ConfigError: share is not between 0 and 1, or there are too few responses for it.
        DataError: no prompt has two responses, so nothing varies within prompts.
        ModelError: a member gives all responses to a prompt the same reward; the message names it.
    Source:
        Vovk, Gammerman and Shafer 2005, Algorithmic learning in a random world; Angelopoulos and Bates 2021,
        arXiv:2107.07511, section 1.
    """
    num = rewards.shape[1]
    rank = conformal_rank(num, share)
    ids = np.array([prompt_key(prompt) for prompt in prompts])
    different, prompt = np.unique(ids, return_inverse=True)
    if num == len(different):
        raise DataError(
            f"{num} responses to as many prompts: no prompt has two, so nobody knows how much rewards vary within a "
            "prompt. Calibrate on pairs, or on several responses to each prompt."
        )
    scales = np.array([_spread_within(row, prompt) for row in rewards])
    for name, scale, row in zip(names, scales, rewards, strict=True):
        if scale <= 1e-9 * (1 + np.abs(row).max()):
            raise ModelError(
                f"member {name} gives all responses to a prompt the same reward, so its scale is zero; leave it out."
            )
    offsets = rewards.mean(axis=1)
    found = Calibration(tuple(offsets), tuple(scales), math.inf, share, num, len(different))
    spread = np.sort(disagreement(found.apply(rewards)))
    return Calibration(
        tuple(map(float, offsets)), tuple(map(float, scales)), float(spread[rank - 1]), share, num, len(different)
    )


def conformal_rank(num: int, share: float) -> int:
    """Which order statistic of `num` scores, from 1, a new exchangeable one stays below with probability >= share.

    Raises:
        ConfigError: share is not between 0 and 1, or `num` scores cannot bound it.
    """
    if not 0 < share < 1:
        raise ConfigError(
            f"share={share}: the share of responses that are not flagged lies between 0 and 1; 0.95 is usual."
        )
    rank = math.ceil((num + 1) * share - 1e-9)  # 20 x 0.95 is 19, whatever its rounding
    if rank > num:
        raise ConfigError(
            f"{num} responses cannot give a threshold that {share:.0%} of new ones stay below; calibrate on at least "
            f"{math.ceil(share / (1 - share) - 1e-9)}, or lower share."
        )
    return rank


def disagreement(rewards: FloatArray) -> FloatArray:
    """Standard deviation over M members, (M, N) -> (N,); the population's, so its square is that of UWO."""
    return rewards.std(axis=0)


def _spread_within(rewards: FloatArray, prompt: npt.NDArray[np.int64]) -> float:
    """Pooled standard deviation within prompts, with one degree of freedom less for each prompt."""
    counts = np.bincount(prompt)
    centred = rewards - (np.bincount(prompt, rewards) / counts)[prompt]
    return math.sqrt(float(centred @ centred) / (len(rewards) - len(counts)))
