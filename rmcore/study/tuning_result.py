"""The result of a search: the winner and the defaults, trained anew with fresh seeds and measured on pairs of no trial.

The score that a trial was chosen by flatters it: of many noisy values the best is taken. So the verdict rests on fresh
seeds and on test pairs alone; how much the selected score flattered is the optimism.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.data.table import read_pairs
from rmcore.evaluation.uncertainty import cluster_bootstrap
from rmcore.evaluation.verdicts.estimate import Estimate, SeedSample, estimate_over_seeds
from rmcore.reporting.schema import Metric
from rmcore.stages.interface import VALIDATION_REWARDS
from rmcore.study.cells import NUM_RESAMPLES, prompts_digest
from rmcore.study.objectives import LABELS, Objective, Scores, higher_is_better, score, unit
from rmcore.training.resume import FINISHED_FILE


@dataclass(frozen=True, slots=True)
class Confirmed:
    """One arm under one fresh seed."""

    seed: int
    validation: Scores
    test: Scores
    prompts: str
    """Digest of the test prompts."""
    train_seconds: float


def validation_scores(objective: Objective, folders: Mapping[str, Path], *, beta: float) -> Scores:
    """Measure the objective on the validation pairs of a training, under its best step.

    Args:
        objective: what is measured.
        folders: artifacts of prepare and train.
        beta: of the training.

    Raises:
        DataError: the training left no rewards of validation pairs.
    """
    rewards = folders["train"] / VALIDATION_REWARDS
    if not rewards.is_file():
        raise DataError(
            f"{folders['train']} has no {VALIDATION_REWARDS}: no step of it was measured on validation pairs, so there "
            "is nothing to compare it by. Raise data.validation_fraction."
        )
    pairs = read_pairs(folders["prepare"] / "validation.parquet") if objective == "best-of-k" else ()
    return score(objective, pd.read_parquet(rewards), pairs, beta=beta)


def training_seconds(trained: Path) -> float:
    """Seconds in optimizer steps that a training took, with those of the rungs that it went on from."""
    return float(json.loads((trained / FINISHED_FILE).read_text(encoding="utf-8"))["train_seconds"])


def read_confirmed(seed: int, objective: Objective, folders: Mapping[str, Path], *, beta: float) -> Confirmed:
    """Read what one cell of the confirmation measured, from its artifacts of prepare, train and evaluate."""
    rewards = pd.read_parquet(folders["evaluate"] / "rewards.parquet")
    test = rewards[rewards["split"] == "test"]
    pairs = read_pairs(folders["prepare"] / "test.parquet") if objective == "best-of-k" else ()
    return Confirmed(
        seed,
        validation_scores(objective, folders, beta=beta),
        score(objective, test, pairs, beta=beta),
        prompts_digest(test),
        training_seconds(folders["train"]),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The winner and the defaults over the fresh seeds, on the test pairs and on validation pairs."""

    winner: Estimate
    defaults: Estimate
    difference: Estimate
    """Winner minus defaults, turned so that above zero is better."""
    fresh: tuple[Estimate, Estimate]
    """Validation scores of winner and defaults."""

    @property
    def is_better(self) -> bool:
        """Whether the interval of the difference lies above zero."""
        return self.difference.ci_low is not None and self.difference.ci_low > 0


def compare_arms(objective: Objective, winner: Sequence[Confirmed], defaults: Sequence[Confirmed]) -> Comparison:
    """Estimate both arms and their difference over seeds, paired by seed and by test prompt.

    Raises:
        DataError: a seed measured nothing of the objective on its test pairs.
    """
    sign = 1 if higher_is_better(objective) else -1
    both = [_paired(ours, theirs, sign) for ours, theirs in zip(winner, defaults, strict=True)]
    num_prompts = min(num for _, num in both)
    shared = len({(ours.prompts, theirs.prompts) for ours, theirs in zip(winner, defaults, strict=True)}) == 1

    def over(name: str) -> Estimate:
        samples = [found[name] for found, _ in both]
        return estimate_over_seeds(samples, num_prompts=num_prompts, prompts_shared=shared)

    def fresh(arm: Sequence[Confirmed]) -> Estimate:
        values = [SeedSample(one.validation.value, None) for one in arm]
        return estimate_over_seeds(values, num_prompts=None, prompts_shared=False)

    return Comparison(over("winner"), over("defaults"), over("difference"), (fresh(winner), fresh(defaults)))


def _paired(ours: Confirmed, theirs: Confirmed, sign: int) -> tuple[dict[str, SeedSample], int]:
    """Values with replicates of both arms under one seed and of their difference, and the prompts that carry both.

    On the prompts that both can read: one that reads no hard ones would win by that.
    """
    prompts = tuple(sorted({*ours.test.prompts} & {*theirs.test.prompts}))
    first, second = _on(ours.test, prompts), _on(theirs.test, prompts)
    if first.counts.sum() == 0 or second.counts.sum() == 0:
        raise DataError(
            f"no test pair of seed {ours.seed} says anything about the objective, so winner and defaults cannot be "
            "compared on it; raise data.test_fraction, or take another objective."
        )

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        one, other = first.weighted(weights), second.weighted(weights)
        return {"winner": one, "defaults": other, "difference": sign * (one - other)}

    drawn = cluster_bootstrap(
        compute, len(prompts), num_resamples=NUM_RESAMPLES, seed=int(ours.prompts[:15], 16)
    )  # the same prompts are drawn alike under every seed
    carrying = int(np.count_nonzero((first.counts > 0) & (second.counts > 0)))
    return {name: SeedSample(value, drawn.replicates.get(name)) for name, value in drawn.point.items()}, carrying


def _on(scores: Scores, prompts: tuple[str, ...]) -> Scores:
    """Scores on some of their prompts."""
    places = {prompt: place for place, prompt in enumerate(scores.prompts)}
    at = [places[prompt] for prompt in prompts]
    return Scores(prompts, scores.sums[at], scores.counts[at])


def metric(estimate: Estimate, of: str = "") -> Metric:
    """An estimate over seeds as reports have it; `of` a share, the ends of its t interval are kept within [0, 1]."""

    def shown(value: float | None) -> float | None:
        return min(max(value, 0.0), 1.0) if of == "share" and value is not None else value

    return {
        "value": estimate.value,
        "ci_low": shown(estimate.ci_low),
        "ci_high": shown(estimate.ci_high),
        "num": estimate.num_seeds,
        "reason": estimate.reason,
    }


def is_better(difference: Metric) -> bool:
    """Whether the winner is shown to be better than the defaults: its difference on test pairs lies above zero."""
    return difference["ci_low"] is not None and difference["ci_low"] > 0


def verdict(objective: Objective, difference: Metric, *, are_defaults: bool) -> str:
    """Say in one sentence whether the winner is worth taking; the difference is above zero where it is better."""
    if are_defaults:
        return "No trial was better than the defaults on the validation pairs: keep them."
    shown = shown_difference(difference, objective)
    if is_better(difference):
        return f"Better than the defaults by {shown} of test {LABELS[objective]}."
    is_worse = difference["ci_high"] is not None and difference["ci_high"] < 0
    found = "Worse than the defaults" if is_worse else "Not shown to be better than the defaults"
    return f"{found}: keep them. The difference is {shown} of test {LABELS[objective]}."


def shown_difference(difference: Metric, objective: Objective) -> str:
    """A difference with its interval, in points or nats.

    >>> shown_difference({"value": 0.0123, "ci_low": 0.001, "ci_high": 0.02, "num": 3, "reason": None}, "accuracy")
    '+1.2 points [+0.1, +2.0]'
    """
    is_share = unit(objective) == "share"

    def text(value: Any) -> str:
        return f"{100 * value:+.1f}" if is_share else f"{value:+.3f}"

    word = "points" if is_share else "nats"
    bounds = (
        f"no interval: {difference['reason']}"
        if difference["ci_low"] is None
        else f"{text(difference['ci_low'])}, {text(difference['ci_high'])}"
    )
    return f"{text(difference['value'])} {word} [{bounds}]"
