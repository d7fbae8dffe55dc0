"""The check by full fine-tuning: whether what heads on a frozen backbone show holds where all weights are trained."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rmcore.active.acquisition import View, look
from rmcore.active.labellers import Labeller, blind
from rmcore.active.learner import ActiveLearner
from rmcore.active.retraining import Fitted
from rmcore.active.study import accuracy, draw_splits
from rmcore.config.active import ActiveConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError
from rmcore.core.progress import Report, silent
from rmcore.core.tracking import NullTracker
from rmcore.data.integrity import select_training_pairs
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """A reward model all of whose weights were trained on the labels so far; its only member is itself."""

    rm: BradleyTerryRM

    def view(self, pairs: Sequence[PreferencePair]) -> View:
        """Compute margins and features of P pairs."""
        return look(pairs, RewardModelEnsemble([self.rm]))

    def margins(self, pairs: Sequence[PreferencePair]) -> FloatArray:
        """Margins of P pairs times beta, (P,)."""
        return np.asarray(self.view(pairs).margins[0])

    def arrays(self) -> dict[str, FloatArray]:
        """Nothing: weights are kept as checkpoints, not as rounds."""
        return {}


class FullRetrainer:
    """Trains a new reward model on all labels in each round, from the backbone's own weights.

    Args:
        model: what each one starts as.
        train: how it is trained: `epochs` passes over the labels, or `steps`.
        device: where.
        seed: of the new head and the data order; the same for all that are compared.
    """

    def __init__(self, model: ModelConfig, train: TrainConfig, *, device: str, seed: int) -> None:
        self.model, self.device, self.seed = model, device, seed
        self.train = train.to_the_end()  # no validation pairs are paid for

    def fit(
        self, labelled: Sequence[PreferencePair], *, seed: int, before: Fitted | None, with_members: bool
    ) -> TrainedModel:
        """Train on the labelled pairs.

        Raises:
            ConfigError: members are wanted; one training gives one.
        """
        if with_members:
            raise ConfigError(
                "one training gives one member, and disagreement needs several; take d-optimal or entropy."
            )
        rm = BradleyTerryRM.new(self.model, seed=self.seed, device=pick_device(self.device))
        pairs, _ = select_training_pairs(
            rm.renderer.tokenize_readable(labelled).tokenized, over_length=self.train.over_length
        )
        with tempfile.TemporaryDirectory(prefix="rm-opt-active-") as scratch:
            trainer = Trainer(
                rm, self.train, train=pairs, validation=[], folder=Path(scratch), tracker=NullTracker(), seed=self.seed
            )
            trainer.run()
        return TrainedModel(rm)

    def restore(self, arrays: dict[str, FloatArray]) -> TrainedModel:
        """Not possible.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a round of full fine-tuning keeps no weights, so a loop cannot resume from it; leave folder out."
        )

    def settings(self) -> dict[str, object]:
        """Model and training."""
        shown = {"model": self.model.model_dump(mode="json"), "train": self.train.model_dump(mode="json")}
        return {"retrained": "all weights", "seed": self.seed, **shown}


def check_record(
    pairs: Sequence[PreferencePair],
    labeller: Labeller,
    retrainer: FullRetrainer,
    study: ActiveConfig,
    *,
    acquisition: str,
    report: Report = silent,
) -> dict[str, Any]:
    """One acquisition function under one seed: accuracy after each of the check's label counts, JSON-ready.

    Pool, seed set and test pairs are the first ones of those that the study drew under the same seed.

    Args:
        pairs: all there are, with the labels that accuracy is measured against.
        labeller: who labels.
        retrainer: model, training and the seed of everything drawn.
        study: with the check's sizes.
        acquisition: its name.
        report: told what was reached.

    Raises:
        ConfigError: the label counts do not fit into seed set and pool.
    """
    check = study.check
    if check is None:
        raise ConfigError("there is no check in this study; set active.check.")
    seed = retrainer.seed
    splits = draw_splits(pairs, study, seed=seed)
    first, last = check.labels[0], check.labels[-1]
    available = [*splits.seed_set, *splits.pool]
    if last > len(available):
        raise ConfigError(f"active.check.labels ends with {last} and {len(available)} pairs are there; lower it.")
    pool = blind(available[first : first + check.pool_pairs], seed=seed)
    following = dict(zip(check.labels, np.diff(check.labels).tolist(), strict=False))
    learner = ActiveLearner(
        retrainer,
        acquisition,
        list(labeller(blind(available[:first], seed=seed))),
        k=following.__getitem__,
        seed=seed,
    )
    test = splits.test[: check.test_pairs]
    found = [accuracy(learner.model, test)]
    for done in range(1, len(check.labels)):
        report(done, len(check.labels), f"{acquisition}, {len(learner.labelled)} labels: {found[-1]:.3f}")
        learner.run_active_loop(pool, labeller, 1)
        found.append(accuracy(learner.model, test))
    return {"num_labels": list(check.labels), "accuracy": found, "num_test_pairs": len(test), "num_pool": len(pool)}
