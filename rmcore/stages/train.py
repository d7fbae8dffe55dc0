"""Stage train: prepared pairs in, a checkpoint folder out.

Writes `best/` and `step_*/` (plain Hugging Face folders), `metrics.csv`, `metrics.jsonl`, `reward_distributions.json`,
`training.json` (how it ended), `summary.json` and the training curves.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rmcore.config import PipelineConfig
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import count_cut
from rmcore.data.table import read_pairs
from rmcore.metrics.diagnosis import diagnose
from rmcore.model import BradleyTerryRM, pick_device
from rmcore.plots.training import training_curves
from rmcore.progress import Report
from rmcore.stages.registry import Upstream
from rmcore.tracking import MemoryTracker, Tracker
from rmcore.trainer.loop import Trainer, TrainResult


def run(config: PipelineConfig, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Train on the prepared splits."""
    prepared = upstream["prepare"]
    validation = prepared / "validation.parquet"
    train_into(
        config,
        read_pairs(prepared / "train.parquet"),
        read_pairs(validation) if validation.is_file() else [],
        out,
        tracker,
        report,
    )


def train_into(
    config: PipelineConfig,
    train: Sequence[PreferencePair],
    validation: Sequence[PreferencePair],
    out: Path,
    tracker: Tracker,
    report: Report,
) -> TrainResult:
    """Train the model of `config` on `train`, choosing the best step on `validation` (may be empty), into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    rm = BradleyTerryRM.new(config.model, seed=config.seed, device=pick_device(config.device))
    tokenized = rm.renderer.tokenize_pairs(train)
    tokenized_validation = rm.renderer.tokenize_pairs(validation)
    history = _Recorder(tracker)
    trainer = Trainer(
        rm,
        config.train,
        train=tokenized,
        validation=tokenized_validation,
        folder=out,
        tracker=history,
        seed=config.seed,
        progress=report,
    )
    result = trainer.run()
    record = result.to_dict() | {
        "num_parameters": rm.num_parameters,
        "rendering": rm.renderer.rendering.format,
        "truncation": {"train": count_cut(tokenized), "validation": count_cut(tokenized_validation)},
        "diagnoses": [diagnosis.to_dict() for diagnosis in diagnose(history.history)],
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    distributions = {trainer.best_rewards_split: reward_distribution(trainer.best_rewards)}
    (out / "reward_distributions.json").write_text(json.dumps(distributions, indent=1) + "\n")
    costs = {
        "cost/train_seconds": result.train_seconds,
        "cost/train_pairs_per_second": result.pairs_per_second,
        "train/best_step": result.best_step,
        "train/num_steps": result.num_steps,
    }
    (out / "summary.json").write_text(json.dumps({"metrics": costs}, indent=1) + "\n")
    (out / "figures").mkdir(exist_ok=True)
    training_curves(history.history, out / "figures" / "training_curves.png")
    return result


class _Recorder(MemoryTracker):
    """Passes metrics on and keeps them, for the diagnosis and the curves."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def metrics(self, step: int, values: dict[str, float]) -> None:  # type: ignore[override]
        super().metrics(step, values)
        self._tracker.metrics(step, values)

    @property
    def history(self) -> list[dict]:
        return [{"step": step, "metrics": values} for step, values in self.rows]


def reward_distribution(rewards: np.ndarray) -> dict[str, dict]:
    """Describe (P, 2) rewards by side: mean, standard deviation, percentiles and a 20-bin histogram, in logits."""
    described = {}
    for column, side in enumerate(("chosen", "rejected")):
        values = rewards[:, column].astype(np.float64)
        counts, edges = np.histogram(values, bins=20)
        described[side] = {
            "num": len(values),
            "mean": float(values.mean()),
            "std": float(values.std()),
            "percentiles": {str(q): float(np.percentile(values, q)) for q in (1, 5, 25, 50, 75, 95, 99)},
            "histogram": {"counts": counts.tolist(), "edges": [float(edge) for edge in edges]},
        }
    return described
