"""How much the label of a pair would tell: acquisition functions over a pool of unlabelled pairs.

Higher is more informative. All of them start from one pass of the pool through each backbone (`look`); a new one is a
class with a `score_view`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.special import entr, expit

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.core.progress import Report, counting_on, silent
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.ensembles.features import pair_features

POOL_FIELDS = ("prompt", "response_a", "response_b")


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Margins of P pairs. Which side is called chosen says nothing: no function reads it.

    margins: (M, P) rewards of the first side minus those of the second, times the member's beta: the log-odds that it
        prefers the first.
    prompt_ids: (P,)
    """

    margins: FloatArray
    prompt_ids: Sequence[str]


PoolItem = Any
"""A mapping or an object with `POOL_FIELDS`, or a PreferencePair; which of its sides is called chosen says nothing."""


def unlabelled(item: PoolItem) -> PreferencePair:
    """Return an item of a pool as a pair whose `chosen` is response_a, which says nothing.

    Raises:
        DataError: one of the three is missing, is empty, or both responses are the same.
    """
    if isinstance(item, PreferencePair):
        return item
    try:
        texts = [item[name] if isinstance(item, Mapping) else getattr(item, name) for name in POOL_FIELDS]
    except (KeyError, AttributeError) as missing:
        raise DataError(
            f"an item of the pool ({type(item).__name__}) lacks one of {', '.join(POOL_FIELDS)}: {missing}. Give all "
            "three, or a PreferencePair."
        ) from missing
    return PreferencePair(*texts)


def look(pool: Sequence[PoolItem], model: RewardModelEnsemble, *, report: Report = silent) -> View:
    """Run each backbone once over the pool; members that share one cost a matrix product.

    Args:
        pool: P items; their labels are not used.
        model: one member or more.
        report: told of the sides done, over all backbones.

    Raises:
        DataError: the pool is empty.
        ModelError: a margin is not finite.
    """
    if not pool:
        raise DataError("the pool is empty: there is nothing to choose from. Pass pairs that are not labelled yet.")
    pool = [unlabelled(item) for item in pool]
    backbones = model.members.backbones
    by_backbone = []
    for number, shared in enumerate(backbones):
        first, second = pair_features(shared.rm, pool, report=counting_on(report, number, len(backbones)))
        by_backbone.append(np.array(shared.betas)[:, None] * (np.stack(shared.heads) @ (first - second).T))
    margins = np.concatenate(by_backbone)
    broken = np.flatnonzero(~np.isfinite(margins).all(axis=0))
    if len(broken):
        raise ModelError(
            f"{len(broken)} pairs of the pool have no finite margin, the first is {pool[broken[0]].pair_id}: "
            "a member's weights are broken. Leave it out, or train it again."
        )
    return View(margins, [pair.prompt_id for pair in pool])


class AcquisitionFunction(ABC):
    """Scores pairs by how much their labels would tell."""

    needs_members: ClassVar[bool] = False
    """Whether it is about disagreement, which one member has none of."""

    def score(self, pool: Sequence[PoolItem], model: RewardModelEnsemble) -> FloatArray:
        """Scores of P pairs, (P,), higher for more informative.

        Raises:
            DataError, ModelError: see `look`.
            ConfigError: one member where several are needed.
        """
        return self.score_view(self.checked(look(pool, model)))

    def checked(self, view: View) -> View:
        """`view`, if this function can work on it.

        Raises:
            ConfigError: one member where several are needed.
        """
        if self.needs_members and len(view.margins) < 2:
            raise ConfigError(
                f"{type(self).__name__} is about how much members disagree, and there is one: name several "
                "checkpoints, or take an acquisition function for one model."
            )
        return view

    @abstractmethod
    def score_view(self, view: View) -> FloatArray:
        """Scores of the P pairs of a view."""


class RandomSampling(AcquisitionFunction):
    """Any pair: what every other function has to beat."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def score_view(self, view: View) -> FloatArray:
        """Independent uniform numbers."""
        return np.asarray(np.random.default_rng(self.seed).random(view.margins.shape[1]))


class MarginEntropy(AcquisitionFunction):
    """Entropy of the predicted label, in nats: highest where the mean probability is one half (uncertainty sampling).

    Source: Lewis and Gale 1994, arXiv:cmp-lg/9407020.
    """

    def score_view(self, view: View) -> FloatArray:
        """H(mean over members of sigmoid(margin))."""
        chance = expit(view.margins).mean(axis=0)
        return np.asarray(entr(chance) + entr(1 - chance))


class UncertaintySampling(AcquisitionFunction):
    """Variance of the margin over members, in squared logits."""

    needs_members = True

    def score_view(self, view: View) -> FloatArray:
        """Var over members, divided by M."""
        return np.asarray(view.margins.var(axis=0))


ACQUISITIONS: dict[str, Callable[[int], AcquisitionFunction]] = {
    "random": RandomSampling,
    "entropy": lambda seed: MarginEntropy(),
    "variance": lambda seed: UncertaintySampling(),
}
"""By the name that the command line has for it; each is made from a seed."""


def select(view: View, k: int, acquisition: AcquisitionFunction, *, max_per_prompt: int | None = None) -> list[int]:
    """Positions of the k pairs to label next, the most informative first, equal ones by position.

    Args:
        view: of the pool.
        k: how many.
        acquisition: by which function.
        max_per_prompt: at most so many of one prompt, whose pairs tell much the same; None: any number.

    Raises:
        ConfigError: k is below 1 or above what the pool allows, or members are missing.
        ModelError: a score is not a number.
    """
    acquisition.checked(view)
    size = view.margins.shape[1]
    room = Counter(view.prompt_ids)
    available = size if max_per_prompt is None else sum(min(count, max_per_prompt) for count in room.values())
    if not 1 <= k <= available:
        raise ConfigError(
            f"{k} pairs are requested, and the pool of {size} has {available} to give"
            f"{'' if max_per_prompt is None else f' with at most {max_per_prompt} of a prompt'}; ask for fewer."
        )
    scores = acquisition.score_view(view)
    if np.isnan(scores).any():
        raise ModelError(f"{int(np.isnan(scores).sum())} pairs have a score that is not a number; no order follows.")
    taken: Counter[str] = Counter()
    chosen = []
    for index in np.argsort(-scores, kind="stable").tolist():
        prompt_id = view.prompt_ids[index]
        taken[prompt_id] += 1
        if max_per_prompt is None or taken[prompt_id] <= max_per_prompt:
            chosen.append(index)
    return chosen[:k]
