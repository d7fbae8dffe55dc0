"""The objective of a search: one number of the validation pairs of a training, and its parts by prompt.

A value is the sum over prompts of a numerator, divided by that of a denominator, so that the same two arrays give the
value, the paired test of two trials over prompts, and the bootstrap over prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.data.pair import PreferencePair
from rmcore.data.table import rewards_table
from rmcore.evaluation.ranking import pair_means, ratio
from rmcore.evaluation.rewards import RewardTable
from rmcore.policy.logged_answers import logged_table

Objective = Literal["accuracy", "loss", "best-of-k", "length-matched"]
METRICS: dict[Objective, str] = {
    "accuracy": "pairwise_accuracy",
    "loss": "loss",
    "length-matched": "length_matched_accuracy",
}
"""Objectives that are a mean over pairs, by its name in `rmcore.evaluation.ranking.pair_means`."""
LABELS: dict[Objective, str] = {
    "accuracy": "pairwise accuracy",
    "loss": "loss",
    "length-matched": "length-matched accuracy",
    "best-of-k": "best-of-k accuracy",
}
"""Objectives as people read them."""
DEFINITIONS: dict[Objective, str] = {
    "accuracy": "share of pairs whose chosen side gets the higher reward; ties count half",
    "loss": "mean of log(1 + exp(−β · margin)) over pairs, nats; 0.693 is guessing",
    "length-matched": "pairwise accuracy where the two sides differ by less than 15 % in characters",
    "best-of-k": "share of prompts with several labelled answers whose top scored answer was never the rejected one",
}
FEWEST_PROMPTS = 10
"""Prompts that a comparison of trials needs; readiness asks for as many (`rmcore.policy.logged_answers`)."""


def higher_is_better(objective: Objective) -> bool:
    """Whether more of an objective is better: all but the loss."""
    return objective != "loss"


def unit(objective: Objective) -> str:
    """The unit of an objective, as figures name it."""
    return "nats" if objective == "loss" else "share"


@dataclass(frozen=True, slots=True)
class Scores:
    """An objective on some pairs, by prompt."""

    prompts: tuple[str, ...]
    """(C,) prompt ids, sorted."""
    sums: FloatArray
    """(C,) numerators."""
    counts: FloatArray
    """(C,) denominators: pairs that count, or 1 where a prompt is asked once; 0 where it says nothing."""

    @property
    def value(self) -> float:
        """The objective; NaN where no prompt says anything."""
        return float(ratio(np.array([self.sums.sum()]), np.array([self.counts.sum()]))[0])

    def weighted(self, weights: FloatArray) -> FloatArray:
        """The objective under prompt weights (B, C), (B,)."""
        return ratio(weights @ self.sums, weights @ self.counts)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return {"prompts": list(self.prompts), "sums": self.sums.tolist(), "counts": self.counts.tolist()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> "Scores":
        """Read a record of `to_dict` back."""
        return cls(tuple(record["prompts"]), np.array(record["sums"]), np.array(record["counts"]))


def score(
    objective: Objective, rewards: pd.DataFrame, pairs: Sequence[PreferencePair] = (), *, beta: float = 1.0
) -> Scores:
    """Measure an objective on a reward table.

    Args:
        objective: what is measured.
        rewards: one row a pair with the columns of `rmcore.evaluation.rewards.COLUMNS`.
        pairs: the pairs behind the table; best-of-k tells answers apart by their texts.
        beta: scale of the margins in the loss.

    Raises:
        DataError: the table cannot be used.
    """
    if objective == "best-of-k":
        return _best_of_k(logged_table(pairs, rewards))
    table = RewardTable.from_frame(rewards, beta=beta)
    [mean] = [one for one in pair_means(table) if one.name == METRICS[objective]]
    prompts = np.unique(rewards["prompt_id"].astype(str).to_numpy(dtype=object))
    inside = table.prompt[mean.mask]
    sums = np.bincount(inside, mean.values[mean.mask], minlength=table.num_prompts)
    counts = np.bincount(inside, minlength=table.num_prompts)
    return Scores(tuple(prompts), sums.astype(np.float64), counts.astype(np.float64))


def _best_of_k(table: pd.DataFrame) -> Scores:
    """How often the top scored answer of a prompt was never rejected; equal top rewards share the prompt's point.

    A prompt with one pair asks nothing that the accuracy does not, and one whose answers were all rejected once has no
    right answer: neither counts.
    """
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for _, own in table.groupby("prompt", sort=True):
        prompt = str(own["prompt_id"].iloc[0])
        sums.setdefault(prompt, 0.0)
        counts.setdefault(prompt, 0.0)
        rejected = set(own["rejected"])
        if len(own) < 2 or not set(own["chosen"]) - rejected:
            continue
        sides = pd.concat(
            [
                own[["chosen", "reward_chosen"]].set_axis(["answer", "reward"], axis=1),
                own[["rejected", "reward_rejected"]].set_axis(["answer", "reward"], axis=1),
            ]
        )
        reward = sides.groupby("answer")["reward"].mean()
        top = reward.index[reward == reward.max()]
        sums[prompt] += float(np.mean([answer not in rejected for answer in top]))
        counts[prompt] += 1.0
    prompts = tuple(sorted(sums))
    return Scores(prompts, np.array([sums[one] for one in prompts]), np.array([counts[one] for one in prompts]))


def require_objective(objective: Objective, pairs: Sequence[PreferencePair], what: str = "validation") -> None:
    """Refuse an objective that no trial could report on these pairs, or by luck alone, before anything is trained.

    Raises:
        DataError: there are no pairs, or those of fewer than FEWEST_PROMPTS prompts say anything about the objective.
    """
    if not pairs:
        raise DataError(
            f"there are no {what} pairs, and the search compares on them: raise data.{what}_fraction above 0."
        )
    rewards = rewards_table(pairs, np.tile([1.0, 0.0], (len(pairs), 1)))
    num_telling = int(np.count_nonzero(score(objective, rewards, pairs).counts))
    if num_telling >= FEWEST_PROMPTS:
        return
    if num_telling:
        raise DataError(
            f"objective {objective} is about pairs of {num_telling} of the {what} prompts, and fewer than "
            f"{FEWEST_PROMPTS} tell trials, or the winner and the defaults, apart by luck alone. Raise "
            f"data.{what}_fraction, or take another --objective."
        )
    missing = {
        "length-matched": "no pair has two sides of about the same length (within 15 %)",
        "best-of-k": "no prompt has more than one pair with an answer that was never the rejected one",
    }.get(objective, "no pair says anything about it")
    raise DataError(
        f"objective {objective} cannot be reported by any trial: of the {len(pairs)} {what} pairs, {missing}. Take "
        "another --objective, or data that have such pairs."
    )
