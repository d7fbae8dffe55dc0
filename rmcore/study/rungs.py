"""Successive halving over the steps of a training: its rungs, who is promoted, how a rung begins where the last ended.

A rung is an ordinary training that `train.stop_step` cuts off, so it is cached, killed and resumed as any other. The
next rung is handed its states and begins there; resuming is exact, so the last rung ends in the same bits as a training
in one piece.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.files import fsync_folder, link_tree
from rmcore.core.tracking import METRICS_FILE
from rmcore.stages.registry import STAGES
from rmcore.study.objectives import Scores
from rmcore.training.resume import RESUME_FOLDER

REDUCTION = 3
"""A rung is this many times as long as the one before, and about one trial of so many is promoted from it."""
NUM_RUNGS = 3
WORSE_LEVEL = 0.05
"""Level of the one-sided test by which a trial is given up as worse than the best one."""
FEWEST_PROMPTS = 8
"""Below so many prompts that differ, the normal approximation of the test is no use."""


@dataclass(frozen=True, slots=True)
class Rungs:
    """The steps of a training at which it is looked at."""

    ends: tuple[int, ...]
    """Steps done at the end of each rung; the last are all of them."""

    @classmethod
    def of(cls, num_steps: int) -> "Rungs":
        """Cut a training into rungs of a ninth, a third and all of its steps; fewer where it has too few."""
        first = max(1, round(num_steps / REDUCTION ** (NUM_RUNGS - 1)))
        ends = [first * REDUCTION**place for place in range(NUM_RUNGS - 1)]
        return cls((*(end for end in ends if end < num_steps), num_steps))

    def config(self, config: PipelineConfig, place: int) -> PipelineConfig:
        """Settings of the rung `place`, from 0, of a training with as many steps as these rungs.

        It is evaluated every first rung's steps, so that every rung ends with an evaluation, and the last one has had
        the same as a training in one piece.
        """
        is_last = place == len(self.ends) - 1
        train = {"eval_every": self.ends[0], "stop_step": None if is_last else self.ends[place]}
        return config.model_copy(update={"train": config.train.model_copy(update=train)})

    def share(self, place: int) -> str:
        """How much of the training a rung ends at, in words."""
        return "all steps" if place == len(self.ends) - 1 else f"step {self.ends[place]} of {self.ends[-1]}"


def expected_share() -> float:
    """Share of a whole training that a trial costs on average, if one of `REDUCTION` is promoted from each rung."""
    ends = [REDUCTION ** (place - NUM_RUNGS + 1) for place in range(NUM_RUNGS)]
    parts = [ends[0], *(after - before for before, after in pairwise(ends))]
    return sum(part / REDUCTION**place for place, part in enumerate(parts))


def hand_over(earlier: Path, unfinished: Path) -> bool:
    """Let a training begin where an earlier rung ended; whether anything was handed over.

    The caller holds the lock of the training's key. What lies there already went on from this rung, or was begun in
    one piece, and stays. The states come last, under another name first: a training begins with them or without.

    Args:
        earlier: artifact of the rung, with its states.
        unfinished: folder in which the next one is written.
    """
    states, place = earlier / RESUME_FOLDER, unfinished / RESUME_FOLDER
    if place.is_dir() or not states.is_dir():
        return False
    unfinished.mkdir(parents=True, exist_ok=True)
    for pattern in STAGES["train"].kept:
        for found in sorted(earlier.glob(pattern)):
            if found.name != RESUME_FOLDER:
                _link_anew(found, unfinished / found.name)
    shutil.copyfile(earlier / METRICS_FILE, unfinished / METRICS_FILE)  # it grows in place, so it is no link
    beside = unfinished / f".{RESUME_FOLDER}.tmp"
    _link_anew(states, beside)
    beside.rename(place)
    fsync_folder(unfinished)
    return True


def _link_anew(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)  # of an attempt that was killed here
    link_tree(source, target)


def is_promoted(value: float, others: Sequence[float], *, higher: bool) -> bool:
    """Whether a trial is among the best third of those that ended this rung so far; the first ones are promoted, too.

    Args:
        value: its value at the rung.
        others: values of the other trials at the same rung.
        higher: whether more is better.

    Source:
        Li et al. 2018, A system for massively parallel hyperparameter tuning, arXiv:1810.05934 (asynchronous halving).
    """
    sign = 1 if higher else -1
    better = sum(sign * other > sign * value for other in others)
    return better < max(1, (len(others) + 1) // REDUCTION)


def prompt_differences(own: Scores, best: Scores) -> FloatArray:
    """Differences of two trials' scores by prompt, (n,), over the prompts that say something about both."""
    places = {prompt: place for place, prompt in enumerate(best.prompts)}
    shared = [(mine, places[prompt]) for mine, prompt in enumerate(own.prompts) if prompt in places]
    here, there = (np.array(one, dtype=np.int64) for one in (zip(*shared, strict=True) if shared else ((), ())))
    both = (own.counts[here] > 0) & (best.counts[there] > 0)
    here, there = here[both], there[both]
    return own.sums[here] / own.counts[here] - best.sums[there] / best.counts[there]


def worse_p(own: Scores, best: Scores, *, higher: bool) -> float:
    """One-sided p that a trial is as good as the best one at the same rung, over prompts as instances.

    1 where it is not worse on average, or too few prompts differ for the test to say anything.

    Source:
        Wilcoxon 1945, Individual comparisons by ranking methods; zeros are split, as in Optuna's WilcoxonPruner.
    """
    from scipy.stats import wilcoxon  # a second to import, which whoever only reads a study need not pay

    differences = prompt_differences(own, best) * (1 if higher else -1)
    if np.count_nonzero(differences) < FEWEST_PROMPTS or differences.mean() >= 0:
        return 1.0
    p = float(wilcoxon(differences, alternative="less", zero_method="zsplit").pvalue)
    return 1.0 if math.isnan(p) else p
