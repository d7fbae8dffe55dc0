"""The front door of the library, which `import rmcore` opens: pairs in, a reward model, numbers and a verdict out."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rmcore.config.data import GOLD, GoldConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError
from rmcore.core.tracking import NullTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.readers import sources
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized import select_training_pairs
from rmcore.ensembles.score import readable_pairs, score_pairs_table
from rmcore.evaluation.diagnosis import OVER_BASELINE, baseline_check, validation_gate
from rmcore.evaluation.report_card import evaluate_pairs
from rmcore.evaluation.uncertainty import MetricValue
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.readiness.verdict import verdict_on_labels
from rmcore.reporting.schema import Verdict
from rmcore.training.loop import Trainer


def load_pairs(source: str, *, split: str = "train", limit: int | None = None) -> list[PreferencePair]:
    """Read the preference pairs of a file, a `datasets` folder or a hub name, in any layout of docs/data.md.

    "gold" draws them from the built-in synthetic benchmark, whose true reward is known.

    Raises:
        DataError: it cannot be read, or its columns fit no layout; the message has a mapping to paste.
    """
    if source == GOLD:
        return generate_pairs(GoldConfig(), seed=0).pairs[:limit]
    return list(sources.load_pairs(source, split=split, limit=limit).pairs)


def train(
    pairs: Sequence[PreferencePair],
    model: str = "minilm",
    *,
    validation: Sequence[PreferencePair] = (),
    output_dir: str | Path = "checkpoints",
    max_seq_len: int = 256,
    seed: int = 0,
    device: str = "auto",
    **settings: Any,
) -> BradleyTerryRM:
    """Train a reward model on pairs and return its best step, which is stored in OUTPUT_DIR/best.

    Args:
        pairs: to train on.
        model: a folder, a hub name, `minilm` (pretrained, 22 M) or `tiny` (from nothing).
        validation: pairs that the best step is chosen on; none: the last step is kept.
        output_dir: folder of the checkpoint and of metrics.csv; one with a finished training is not overwritten.
        max_seq_len: tokens of one side.
        seed: of the reward head and of the order of pairs.
        device: auto, cpu, cuda or cuda:1.
        settings: fields of TrainConfig. Left out, lr is 5e-5 and the passes follow from the number of pairs, as in
            `rm-opt run --data`.

    Raises:
        ConfigError: `pairs` is a text. ConfigError, DataError, ModelError, TrainingError: see
            `rmcore.training.loop.Trainer`.
    """
    config = TrainConfig.model_validate({"lr": 5e-5, "epochs": None} | settings)
    folder = Path(output_dir)
    rm = BradleyTerryRM(model, max_seq_len=max_seq_len, seed=seed, device=device)
    taken, held_out = (_tokenized(rm, _as_pairs(given), config) for given in (pairs, validation))
    folder.mkdir(parents=True, exist_ok=True)
    Trainer(rm, config, train=taken, validation=held_out, folder=folder, tracker=NullTracker(), seed=seed).run()
    return BradleyTerryRM.from_pretrained(folder / "best", device=device)


def evaluate(rm: BradleyTerryRM | str, pairs: Sequence[PreferencePair], *, seed: int = 0) -> dict[str, MetricValue]:
    """Measure a reward model, or the checkpoint of one, on held-out pairs: by name, with 95 % intervals over prompts.

    Raises:
        ConfigError: `pairs` is a text.
        DataError, ModelError: no pair can be read, or a reward is not finite.
    """
    loaded = _loaded(rm)
    return evaluate_pairs(score_pairs_table(loaded, _as_pairs(pairs))[0], beta=loaded.beta, seed=seed)


def score(rm: BradleyTerryRM | str, prompts: Sequence[Prompt], responses: Sequence[str]) -> np.ndarray:
    """Return the rewards of N responses to their prompts, (N,) in logits; one of each, not in lists, is one row."""
    return _loaded(rm).score(prompts, responses)


def verdict(held_out: Mapping[str, MetricValue], train_metrics: Mapping[str, MetricValue] | None = None) -> Verdict:
    """Judge what `evaluate` measured: checks on labelled pairs, which is the first evidence level.

    Args:
        held_out: of pairs that it was not trained on.
        train_metrics: of pairs that it was trained on, for the gap between both; without, no verdict passes.
    """
    metrics = {name: found.to_dict() for name, found in held_out.items()}
    accuracy = None if train_metrics is None else train_metrics["pairwise_accuracy"].value
    checks = [baseline_check(metrics[OVER_BASELINE]), *validation_gate(metrics, accuracy)]
    return verdict_on_labels(checks, None, metrics[OVER_BASELINE])


def _as_pairs(pairs: Sequence[PreferencePair] | PreferencePair) -> Sequence[PreferencePair]:
    """Return pairs as a list; one that is given without a list is a list of one.

    Raises:
        ConfigError: it is a text, whose characters are no pairs.
    """
    if isinstance(pairs, str | Path):
        raise ConfigError(f"pairs is the text {str(pairs)[:60]!r}; read the pairs of a file with rmcore.load_pairs.")
    return [pairs] if isinstance(pairs, PreferencePair) else pairs


def _tokenized(rm: BradleyTerryRM, pairs: Sequence[PreferencePair], config: TrainConfig) -> list[TokenizedPair]:
    """The pairs that can be trained on; the others are counted on standard error."""
    if not pairs:
        return []
    read = rm.renderer.tokenize_pairs(readable_pairs(rm, pairs))
    kept, dropped = select_training_pairs(read, over_length=config.over_length)
    if dropped:
        reason = dropped[0].reason
        print(f"note: {len(dropped)} of {len(pairs)} pairs are left out, the first: {reason}", file=sys.stderr)
    return kept


def _loaded(rm: BradleyTerryRM | str) -> BradleyTerryRM:
    return BradleyTerryRM.from_pretrained(rm) if isinstance(rm, str) else rm
