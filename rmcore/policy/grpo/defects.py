"""What can be wrong with a reward model: the backbones and reward heads of the validation study.

A backbone is the tiny model after a short training with one defect, or none. On its frozen features heads are fitted
with defects of their own, so that a population costs little more than its backbones. A reward model is a backbone with
a head; its defect is named by both.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rmcore.config.pipeline import TrainConfig
from rmcore.core.arrays import FloatArray, IntArray
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.linear_probes import fit_head

FEW_PAIRS = 150
TRUNCATED_TOKENS = 32
"""Of a side; in the gold world that leaves the beginning of most prompts and responses, or the end of them, unread."""

Change = Callable[[Sequence[PreferencePair], random.Random], list[PreferencePair]]


@dataclass(frozen=True, slots=True)
class BackboneRecipe:
    """How one backbone of the population is trained.

    defect: its kind; `none` is trained as the config says.
    change: of the training pairs.
    train: changes of the training settings.
    max_seq_len: tokens of a side that it reads; None: as the config says.
    from_policy: start from the policy's weights, as is usual (Ouyang et al. 2022, arXiv:2203.02155), instead of the
        config's model.
    """

    name: str
    defect: str
    change: Change = lambda pairs, rng: list(pairs)
    train: tuple[tuple[str, object], ...] = ()
    max_seq_len: int | None = None
    from_policy: bool = False


def flipped(share: float) -> Change:
    """Labels of a share of the pairs turned round."""

    def change(pairs: Sequence[PreferencePair], rng: random.Random) -> list[PreferencePair]:
        return [_swapped(pair) if rng.random() < share else pair for pair in pairs]

    return change


def preferring_length(share: float) -> Change:
    """In a share of the pairs the longer response is called the better one, as annotators in a hurry do."""

    def change(pairs: Sequence[PreferencePair], rng: random.Random) -> list[PreferencePair]:
        return [
            _swapped(pair) if rng.random() < share and len(pair.rejected) > len(pair.chosen) else pair for pair in pairs
        ]

    return change


def few(count: int) -> Change:
    """No more than `count` pairs, drawn at random."""
    return lambda pairs, rng: rng.sample(list(pairs), min(count, len(pairs)))


def _swapped(pair: PreferencePair) -> PreferencePair:
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


def backbones(train: TrainConfig) -> list[BackboneRecipe]:
    """The backbones in the order in which they are trained; a smaller study takes the first ones."""
    return [
        BackboneRecipe("clean", "none"),
        BackboneRecipe("length", "shortcut", preferring_length(0.5)),
        BackboneRecipe("from_policy", "none", from_policy=True),
        BackboneRecipe("noise", "label_noise", flipped(0.25)),
        BackboneRecipe("overtrained", "overtrained", few(FEW_PAIRS), (("lr", 3 * train.lr),)),
        BackboneRecipe("truncated", "truncated", max_seq_len=TRUNCATED_TOKENS),
        BackboneRecipe("lion", "optimizer", train=(("optimizer", "lion"), ("lr", train.lr / 5))),
        BackboneRecipe("sgd", "optimizer", train=(("optimizer", "sgd"), ("lr", 10 * train.lr))),
        BackboneRecipe("from_policy_length", "shortcut", preferring_length(0.5), from_policy=True),
        BackboneRecipe("from_policy_adamw", "optimizer", train=(("optimizer", "adamw"),), from_policy=True),
    ]


@dataclass(frozen=True, slots=True)
class HeadData:
    """What heads of one backbone are fitted on.

    differences: (P, D) features of chosen minus rejected.
    longer: (P,) 1 where the chosen side is the longer one, -1 where the rejected is, 0 where neither.
    """

    differences: FloatArray
    longer: IntArray


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """How a head is fitted: its defect, and a function of the data and a generator that gives (D,)."""

    name: str
    defect: str
    fit: Callable[[HeadData, np.random.Generator], FloatArray]


def heads() -> list[HeadRecipe]:
    """The heads that every backbone gets, beside the one it was trained with."""
    return [
        HeadRecipe("refitted", "none", lambda data, rng: fit_head(data.differences)),
        HeadRecipe("noise_20", "label_noise", _noisy(0.2)),
        HeadRecipe("noise_35", "label_noise", _noisy(0.35)),
        HeadRecipe("noise_45", "label_noise", _noisy(0.45)),
        HeadRecipe("few_20", "few_pairs", _few(20)),
        HeadRecipe("few_100", "few_pairs", _few(100)),
        HeadRecipe("length_30", "shortcut", _longer_wins(0.3)),
        HeadRecipe("length_80", "shortcut", _longer_wins(0.8)),
        HeadRecipe("overfitted", "overtrained", _overfitted),
        HeadRecipe("scaled", "wrong_scale", _scaled),
    ]


def _noisy(share: float) -> Callable[[HeadData, np.random.Generator], FloatArray]:
    def fit(data: HeadData, rng: np.random.Generator) -> FloatArray:
        signs = np.where(rng.random(len(data.differences)) < share, -1.0, 1.0)
        return fit_head(data.differences * signs[:, None])

    return fit


def _few(count: int) -> Callable[[HeadData, np.random.Generator], FloatArray]:
    def fit(data: HeadData, rng: np.random.Generator) -> FloatArray:
        taken = rng.choice(len(data.differences), min(count, len(data.differences)), replace=False)
        return fit_head(data.differences[taken])

    return fit


def _longer_wins(share: float) -> Callable[[HeadData, np.random.Generator], FloatArray]:
    def fit(data: HeadData, rng: np.random.Generator) -> FloatArray:
        turned = (rng.random(len(data.differences)) < share) & (data.longer < 0)
        return fit_head(data.differences * np.where(turned, -1.0, 1.0)[:, None])

    return fit


def _overfitted(data: HeadData, rng: np.random.Generator) -> FloatArray:
    """A hundred pairs with next to no prior: all of them are told apart, with huge margins."""
    taken = rng.choice(len(data.differences), min(100, len(data.differences)), replace=False)
    return fit_head(data.differences[taken], l2=1e-2)


def _scaled(data: HeadData, rng: np.random.Generator) -> FloatArray:
    """The right ranking, all rewards ten times as large or as small."""
    return fit_head(data.differences) * rng.choice([0.1, 10.0])
