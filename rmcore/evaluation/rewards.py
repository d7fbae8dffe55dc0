"""The per-pair reward table: a checked data frame turned into numpy arrays that all metrics read.

A NaN reward would silently turn every mean into NaN or, worse, drop out of a comparison; so it is refused here, once.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.core.errors import ConfigError, DataError

COLUMNS = ("pair_id", "prompt_id", "reward_chosen", "reward_rejected", "chosen_chars", "rejected_chars", "subset")
CHOSEN_PROBABILITY = "chosen_probability"
"""Column that may be there or not, and empty; the rest of the house calls it the same (rmcore.data.pair)."""
LENGTH_MATCHED = 0.15
"""Pairs count as length-matched when their lengths differ by less than this share of the longer side."""


@dataclass(frozen=True, slots=True)
class RewardTable:
    """P pairs over C prompts as arrays. Prompt indices follow sorted prompt ids, so the row order does not matter."""

    chosen: FloatArray
    """(P,) rewards of the chosen sides, logits."""
    rejected: FloatArray
    """(P,) rewards of the rejected sides, logits."""
    prompt: IntArray
    """(P,) prompt of each pair, 0 to C-1."""
    num_prompts: int
    """C."""
    chosen_chars: FloatArray
    """(P,) characters of the chosen completions."""
    rejected_chars: FloatArray
    """(P,) characters of the rejected completions."""
    subset: npt.NDArray[np.object_]
    """(P,) subset names, None where there is none."""
    beta: float = 1.0
    """Scale of the margins, the reward model's."""
    chosen_probability: FloatArray | None = None
    """(P,) how likely another label of the pair names the same side; None unless it is known of all pairs."""

    @property
    def margin(self) -> FloatArray:
        """(P,) reward_chosen - reward_rejected."""
        return self.chosen - self.rejected

    @property
    def log_odds(self) -> FloatArray:
        """(P,) beta * margin: P(chosen preferred) is its sigmoid, and all that is about probabilities reads it."""
        return self.beta * self.margin

    @property
    def num_pairs(self) -> int:
        """P."""
        return len(self.chosen)

    @property
    def length_matched(self) -> BoolArray:
        """(P,) whether the two completions are of about the same length."""
        longer = np.maximum(self.chosen_chars, self.rejected_chars)
        return np.abs(self.chosen_chars - self.rejected_chars) < LENGTH_MATCHED * longer

    @classmethod
    def from_frame(cls, rewards: pd.DataFrame, name: str = "rewards", *, beta: float = 1.0) -> "RewardTable":
        """Check and convert a frame with the columns of `COLUMNS`, one row a pair; `name` is used in messages.

        Raises:
            ConfigError: beta is no finite number above 0.
            DataError: a column is missing or of a wrong type, there is no row, a prompt id is null, a reward is not
                finite (the pair ids are named), or a chosen_probability lies outside of 0 to 1.
        """
        if not 0 < beta < math.inf:
            raise ConfigError(f"beta={beta} scales margins into log-odds; pass the reward model's, above 0.")
        missing = [column for column in COLUMNS if column not in rewards.columns]
        if missing:
            raise DataError(
                f"{name} lacks the columns {', '.join(missing)}: metrics cannot be computed. "
                f"Pass one row a pair with {', '.join(COLUMNS)}."
            )
        if rewards.empty:
            raise DataError(
                f"{name} has no pairs: there is nothing to measure. Check the evaluation data and its limit."
            )
        if rewards["prompt_id"].isna().any():
            raise DataError(
                f"{name} has {int(rewards['prompt_id'].isna().sum())} pairs without prompt_id: intervals are drawn "
                "over prompts. Fill the column."
            )
        ids, prompt = np.unique(rewards["prompt_id"].astype(str).to_numpy(dtype=object), return_inverse=True)
        subset = rewards["subset"].astype(object).where(rewards["subset"].notna(), None).to_numpy(dtype=object)
        return cls(
            chosen=_finite(rewards, "reward_chosen", name),
            rejected=_finite(rewards, "reward_rejected", name),
            prompt=prompt.astype(np.int64),
            num_prompts=len(ids),
            chosen_chars=_finite(rewards, "chosen_chars", name),
            rejected_chars=_finite(rewards, "rejected_chars", name),
            subset=subset,
            beta=beta,
            chosen_probability=_chosen_probability(rewards, name),
        )

    @classmethod
    def of_rewards(cls, rewards: FloatArray, *, beta: float = 1.0) -> "RewardTable":
        """(P, 2) finite rewards, chosen first, of pairs of which nothing else is known: each is a prompt of its own."""
        num = len(rewards)
        unknown = np.zeros(num)
        return cls(
            chosen=rewards[:, 0],
            rejected=rewards[:, 1],
            prompt=np.arange(num),
            num_prompts=num,
            chosen_chars=unknown,
            rejected_chars=unknown,
            subset=np.full(num, None, dtype=object),
            beta=beta,
        )

    def take(self, mask: BoolArray) -> "RewardTable":
        """The pairs where `mask` (P,) is true, with prompts renumbered."""
        ids, prompt = np.unique(self.prompt[mask], return_inverse=True)
        by_pair = ("chosen", "rejected", "chosen_chars", "rejected_chars", "subset")
        taken = {name: getattr(self, name)[mask] for name in by_pair}
        known = None if self.chosen_probability is None else self.chosen_probability[mask]
        return replace(self, **taken, prompt=prompt.astype(np.int64), num_prompts=len(ids), chosen_probability=known)


def _chosen_probability(frame: pd.DataFrame, name: str) -> FloatArray | None:
    if CHOSEN_PROBABILITY not in frame.columns or frame[CHOSEN_PROBABILITY].isna().any():
        return None
    values = _finite(frame, CHOSEN_PROBABILITY, name)
    if ((values < 0) | (values > 1)).any():
        raise DataError(
            f"{name} has a {CHOSEN_PROBABILITY} of {values.min():g} to {values.max():g}: it is the share of labels "
            "that would name the chosen side, from 0 to 1. Correct the column, or rename it."
        )
    return values


def _finite(frame: pd.DataFrame, column: str, name: str) -> FloatArray:
    try:
        values = frame[column].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} column {column} is not numeric ({error}): pass plain numbers.") from error
    bad = ~np.isfinite(values)
    if bad.any():
        ids = frame.loc[bad, "pair_id"].astype(str).tolist()
        shown = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
        raise DataError(
            f"{name} has {len(ids)} pairs whose {column} is NaN, infinite or null: {shown}. The model or its precision "
            "failed on them; score them again in float32 and look at their texts."
        )
    return values
