"""The loop: choose what to label next, ask, fit heads on all labels, repeat."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rmcore.active.acquisition import ACQUISITIONS, AcquisitionFunction, PoolItem, View, select, unlabelled
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.pair import PreferencePair, content_id, prompt_text
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.ensembles.features import pair_features
from rmcore.ensembles.linear_probes import bootstrap_heads, fit_head
from rmcore.models.reward_model import BradleyTerryRM

Labeller = Callable[[Sequence[Any]], Sequence[PreferencePair]]
"""Is given items of the pool and returns a pair of each, with the preferred response as `chosen`."""
NUM_MEMBERS = 4
"""Bootstrap heads of a lone reward model where a function asks how much members disagree."""


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """The outcome of one round.

    asked: pairs as they were labelled in it, the most informative first; in round 0 those that were labelled before.
    num_labelled: labels that the heads were fitted on.
    heads: of each backbone the (D,) reward head after it; before any label the mean of its members' own, times beta.
    """

    asked: Sequence[PreferencePair]
    num_labelled: int
    heads: Sequence[FloatArray]


class ActiveLearner:
    """Chooses pairs by what their labels would tell, and fits reward heads on backbones that stay as they are.

    Before any label the models' own heads decide, so they should be trained. Each pair passes through a backbone once.

    Args:
        model_or_ensemble: a reward model, or several.
        acquisition_fn: a function, or the name of one (`rmcore.active.acquisition.ACQUISITIONS`), which is then made
            again for each round with a seed of its own. None: `variance` for several models, `entropy` for one.
        labelled: pairs with their labels.
        k: pairs to ask about in a round.
        seed: of the bootstrap draws and of random choices.

    Raises:
        ConfigError: no acquisition function of that name, or k is below 1.

    Example:
        >>> learner = ActiveLearner(ensemble, k=100)                           # doctest: +SKIP
        >>> rounds = learner.run_active_loop(pool, label_fn, n_rounds=5)       # doctest: +SKIP
        >>> rounds[-1].num_labelled                                            # doctest: +SKIP
        500
    """

    def __init__(
        self,
        model_or_ensemble: BradleyTerryRM | RewardModelEnsemble,
        acquisition_fn: AcquisitionFunction | str | None = None,
        labelled: Sequence[PreferencePair] = (),
        *,
        k: int = 100,
        seed: int = 0,
    ) -> None:
        if isinstance(model_or_ensemble, BradleyTerryRM):
            model_or_ensemble = RewardModelEnsemble([model_or_ensemble])
        acquisition = acquisition_fn or ("entropy" if len(model_or_ensemble) == 1 else "variance")
        if isinstance(acquisition, str) and acquisition not in ACQUISITIONS:
            raise ConfigError(f"no acquisition function {acquisition!r}; there are {', '.join(ACQUISITIONS)}.")
        if k < 1:
            raise ConfigError(f"k={k}: a round that asks about nothing learns nothing; choose 1 or more.")
        self.backbones = model_or_ensemble.members.backbones
        self.acquisition, self.seed, self.k = acquisition, seed, k
        self.labelled = list(labelled)
        self.number = 0
        self._rows: list[dict[str, tuple[str, FloatArray]]] = [{} for _ in self.backbones]

    def select(self, pool: Sequence[PoolItem], k: int) -> list[Any]:
        """The k items of the pool whose labels would tell most, the most informative first.

        Args:
            pool: items without a label (`rmcore.active.acquisition.PoolItem`). Those that are labelled already are
                passed over.
            k: how many.

        Raises:
            DataError: nothing unlabelled is in the pool, an item is no pair of responses, or a function asks for
                disagreement and all labels are of one prompt.
            ConfigError: k is larger than what the pool has to give, or one model is asked how much members disagree
                before there are labels to fit some on.
            ModelError: a score is not a number, or a backbone's weights are broken.
        """
        rest = self._unlabelled(pool)
        if not rest:
            raise DataError(
                f"the pool has {len(pool)} pairs and all of them are labelled: there is nothing to choose from. Pass "
                "pairs that are not labelled yet."
            )
        function = self.acquisition
        if isinstance(function, str):
            function = ACQUISITIONS[function](self._draw("choice"))
        pairs = [pair for _, pair in rest]
        members = self._members(function) if self.labelled else self._own_heads()  # a (M, D) for each backbone
        margins = [heads @ self.differences(pairs, at).T for at, heads in enumerate(members)]
        view = View(np.concatenate(margins), [pair.prompt_id for pair in pairs])
        return [rest[index][0] for index in select(view, k, function)]

    def run_active_loop(self, pool: Sequence[PoolItem], label_fn: Labeller, n_rounds: int = 10) -> list[Round]:
        """Run `n_rounds` rounds of choosing, asking and fitting.

        Args:
            pool: items without a label, see `select`.
            label_fn: is given the items of a round and returns a pair of each, the preferred response as `chosen`.
            n_rounds: rounds after the first.

        Returns:
            The round that the loop starts from and the others, n_rounds + 1.

        Raises:
            ConfigError: the rounds ask for more pairs than the pool has.
            DataError: an item is twice in the pool, or `label_fn` gave other pairs than it was asked about.
        """
        if len({_key(unlabelled(item)) for item in pool}) < len(pool):
            raise DataError("items of the pool have the same texts, so their labels could not be told apart.")
        available = len(self._unlabelled(pool))
        if n_rounds * self.k > available:
            raise ConfigError(
                f"{n_rounds} rounds ask about {n_rounds * self.k} pairs and the pool has {available} unlabelled ones; "
                "ask for fewer rounds or a smaller k."
            )
        rounds = [Round(list(self.labelled), len(self.labelled), self.heads())]
        for _ in range(n_rounds):
            asked = self.select(pool, self.k)
            answered = checked_labels([unlabelled(item) for item in asked], label_fn(asked))
            self.labelled += answered
            self.number += 1
            rounds.append(Round(answered, len(self.labelled), self.heads()))
        return rounds

    def heads(self) -> list[FloatArray]:
        """Fit a head of each backbone on all that is labelled, (D,); see `Round.heads` for what it is before that."""
        if not self.labelled:
            return [heads.mean(axis=0) for heads in self._own_heads()]
        rows = [self.differences(self.labelled, at) for at in range(len(self.backbones))]
        return [fit_head(x, l2=float(x.shape[1])) for x in rows]

    def differences(self, pairs: Sequence[PreferencePair], at: int = 0) -> FloatArray:
        """Features of the chosen side minus those of the rejected side on the backbone `at`, (P, D).

        Raises:
            ModelError: one is not finite.
        """
        keys, known = [_key(pair) for pair in pairs], self._rows[at]
        missing = list({key: pair for key, pair in zip(keys, pairs, strict=True) if key not in known}.values())
        if missing:
            first, second = pair_features(self.backbones[at].rm, missing)
            rows = first - second
            broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
            if len(broken):
                raise ModelError(
                    f"{len(broken)} pairs have features that are not finite, the first is "
                    f"{missing[broken[0]].pair_id}: the backbone's weights are broken. Take another checkpoint."
                )
            known |= {_key(pair): (pair.chosen, row) for pair, row in zip(missing, rows, strict=True)}
        # A label may exchange the sides of a pair, which has then the negative difference.
        seen = [(pair.chosen == known[key][0], known[key][1]) for key, pair in zip(keys, pairs, strict=True)]
        return np.stack([row if is_same else -row for is_same, row in seen])

    def _unlabelled(self, pool: Sequence[PoolItem]) -> list[tuple[PoolItem, PreferencePair]]:
        """The items that have no label yet, each as it was given and as a pair."""
        known = {_key(pair) for pair in self.labelled}
        both = ((item, unlabelled(item)) for item in pool)
        return [(item, pair) for item, pair in both if _key(pair) not in known]

    def _own_heads(self) -> list[FloatArray]:
        """The members' heads as they were trained, by backbone: (M, D), whose margins are log-odds."""
        return [np.array(shared.betas)[:, None] * np.stack(shared.heads) for shared in self.backbones]

    def _members(self, function: AcquisitionFunction) -> list[FloatArray]:
        """The heads that the labels so far give, by backbone: (M, D)."""
        if not function.needs_members:
            return [head[None] for head in self.heads()]
        prompts, members = [pair.prompt_id for pair in self.labelled], []
        is_one = sum(len(shared.names) for shared in self.backbones) == 1
        for at, shared in enumerate(self.backbones):
            x, number = self.differences(self.labelled, at), NUM_MEMBERS if is_one else len(shared.names)
            members.append(bootstrap_heads(x, prompts, number, self._draw(f"members{at or ''}"), l2=float(x.shape[1])))
        return members

    def _draw(self, purpose: str) -> int:
        """A seed of its own for each purpose and round."""
        return int(hashlib.sha256(f"{self.seed} {self.number} {purpose}".encode()).hexdigest()[:8], 16)


def swapped(pair: PreferencePair) -> PreferencePair:
    """The same pair, the other side preferred; its id stays."""
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


def checked_labels(asked: Sequence[PreferencePair], given: Sequence[PreferencePair]) -> list[PreferencePair]:
    """The asked pairs in their order, with the sides as the labels have them.

    Raises:
        DataError: a pair is missing, was not asked about (a label may exchange the sides and change nothing else), or
            is there twice.
    """
    labels = {_key(pair): pair for pair in given}
    keys = [_key(pair) for pair in asked]
    missing = [pair for key, pair in zip(keys, asked, strict=True) if key not in labels]
    strange = [pair for key, pair in labels.items() if key not in set(keys)]
    if missing or strange or len(labels) < len(given):
        first = (missing or strange or given)[0]
        raise DataError(
            f"the labels of {len(asked)} pairs were requested and {len(given)} came: {len(missing)} are missing, "
            f"{len(strange)} were not requested or have other texts, {len(given) - len(labels)} came twice; the first "
            f"is of {prompt_text(first.prompt)[:60]!r}. Give each asked pair back once, its preferred side as chosen."
        )
    both = [(pair, labels[key]) for key, pair in zip(keys, asked, strict=True)]
    return [pair if label.chosen == pair.chosen else swapped(pair) for pair, label in both]


def _key(pair: PreferencePair) -> str:
    """Digest of a pair's texts, whichever side is preferred."""
    return content_id(prompt_text(pair.prompt), *sorted((pair.chosen, pair.rejected)))
