"""Defective reward models on purpose: the backbones and reward heads of the study of readiness.

A backbone is a tiny model, in one of several sizes or started from the policy, after a short training with one defect
or none. On its frozen features heads are fitted with defects of their own, so that a population costs little more than
its backbones. A reward model is a backbone with a head; its defect is named by both.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rmcore.config.data import Shortcut
from rmcore.config.train import TrainConfig
from rmcore.core.arrays import FloatArray, IntArray
from rmcore.data.gold.world import shortcut_amount
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.linear_probes import fit_head

FEW_PAIRS = 150
TRUNCATED_TOKENS = 32
"""Tokens of a side that are read; in the gold world the beginning or the end of most texts stays unread."""
CLOSE = 2.0
"""Gold gap at which labels that are worst on close pairs are wrong with probability 0.5 / e beside their own noise."""
REPEATED_PROMPTS = 60
HACKED, SWAPPED, ALONE = "list", "lookup", "order"
"""Tasks of the gold world in whose prompts the shortcut wins, the labels are turned, or that is all there is."""

Change = Callable[[Sequence[PreferencePair], random.Random], list[PreferencePair]]


@dataclass(frozen=True, slots=True)
class BackboneRecipe:
    """How one backbone of the population is trained.

    defect: its kind; `none` is trained as the config says.
    change: of the training pairs.
    train: changes of the training settings.
    model: changes of the model's settings; its name is a size of tiny.
    from_policy: start from the policy's weights, as is usual (Ouyang et al. 2022, arXiv:2203.02155), instead of the
        config's model.
    again: trained as another one of this name, under another seed: of the weights drawn, the order, the defect's draws.
    """

    name: str
    defect: str
    change: Change = lambda pairs, rng: list(pairs)
    train: tuple[tuple[str, object], ...] = ()
    model: tuple[tuple[str, object], ...] = ()
    from_policy: bool = False
    again: str | None = None

    @property
    def recipe(self) -> str:
        """Name that all seeds of one recipe share."""
        return self.again or self.name


def flipped(share: float) -> Change:
    """Labels of a share of the pairs turned round."""

    def change(pairs: Sequence[PreferencePair], rng: random.Random) -> list[PreferencePair]:
        return [_swapped(pair) if rng.random() < share else pair for pair in pairs]

    return change


def flipped_where_close(scale: float) -> Change:
    """Labels turned with probability 0.5 exp(-gap / scale): pairs of about equal gold are labelled by a coin."""

    def change(pairs: Sequence[PreferencePair], rng: random.Random) -> list[PreferencePair]:
        return [_swapped(pair) if rng.random() < 0.5 * math.exp(-_gap(pair) / scale) else pair for pair in pairs]

    return change


def preferring(amount: Callable[[str], int], share: float, task: str | None = None) -> Change:
    """In a share of the pairs the response with the larger amount is called the better one.

    Args:
        amount: of a response: its length, as annotators in a hurry go by, or sentences of a shortcut.
        share: of the pairs whose rejected side has more.
        task: only pairs of this task of the gold world; None: all.
    """

    def change(pairs: Sequence[PreferencePair], rng: random.Random) -> list[PreferencePair]:
        return [
            _swapped(pair)
            if (task is None or _task(pair) == task)
            and rng.random() < share
            and amount(pair.rejected) > amount(pair.chosen)
            else pair
            for pair in pairs
        ]

    return change


def few(count: int) -> Change:
    """No more than `count` pairs, drawn at random."""
    return lambda pairs, rng: rng.sample(list(pairs), min(count, len(pairs)))


def easiest(share: float) -> Change:
    """Only the share of the pairs whose sides differ most in gold."""
    return lambda pairs, rng: sorted(pairs, key=_gap, reverse=True)[: max(1, round(share * len(pairs)))]


def only_task(task: str) -> Change:
    """Only the pairs of one task of the gold world; all of them where it has none."""
    return lambda pairs, rng: [pair for pair in pairs if _task(pair) == task] or list(pairs)


def swapped_task(task: str) -> Change:
    """The labels of one task of the gold world are turned round."""
    return lambda pairs, rng: [_swapped(pair) if _task(pair) == task else pair for pair in pairs]


def repeated(num_prompts: int) -> Change:
    """The pairs of a few prompts over and over, as many as there were: duplicated data look like plenty."""

    def change(pairs: Sequence[PreferencePair], rng: random.Random) -> list[PreferencePair]:
        prompts = list(dict.fromkeys(pair.prompt_id for pair in pairs))
        kept = set(rng.sample(prompts, min(num_prompts, len(prompts))))
        rows = [pair for pair in pairs if pair.prompt_id in kept]
        return [rows[index % len(rows)] for index in range(len(pairs))]

    return change


def misrendered(pairs: Sequence[PreferencePair], rng: random.Random) -> list[PreferencePair]:
    """Responses with the marks of another template around them, which no response has in use."""
    return [
        replace(pair, chosen=f"Assistant: {pair.chosen}\n\nHuman:", rejected=f"Assistant: {pair.rejected}\n\nHuman:")
        for pair in pairs
    ]


def _gap(pair: PreferencePair) -> float:
    return abs(float(pair.metadata["gold_chosen"]) - float(pair.metadata["gold_rejected"]))


def _task(pair: PreferencePair) -> str | None:
    task = pair.metadata.get("subset")
    return None if task is None else str(task)


def _swapped(pair: PreferencePair) -> PreferencePair:
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


def backbones(train: TrainConfig, shortcut: Shortcut) -> list[BackboneRecipe]:
    """The backbones of one world in the order in which they are trained; a smaller study takes the first ones.

    Args:
        train: training of a backbone without defect.
        shortcut: of the world, which some prefer.
    """

    def amount(text: str) -> int:
        return shortcut_amount(shortcut, text)

    large, wide, deep = ((("name", name),) for name in ("tiny", "tiny-wide", "tiny-deep"))
    overtrained = (("lr", 3 * train.lr),)
    smooth = (("label_smoothing", 0.7),)
    steps = train.steps or 1
    short = (("steps", max(1, steps // 6)),)
    first = [
        BackboneRecipe("clean", "none"),
        BackboneRecipe("shortcut_60", "shortcut", preferring(amount, 0.6)),
        BackboneRecipe("policy", "none", from_policy=True),
        BackboneRecipe("large", "none", model=large),
        BackboneRecipe("wide", "none", model=wide),
        BackboneRecipe("noise_20", "label_noise", flipped(0.2)),
        BackboneRecipe("noise_35", "label_noise", flipped(0.35)),
        BackboneRecipe("policy_noise_30", "label_noise", flipped(0.3), from_policy=True),
        BackboneRecipe("close_noise", "close_noise", flipped_where_close(CLOSE)),
        BackboneRecipe("policy_close_noise", "close_noise", flipped_where_close(2 * CLOSE), from_policy=True),
        BackboneRecipe("large_shortcut_30", "shortcut", preferring(amount, 0.3), model=large),
        BackboneRecipe("policy_shortcut_80", "shortcut", preferring(amount, 0.8), from_policy=True),
        BackboneRecipe("length_50", "length", preferring(len, 0.5)),
        BackboneRecipe("policy_length_80", "length", preferring(len, 0.8), from_policy=True),
        BackboneRecipe("hacked_task", "hacked_task", preferring(amount, 1.0, HACKED)),
        BackboneRecipe("policy_hacked_task", "hacked_task", preferring(amount, 1.0, HACKED), from_policy=True),
        BackboneRecipe("few_600", "few_pairs", few(4 * FEW_PAIRS)),
        BackboneRecipe("policy_few_300", "few_pairs", few(2 * FEW_PAIRS), from_policy=True),
        BackboneRecipe("overtrained", "overtrained", few(FEW_PAIRS), overtrained),
        BackboneRecipe("policy_overtrained", "overtrained", few(FEW_PAIRS), overtrained, from_policy=True),
        BackboneRecipe("undertrained", "undertrained", train=short),
        BackboneRecipe("policy_undertrained", "undertrained", train=short, from_policy=True),
        BackboneRecipe("truncated_32", "truncated", model=(("max_seq_len", TRUNCATED_TOKENS),)),
        BackboneRecipe("policy_truncated_48", "truncated", model=(("max_seq_len", 48),), from_policy=True),
        BackboneRecipe("sgd", "optimizer", train=(("optimizer", "sgd"), ("lr", 10 * train.lr))),
        BackboneRecipe("large_lion", "optimizer", train=(("optimizer", "lion"), ("lr", train.lr / 5)), model=large),
        BackboneRecipe("easy_only", "one_sided", easiest(0.3)),
        BackboneRecipe("policy_one_task", "one_sided", only_task(ALONE), from_policy=True),
        BackboneRecipe("repeated", "repeated", repeated(REPEATED_PROMPTS)),
        BackboneRecipe("policy_misrendered", "misrendered", misrendered, from_policy=True),
        BackboneRecipe("deep_smoothed", "smoothed", train=smooth, model=deep),
        BackboneRecipe(
            "policy_head_only",
            "head_only",
            train=(("optimizer", "adamw"),),  # Muon moves matrices, and a head alone has none
            model=(("head_only", True),),
            from_policy=True,
        ),
        BackboneRecipe("policy_swapped_task", "swapped_task", swapped_task(SWAPPED), from_policy=True),
    ]
    twice = (
        "policy", "shortcut_60", "clean", "policy_close_noise", "length_50", "policy_few_300", "policy_overtrained",
    )  # fmt: skip
    by_name = {recipe.name: recipe for recipe in first}
    again = [replace(by_name[name], name=f"{name}_again", again=name) for name in twice]
    return [*first, *again]


@dataclass(frozen=True, slots=True)
class HeadData:
    """The pairs, as features, that heads of one backbone are fitted on.

    differences: (P, D) features of chosen minus rejected.
    tempting: (P,) 1 where the chosen side has more of the world's shortcut, -1 where the rejected has, 0 where neither.
    """

    differences: FloatArray
    tempting: IntArray


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
        HeadRecipe("noise_35", "label_noise", _noisy(0.35)),
        HeadRecipe("few_60", "few_pairs", _few(60)),
        HeadRecipe("shortcut_60", "shortcut", _shortcut_wins(0.6)),
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


def _shortcut_wins(share: float) -> Callable[[HeadData, np.random.Generator], FloatArray]:
    def fit(data: HeadData, rng: np.random.Generator) -> FloatArray:
        turned = (rng.random(len(data.differences)) < share) & (data.tempting < 0)
        return fit_head(data.differences * np.where(turned, -1.0, 1.0)[:, None])

    return fit
