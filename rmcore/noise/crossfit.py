"""Margins from models that never saw the pair: each fold of prompts is scored by a model of the other folds.

Folds are dealt by conversation (`rmcore.data.splits`), so no prompt is both trained on and scored: by pair, the other
labels of a prompt would tell a model what to say of this one. Two kinds of model: exact Bradley-Terry heads on frozen
features, which cost one pass over the data for all folds together, and full trainings, one a fold.

A finished fold is kept in the folder, so that an interrupted run resumes with the next one.
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.core.files import atomic_file, write_json
from rmcore.core.progress import Report, silent
from rmcore.core.tracking import NullTracker
from rmcore.data.integrity import select_training_pairs
from rmcore.data.pair import PreferencePair, content_id, prompt_text
from rmcore.data.splits import conversation, split_by_prompt
from rmcore.ensembles.features import pair_features
from rmcore.ensembles.linear_probes import fit_head
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer

SETTINGS_FILE, FEATURES_FILE = "folds.json", "features.npy"
L2_FACTORS = (10.0, 1.0, 0.1)
"""Penalties that the folds choose from, in units of the default; the strongest of equally good ones wins."""


class Scorer(Protocol):
    """Learns from some of the pairs and scores others."""

    def margins(self, learn: IntArray, score: IntArray) -> FloatArray:
        """Margins of the pairs at the places `score`, from a model of those at `learn`, (S,)."""

    def settings(self) -> dict[str, Any]:
        """Whatever makes its margins what they are, JSON-ready."""


class Heads:
    """Reward heads fitted exactly on features of a backbone that stays as it is.

    The penalty is one for all folds, since margins under different ones are in different units: that among `L2_FACTORS`
    times the default of `fit_head` under which the labels of the folds are likeliest, each scored by the others.

    Args:
        differences: (P, D) features of the chosen minus those of the rejected sides.
        folds: (P,) as `deal_folds` deals them.
        backbone: what the features are of, for the record.
    """

    def __init__(self, differences: FloatArray, folds: IntArray, backbone: dict[str, Any]) -> None:
        self.differences, self.folds = np.asarray(differences, dtype=np.float64), folds
        self.backbone = backbone

    @classmethod
    def of(
        cls,
        rm: BradleyTerryRM,
        pairs: Sequence[PreferencePair],
        folds: IntArray,
        backbone: dict[str, Any],
        *,
        folder: Path,
        report: Report = silent,
    ) -> "Heads":
        """Compute the features, or read those that an earlier run left in `folder`.

        Raises:
            DataError: the folder holds those of other pairs, or of another backbone.
        """
        claim(folder, pairs, folds, cls.settings_of(backbone))
        place = folder / FEATURES_FILE
        if not place.is_file():
            chosen, rejected = pair_features(rm, pairs, report=report)
            with atomic_file(place) as unfinished, unfinished.open("wb") as file:
                np.save(file, (chosen - rejected).astype(np.float32), allow_pickle=False)
        return cls(np.load(place, allow_pickle=False), folds, backbone)

    def margins(self, learn: IntArray, score: IntArray) -> FloatArray:
        """See `Scorer`; a fit takes a second for thousands of pairs."""
        head = fit_head(self.differences[learn], l2=self._factor * self.differences.shape[1])
        return np.asarray(self.differences[score] @ head)

    @cached_property
    def _factor(self) -> float:
        losses = dict.fromkeys(L2_FACTORS, 0.0)
        for number in np.unique(self.folds):
            held = self.folds == number
            for factor in L2_FACTORS:
                head = fit_head(self.differences[~held], l2=factor * self.differences.shape[1])
                losses[factor] += float(np.logaddexp(0, -self.differences[held] @ head).sum())
        return min(losses, key=losses.__getitem__)  # the strongest of equally good ones comes first

    def settings(self) -> dict[str, Any]:
        """See `Scorer`."""
        return self.settings_of(self.backbone)

    @staticmethod
    def settings_of(backbone: dict[str, Any]) -> dict[str, Any]:
        """The settings of heads on this backbone, before its features are computed."""
        return {"kind": "heads on frozen features", **backbone}


class Trainings:
    """Full trainings of a reward model, one for each fold, each from the backbone's own weights.

    Args:
        pairs: P pairs, those that are learned from and scored.
        model: the model that each training starts from.
        train: how it is trained; there are no validation pairs, so it runs to its end.
        device: where.
        seed: of the new head and the data order.
    """

    def __init__(
        self, pairs: Sequence[PreferencePair], model: ModelConfig, train: TrainConfig, *, device: str, seed: int
    ) -> None:
        self.pairs, self.model, self.device, self.seed = pairs, model, device, seed
        self.train = train.to_the_end()

    def margins(self, learn: IntArray, score: IntArray) -> FloatArray:
        """See `Scorer`."""
        rm = BradleyTerryRM.new(self.model, seed=self.seed, device=pick_device(self.device))
        read = rm.renderer.tokenize_readable([self.pairs[place] for place in learn]).tokenized
        pairs, _ = select_training_pairs(read, over_length=self.train.over_length)
        with tempfile.TemporaryDirectory(prefix="rm-opt-noise-") as scratch:
            Trainer(
                rm, self.train, train=pairs, validation=[], folder=Path(scratch), tracker=NullTracker(), seed=self.seed
            ).run()
        rewards = rm.score_pairs([self.pairs[place] for place in score]).astype(np.float64)  # (S, 2)
        return np.asarray(rm.beta * (rewards[:, 0] - rewards[:, 1]))

    def settings(self) -> dict[str, Any]:
        """See `Scorer`."""
        shown = {"model": self.model.model_dump(mode="json"), "train": self.train.model_dump(mode="json")}
        return {"kind": "full trainings", "retrained": "all weights", "seed": self.seed, **shown}


def deal_folds(pairs: Sequence[PreferencePair], num_folds: int, *, seed: int) -> IntArray:
    """The fold of each of P pairs, (P,), by conversation; as good as equal in prompts.

    Raises:
        ConfigError: fewer than two folds.
        DataError: fewer conversations than folds.
    """
    if num_folds < 2:
        raise ConfigError(f"{num_folds} folds: what is scored must not be trained on, so there are at least two.")
    opened = [conversation(pair.prompt) for pair in pairs]
    num_prompts = len(set(opened))
    if num_prompts < num_folds:
        raise DataError(f"{num_prompts} prompts for {num_folds} folds of prompts: add pairs, or take fewer folds.")
    names = [str(fold) for fold in range(num_folds)]
    dealt = split_by_prompt(pairs, fractions=dict.fromkeys(names, 1 / num_folds), seed=seed)
    fold_of = {conversation(pair.prompt): int(name) for name in names for pair in dealt[name]}
    return np.array([fold_of[text] for text in opened], dtype=np.int64)


def cross_fit(
    pairs: Sequence[PreferencePair], scorer: Scorer, folds: IntArray, *, folder: Path, report: Report = silent
) -> FloatArray:
    """Margins of P pairs, (P,), each from a model of the other folds; above 0 where it agrees with the label.

    They are put in one unit (`in_one_unit`).

    Args:
        pairs: with the labels that are doubted.
        scorer: the models.
        folds: (P,) as `deal_folds` deals them.
        folder: finished folds are kept here, and read where they are there already.
        report: told of each fold.

    Raises:
        DataError: the folder holds folds of other pairs or of another model.
        ModelError: a margin is not finite.
    """
    claim(folder, pairs, folds, scorer.settings())
    found = np.full(len(pairs), np.nan)
    numbers = np.unique(folds)
    for done, number in enumerate(numbers):
        report(done, len(numbers), "folds")
        place, score = folder / f"fold_{number}.npy", np.flatnonzero(folds == number)
        if not place.is_file():
            margins = scorer.margins(np.flatnonzero(folds != number), score)
            if not np.isfinite(margins).all():
                raise ModelError(
                    f"{int((~np.isfinite(margins)).sum())} margins of fold {number} are not finite: its training "
                    "diverged. Lower the learning rate, or take another model."
                )
            with atomic_file(place) as unfinished, unfinished.open("wb") as file:
                np.save(file, margins, allow_pickle=False)
        found[score] = np.load(place, allow_pickle=False)
    report(len(numbers), len(numbers), "folds")
    return in_one_unit(found, folds)


def in_one_unit(margins: FloatArray, folds: IntArray) -> FloatArray:
    """Margins of P pairs, (P,), with the same root mean square in every fold, which is that over all.

    Each fold has a model of its own, and one whose margins are larger for no better reason would look confidently
    wrong. No label enters: a mean square is the same whichever side was chosen.
    """
    size = np.sqrt(np.mean(margins**2))
    own = np.sqrt(np.bincount(folds, margins**2) / np.maximum(np.bincount(folds), 1))
    return np.asarray(margins * size / np.where(own > 0, own, 1.0)[folds])


def claim(folder: Path, pairs: Sequence[PreferencePair], folds: IntArray, settings: dict[str, Any]) -> None:
    """Note what a folder's folds are of, or check that they are of the same.

    Raises:
        DataError: they are of something else.
    """
    texts = "\x1e".join(content_id(prompt_text(pair.prompt), pair.chosen, pair.rejected) for pair in pairs)
    dealt = hashlib.sha256(texts.encode() + folds.tobytes()).hexdigest()[:16]
    record = {"pairs_and_folds": dealt, "num_pairs": len(pairs), **json.loads(json.dumps(settings))}
    place = folder / SETTINGS_FILE
    if not place.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(place, record)
        return
    there = json.loads(place.read_text(encoding="utf-8"))
    different = sorted(name for name in record.keys() | there.keys() if record.get(name) != there.get(name))
    if different:
        raise DataError(
            f"{folder} holds folds of something else ({', '.join(different)} differ): margins of two runs must not be "
            "mixed. Name another folder, or remove that one."
        )
