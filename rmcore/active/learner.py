"""The loop: train heads on what is labelled, choose what to label next, ask, repeat."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rmcore.active.acquisition import ACQUISITIONS, AcquisitionFunction, View, select
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.features import pair_features
from rmcore.ensembles.linear_probes import bootstrap_heads, fit_head
from rmcore.models.reward_model import BradleyTerryRM

Labeller = Callable[[Sequence[PreferencePair]], Sequence[PreferencePair]]
"""Gives the asked pairs back, each with its preferred side as `chosen`."""
NUM_MEMBERS = 4
"""Bootstrap heads where a function asks how much members disagree."""
SHOWN = 3
"""Ids that an error names."""


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """The outcome of one round.

    asked: pairs as they were labelled in it, the most informative first; in round 0 the seed set.
    num_labelled: labels that the head was fitted on.
    head: (D,) of the reward model after it.
    """

    asked: Sequence[PreferencePair]
    num_labelled: int
    head: FloatArray


class ActiveLearner:
    """Chooses pairs and fits reward heads on a backbone that stays as it is, which each pair passes through once.

    Args:
        rm: whose backbone gives the features.
        acquisition: a function, or the name of one (`rmcore.active.acquisition.ACQUISITIONS`), which is then made again
            for each round with a seed of its own.
        labelled: the seed set: pairs with their labels.
        k: pairs to ask about in a round.
        max_per_prompt: at most so many pairs of one prompt in a round.
        seed: of the bootstrap draws and of random choices.

    Raises:
        ConfigError: no acquisition function of that name, or k is below 1.
        DataError: the seed set is empty.

    Example:
        >>> learner = ActiveLearner(rm, "entropy", seed_set, k=100)            # doctest: +SKIP
        >>> rounds = learner.run_active_loop(pool, label_fn, n_rounds=5)       # doctest: +SKIP
        >>> rounds[-1].num_labelled                                            # doctest: +SKIP
        600
    """

    def __init__(
        self,
        rm: BradleyTerryRM,
        acquisition: AcquisitionFunction | str,
        labelled: Sequence[PreferencePair],
        *,
        k: int = 100,
        max_per_prompt: int | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(acquisition, str) and acquisition not in ACQUISITIONS:
            raise ConfigError(f"no acquisition function {acquisition!r}; there are {', '.join(ACQUISITIONS)}.")
        if k < 1:
            raise ConfigError(f"k={k}: a round that asks about nothing learns nothing; choose 1 or more.")
        if not labelled:
            raise DataError(
                "the seed set is empty, so there is no model yet that could say what to label. Label some pairs drawn "
                "at random first (rm-opt data propose --acquisition random)."
            )
        self.rm, self.acquisition, self.max_per_prompt, self.seed, self.k = rm, acquisition, max_per_prompt, seed, k
        self.labelled = list(labelled)
        self.number = 0
        self._rows: dict[str, tuple[str, FloatArray]] = {}

    def select(self, pool: Sequence[PreferencePair], k: int) -> list[PreferencePair]:
        """The k pairs of the pool whose labels would tell most, the most informative first.

        Args:
            pool: unlabelled pairs; which side is called chosen is ignored. Pairs that are labelled already are passed
                over.
            k: how many.

        Raises:
            DataError: nothing unlabelled is in the pool, or a function asks for disagreement and all labels are of one
                prompt.
            ConfigError: k is larger than what the pool has to give.
            ModelError: a score is not a number, or the backbone's weights are broken.
        """
        known = {pair.pair_id for pair in self.labelled}
        rest = [pair for pair in pool if pair.pair_id not in known]
        if not rest:
            raise DataError(
                f"the pool has {len(pool)} pairs and all of them are labelled: there is nothing to choose from. Pass "
                "pairs that are not labelled yet."
            )
        function = self.acquisition
        if isinstance(function, str):
            function = ACQUISITIONS[function](self._draw("choice"))
        members = self.head()[None]  # (M, D)
        if function.needs_members:
            x, prompts = self.differences(self.labelled), [pair.prompt_id for pair in self.labelled]
            members = bootstrap_heads(x, prompts, NUM_MEMBERS, self._draw("members"), l2=float(x.shape[1]))
        x = self.differences(rest)
        view = View(members @ x.T, [pair.prompt_id for pair in rest])
        return [rest[index] for index in select(view, k, function, max_per_prompt=self.max_per_prompt)]

    def run_active_loop(self, pool: Sequence[PreferencePair], label_fn: Labeller, n_rounds: int = 10) -> list[Round]:
        """Run `n_rounds` rounds of choosing, asking and fitting.

        Args:
            pool: unlabelled pairs.
            label_fn: gives the asked pairs back, the preferred side as `chosen`.
            n_rounds: rounds after the seed set's.

        Returns:
            The round that the loop starts from (at first the seed set) and the others, n_rounds + 1.

        Raises:
            ConfigError: the rounds ask for more pairs than the pool has.
            DataError: pairs of the pool share an id, or `label_fn` gave other pairs than it was asked about.
        """
        if len({pair.pair_id for pair in pool}) < len(pool):
            raise DataError("pairs of the pool share an id, so their labels could not be told apart; make ids unique.")
        known = {pair.pair_id for pair in self.labelled}
        available = sum(pair.pair_id not in known for pair in pool)
        if n_rounds * self.k > available:
            raise ConfigError(
                f"{n_rounds} rounds ask about {n_rounds * self.k} pairs and the pool has {available} unlabelled ones; "
                "ask for fewer rounds or a smaller k."
            )
        rounds = [Round(list(self.labelled), len(self.labelled), self.head())]
        for _ in range(n_rounds):
            asked = self.select(pool, self.k)
            answered = checked_labels(asked, label_fn(asked))
            self.labelled += answered
            self.number += 1
            rounds.append(Round(answered, len(self.labelled), self.head()))
        return rounds

    def head(self) -> FloatArray:
        """Fit a head on all that is labelled so far, (D,); the problem is convex and has one optimum."""
        x = self.differences(self.labelled)
        return fit_head(x, l2=float(x.shape[1]))

    def differences(self, pairs: Sequence[PreferencePair]) -> FloatArray:
        """Features of the chosen side minus those of the rejected side, (P, D).

        Raises:
            ModelError: one is not finite.
        """
        missing = list({pair.pair_id: pair for pair in pairs if pair.pair_id not in self._rows}.values())
        if missing:
            first, second = pair_features(self.rm, missing)
            rows = first - second
            broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
            if len(broken):
                raise ModelError(
                    f"{len(broken)} pairs have features that are not finite, the first is "
                    f"{missing[broken[0]].pair_id}: the backbone's weights are broken. Take another checkpoint."
                )
            self._rows |= {pair.pair_id: (pair.chosen, row) for pair, row in zip(missing, rows, strict=True)}
        found = [self._rows[pair.pair_id] for pair in pairs]
        # A label may exchange the sides of a pair, which has then the negative difference.
        return np.stack(
            [row if pair.chosen == chosen else -row for pair, (chosen, row) in zip(pairs, found, strict=True)]
        )

    def _draw(self, purpose: str) -> int:
        """A seed of its own for each purpose and round."""
        return int(hashlib.sha256(f"{self.seed} {self.number} {purpose}".encode()).hexdigest()[:8], 16)


def swapped(pair: PreferencePair) -> PreferencePair:
    """The same pair, the other side preferred; its id stays."""
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


def checked_labels(asked: Sequence[PreferencePair], given: Sequence[PreferencePair]) -> list[PreferencePair]:
    """The asked pairs in their order, with the sides as the labels have them.

    Raises:
        DataError: a pair is missing, was not asked about, is there twice, or has other texts.
    """
    found = {pair.pair_id: pair for pair in given}
    missing = [pair.pair_id for pair in asked if pair.pair_id not in found]
    strange = sorted(found.keys() - {pair.pair_id for pair in asked})
    if missing or strange or len(found) < len(given):
        raise DataError(
            f"the labels of {len(asked)} pairs were requested and {len(given)} came: {len(missing)} are missing "
            f"({', '.join(missing[:SHOWN])}), {len(strange)} were not requested ({', '.join(strange[:SHOWN])}), "
            f"{len(given) - len(found)} came twice. Give each asked pair back once, its preferred side as chosen."
        )
    sides = {pair.pair_id: {pair.chosen, pair.rejected} for pair in asked}
    changed = [name for name, pair in found.items() if {pair.chosen, pair.rejected} != sides[name]]
    if changed:
        raise DataError(
            f"{len(changed)} labelled pairs have other texts than were asked about: {', '.join(changed[:SHOWN])}. A "
            "label may exchange the sides and nothing else."
        )
    return [pair if found[pair.pair_id].chosen == pair.chosen else swapped(pair) for pair in asked]
