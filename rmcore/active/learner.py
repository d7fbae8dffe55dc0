"""The loop: train on what is labelled, choose what to label next, ask, repeat.

A loop that was cut off anywhere continues where it was and ends in the same result: each round is one file, written
whole before the next one starts, and everything in a round follows from the files before it.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rmcore.active.acquisition import ACQUISITIONS, AcquisitionFunction, RandomSampling, select
from rmcore.active.differences import CachedDifferences
from rmcore.active.labellers import Labeller, checked_labels, swapped
from rmcore.active.retraining import Fitted, HeadRetrainer, Retrainer
from rmcore.core.errors import ConfigError, DataError, StoreError
from rmcore.core.files import atomic_file, write_json
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair, content_id
from rmcore.models.reward_model import BradleyTerryRM

SETTINGS_FILE = "loop.json"


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """The outcome of one round.

    asked: pairs as they were labelled in it, the most informative first; in round 0 the seed set.
    num_labelled: labels that `model` was trained on.
    """

    number: int
    asked: Sequence[PreferencePair]
    num_labelled: int
    model: Fitted


class ActiveLearner:
    """Chooses pairs and retrains.

    Args:
        retrainer: what is trained in each round. A reward model stands for heads on its backbone, which is not
            changed; each pair then passes through it once.
        acquisition: a function, or the name of one (`rmcore.active.acquisition.ACQUISITIONS`), which is then made anew
            for each round with a seed of its own.
        labelled: the seed set: pairs with their labels.
        k: pairs to ask about in a round, or how many of them follow from the number of labels.
        max_per_prompt: at most so many pairs of one prompt in a round.
        seed: of the bootstrap draws and of random choices.

    Raises:
        ConfigError: no acquisition function of that name.
        DataError: the seed set is empty.

    Example:
        >>> learner = ActiveLearner(rm, "d-optimal", seed_set, k=100)                     # doctest: +SKIP
        >>> rounds = learner.run_active_loop(pool, HiddenLabels(pool), n_rounds=5)        # doctest: +SKIP
        >>> rounds[-1].num_labelled                                                       # doctest: +SKIP
        600
    """

    def __init__(
        self,
        retrainer: Retrainer | BradleyTerryRM,
        acquisition: AcquisitionFunction | str,
        labelled: Sequence[PreferencePair],
        *,
        k: int | Callable[[int], int] = 100,
        max_per_prompt: int | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(acquisition, str) and acquisition not in ACQUISITIONS:
            raise ConfigError(f"no acquisition function {acquisition!r}; there are {', '.join(ACQUISITIONS)}.")
        if not labelled:
            raise DataError(
                "the seed set is empty, so there is no model yet that could say what to label. Label some pairs drawn "
                "at random first (rm-opt active propose --acquisition random)."
            )
        if isinstance(retrainer, BradleyTerryRM):
            retrainer = HeadRetrainer(CachedDifferences(retrainer))
        self.retrainer, self.acquisition, self.max_per_prompt, self.seed = retrainer, acquisition, max_per_prompt, seed
        self._k = k
        self.labelled = list(labelled)
        self.number = 0
        self._model: Fitted | None = None

    @property
    def model(self) -> Fitted:
        """Trained on all that is labelled so far."""
        if self._model is None:
            self._model = self._fit(None)
        return self._model

    def select(self, pool: Sequence[PreferencePair], k: int) -> list[PreferencePair]:
        """The k pairs of the pool whose labels would tell most, the most informative first.

        Args:
            pool: unlabelled pairs; which side is called chosen is ignored. Pairs that are labelled already are passed
                over.
            k: how many.

        Raises:
            DataError: nothing unlabelled is in the pool.
            ConfigError: k is larger than what the pool has to give.
            ModelError: a score is not a number.
        """
        known = {pair.pair_id for pair in self.labelled}
        rest = [pair for pair in pool if pair.pair_id not in known]
        if not rest:
            raise DataError(
                f"the pool has {len(pool)} pairs and all of them are labelled: there is nothing to choose from. Pass "
                "pairs that are not labelled yet."
            )
        view = replace(self.model.view(rest), labelled=self.model.view(self.labelled))
        return [rest[index] for index in select(view, k, self._function(), max_per_prompt=self.max_per_prompt)]

    def run_active_loop(
        self,
        pool: Sequence[PreferencePair],
        label_fn: Labeller,
        n_rounds: int,
        *,
        folder: str | Path | None = None,
        report: Report = silent,
    ) -> list[Round]:
        """Run `n_rounds` rounds of choosing, asking and retraining.

        Args:
            pool: unlabelled pairs.
            label_fn: gives the asked pairs back, the preferred side as `chosen`; see `rmcore.active.labellers`.
            n_rounds: rounds after the seed set's.
            folder: where each round is kept. Rounds that are there already are not run again, and `label_fn` is not
                asked again; more rounds than before may be asked for.
            report: told of the rounds done.

        Returns:
            The round that the loop starts from (0: the seed set) and the others, n_rounds + 1.

        Raises:
            ConfigError: the rounds ask for more pairs than the pool has, or the folder holds another loop.
            DataError: the pool is empty, or `label_fn` gave other pairs than it was asked about.
            StoreError: a round of the folder is damaged.
        """
        self._check(pool, n_rounds)
        kept = None if folder is None else _Kept(Path(folder), self._settings(pool))
        if kept is not None and self.number == 0:
            self._model = self._kept_start(kept)
        rounds = [Round(self.number, list(self.labelled), len(self.labelled), self.model)]
        for done in range(n_rounds):
            number, before = self.number + 1, self.model
            stored = None if kept is None else kept.read(number)
            if stored is None:
                asked = self.select(pool, self._room(len(self.labelled)))
                agrees = checked_labels(asked, label_fn(asked))
            else:
                asked, agrees = _found(stored, pool), stored["agrees"]
            answered = [pair if same else swapped(pair) for pair, same in zip(asked, agrees, strict=True)]
            self.labelled += answered
            self.number = number
            if stored is None:
                self._model = self._fit(before)
            else:
                self._model = self.retrainer.restore(_model_arrays(stored))
            if kept is not None and stored is None:
                kept.write(number, [pair.pair_id for pair in asked], agrees, self.model)
            rounds.append(Round(number, answered, len(self.labelled), self.model))
            report(done + 1, n_rounds, f"{len(self.labelled)} labels")
        return rounds

    def _kept_start(self, kept: "_Kept") -> Fitted:
        """The seed set's model, from the folder where it is there."""
        stored = kept.read(0)
        if stored is not None:
            return self.retrainer.restore(_model_arrays(stored))
        kept.write(0, [pair.pair_id for pair in self.labelled], np.ones(len(self.labelled), dtype=bool), self.model)
        return self.model

    def _fit(self, before: Fitted | None) -> Fitted:
        return self.retrainer.fit(
            self.labelled, seed=self._draw("members"), before=before, with_members=self._function().needs_members
        )

    def _function(self) -> AcquisitionFunction:
        if isinstance(self.acquisition, str):
            return ACQUISITIONS[self.acquisition](self._draw("choice"))
        return self.acquisition

    def _draw(self, purpose: str) -> int:
        """A seed of its own for each purpose and round."""
        return int(hashlib.sha256(f"{self.seed} {self.number} {purpose}".encode()).hexdigest()[:8], 16)

    def _room(self, num_labelled: int) -> int:
        return self._k if isinstance(self._k, int) else self._k(num_labelled)

    def _check(self, pool: Sequence[PreferencePair], n_rounds: int) -> None:
        if not pool:
            raise DataError("the pool is empty: there is nothing to choose from. Pass pairs that are not labelled yet.")
        if len({pair.pair_id for pair in pool}) < len(pool):
            raise DataError("pairs of the pool share an id, so their labels could not be told apart; make ids unique.")
        num_labelled, known = len(self.labelled), {pair.pair_id for pair in self.labelled}
        available = sum(pair.pair_id not in known for pair in pool)
        wanted = 0
        for _ in range(n_rounds):
            room = self._room(num_labelled + wanted)
            if room < 1:
                raise ConfigError(f"k={room}: a round that asks about nothing learns nothing; choose 1 or more.")
            wanted += room
        if wanted > available:
            raise ConfigError(
                f"{n_rounds} rounds ask about {wanted} pairs and the pool has {available} unlabelled ones; ask for "
                "fewer rounds or a smaller k."
            )

    def _settings(self, pool: Sequence[PreferencePair]) -> dict[str, Any]:
        name = self.acquisition if isinstance(self.acquisition, str) else type(self.acquisition).__name__
        if isinstance(self.acquisition, RandomSampling):
            name = f"{name} {self.acquisition.seed}"
        first = len(self.labelled)
        return {
            "acquisition": name,
            "seed": self.seed,
            "first_k": self._room(first),
            "max_per_prompt": self.max_per_prompt,
            "num_seed_pairs": first,
            "seed_set": content_id(*(f"{pair.pair_id} {pair.chosen}" for pair in self.labelled)),
            "pool": content_id(*(f"{pair.pair_id} {pair.chosen}" for pair in pool)),
            "model": json.loads(json.dumps(self.retrainer.settings())),
        }


class _Kept:
    """The rounds of one loop in a folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        place = folder / SETTINGS_FILE
        if not place.is_file():
            write_json(place, dict(settings))
            return
        try:
            known = json.loads(place.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StoreError(f"{place} is damaged ({error}); remove the folder to start this loop again.") from error
        differing = [name for name in settings if known.get(name) != settings[name]]
        if differing:
            raise ConfigError(
                f"{folder} holds rounds of another loop: {', '.join(differing)} differ. Name another folder, or resume "
                "with the settings that it was started with."
            )

    def read(self, number: int) -> dict[str, npt.NDArray[Any]] | None:
        """Round `number`, or None where it was not finished."""
        place = self._place(number)
        if not place.is_file():
            return None
        try:
            with np.load(place, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise StoreError(f"{place} is damaged ({error}); remove it and the rounds after it.") from error

    def write(self, number: int, ids: Sequence[str], agrees: npt.NDArray[Any], model: Fitted) -> None:
        """Keep a round, whole or not at all."""
        place = self._place(number)
        arrays = {f"model/{name}": value for name, value in model.arrays().items()}
        with atomic_file(place) as unfinished, unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, ids=np.array(ids), agrees=agrees, **arrays)

    def _place(self, number: int) -> Path:
        return self.folder / f"round_{number:04d}.npz"


def _model_arrays(stored: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix("model/"): value for name, value in stored.items() if name.startswith("model/")}


def _found(stored: Mapping[str, npt.NDArray[Any]], pool: Sequence[PreferencePair]) -> list[PreferencePair]:
    known = {pair.pair_id: pair for pair in pool}
    return [known[name] for name in stored["ids"].tolist()]
