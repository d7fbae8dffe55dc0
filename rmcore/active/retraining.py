"""Retraining on the labels so far: reward heads on a backbone that stays as it is.

Everything that a loop asks of it is in the two protocols, so that something slower, such as fine-tuning all weights,
can take its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rmcore.active.acquisition import View
from rmcore.active.differences import CachedDifferences
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.linear_probes import bootstrap_heads, fit_head

L2_FACTORS = (10.0, 1.0, 0.1)
"""Penalties that validation pairs choose from, in units of the default; the strongest of equally good ones wins."""


class Fitted(Protocol):
    """A model after one round."""

    def view(self, pairs: Sequence[PreferencePair]) -> View:
        """Compute margins and features of P pairs as its members see them."""

    def margins(self, pairs: Sequence[PreferencePair]) -> FloatArray:
        """Log-odds of P pairs by the model that is used, (P,): margins times its beta."""

    def arrays(self) -> dict[str, FloatArray]:
        """Give the arrays that `Retrainer.restore` makes it of again."""


class Retrainer(Protocol):
    """Makes a model of labelled pairs."""

    def fit(
        self, labelled: Sequence[PreferencePair], *, seed: int, before: Fitted | None, with_members: bool
    ) -> Fitted:
        """The model of this round; `before` is that of the last one."""

    def restore(self, arrays: dict[str, FloatArray]) -> Fitted:
        """The model whose `arrays` these are."""

    def settings(self) -> dict[str, object]:
        """Whatever makes its models what they are, JSON-ready."""


@dataclass(frozen=True, slots=True, eq=False)
class FittedHeads:
    """One reward head that is used, and members that disagree; the same one where nobody asks for disagreement.

    head: (D,) fitted on all labelled pairs.
    members: (M, D)
    l2: penalty that they were fitted with.
    """

    head: FloatArray
    members: FloatArray
    l2: float
    differences: CachedDifferences

    def view(self, pairs: Sequence[PreferencePair]) -> View:
        """Compute margins and features of P pairs as the members see them."""
        found = self.differences(pairs)
        return View(self.members @ found.T, found, [pair.prompt_id for pair in pairs])

    def margins(self, pairs: Sequence[PreferencePair]) -> FloatArray:
        """Margins of P pairs, (P,)."""
        return np.asarray(self.differences(pairs) @ self.head)

    def arrays(self) -> dict[str, FloatArray]:
        """Head, members and penalty."""
        return {"head": self.head, "members": self.members, "l2": np.array(self.l2)}


class HeadRetrainer:
    """Fits heads exactly, on features that are computed once.

    Args:
        differences: of all pairs that will be asked about.
        num_members: bootstrap heads, where an acquisition function asks how much members disagree.
        validation: labelled pairs that choose the penalty in each round; none: the default of `fit_head`.

    Raises:
        ConfigError: fewer than two members.
    """

    def __init__(
        self,
        differences: CachedDifferences,
        *,
        num_members: int = 4,
        validation: Sequence[PreferencePair] = (),
    ) -> None:
        if num_members < 2:
            raise ConfigError(f"num_members={num_members}: one member cannot disagree with itself; fit at least two.")
        self.differences, self.num_members, self.validation = differences, num_members, list(validation)

    def fit(
        self, labelled: Sequence[PreferencePair], *, seed: int, before: Fitted | None, with_members: bool
    ) -> FittedHeads:
        """Fit on the labelled pairs.

        Args:
            labelled: N pairs, at least one.
            seed: of the bootstrap draws.
            before: heads of the last round, where the fits start. The problem is convex, so this saves time and moves
                the outcome by no more than the fit's tolerance.
            with_members: whether disagreement will be asked for; otherwise the head is the only member.

        Raises:
            DataError: there are no pairs, or members are wanted of pairs of one prompt.
        """
        x = self.differences(labelled)
        last = before if isinstance(before, FittedHeads) else None
        head, l2 = self._choose(x, None if last is None else last.head)
        if not with_members:
            return FittedHeads(head, head[None], l2, self.differences)
        starts = np.tile(head, (self.num_members, 1))
        if last is not None and len(last.members) == self.num_members:
            starts = last.members
        members = bootstrap_heads(
            x,
            [pair.prompt_id for pair in labelled],
            self.num_members,
            seed,
            l2=l2,
            starts=starts,
        )
        return FittedHeads(head, members, l2, self.differences)

    def _choose(self, x: FloatArray, start: FloatArray | None) -> tuple[FloatArray, float]:
        """The head, and the penalty under which the validation pairs are likeliest."""
        default = float(x.shape[1])
        if not self.validation:
            return fit_head(x, start=start, l2=default), default
        held_out = self.differences(self.validation)
        found: list[tuple[float, FloatArray, float]] = []
        for factor in L2_FACTORS:
            head = fit_head(x, start=start, l2=factor * default)
            found.append((float(np.logaddexp(0, -(held_out @ head)).mean()), head, factor * default))
            start = head
        _, head, l2 = min(found, key=lambda one: one[0])
        return head, l2

    def restore(self, arrays: dict[str, FloatArray]) -> FittedHeads:
        """The heads that were stored."""
        return FittedHeads(arrays["head"], arrays["members"], float(arrays["l2"]), self.differences)

    def settings(self) -> dict[str, object]:
        """Give the number of members, and the validation pairs with their labels."""
        return {
            "retrained": "heads",
            "num_members": self.num_members,
            "validation": [[pair.pair_id, pair.chosen] for pair in self.validation],
        }
