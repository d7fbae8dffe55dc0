"""Stage train: prepared pairs in, a checkpoint folder out.

Writes `best/` and `step_*/` (plain Hugging Face folders), `metrics.csv`, `metrics.jsonl`, `reward_distributions.json`,
`training.json` (how it ended), `summary.json` and the training curves.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rmcore.config import PipelineConfig
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import count_cut
from rmcore.data.table import read_pairs
from rmcore.files import write_json
from rmcore.model import BradleyTerryRM, pick_device
from rmcore.plots.training import training_curves
from rmcore.progress import Report
from rmcore.stages.interface import Upstream
from rmcore.tracking import METRICS_FILE, Tracker, read_history
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
    """Train the model of `config` on `train`, choosing the best step on `validation` (may be empty), into `out`.

    `tracker` must write to `out/metrics.jsonl`, from where the training curves are drawn.
    """
    out.mkdir(parents=True, exist_ok=True)
    rm = BradleyTerryRM.new(config.model, seed=config.seed, device=pick_device(config.device))
    tokenized = rm.renderer.tokenize_pairs(train)
    tokenized_validation = rm.renderer.tokenize_pairs(validation)
    trainer = Trainer(
        rm,
        config.train,
        train=tokenized,
        validation=tokenized_validation,
        folder=out,
        tracker=tracker,
        seed=config.seed,
        progress=report,
    )
    result = trainer.run()
    record = result.to_dict() | {
        "num_parameters": rm.num_parameters,
        "rendering": rm.renderer.rendering.format,
        "truncation": {"train": count_cut(tokenized), "validation": count_cut(tokenized_validation)},
    }
    write_json(out / "training.json", record)
    distributions = {trainer.best_rewards_split: reward_distribution(trainer.best_rewards)}
    write_json(out / "reward_distributions.json", distributions)
    costs = {
        "cost/train_seconds": result.train_seconds,
        "cost/train_pairs_per_second": result.pairs_per_second,
        "train/best_step": result.best_step,
        "train/num_steps": result.num_steps,
    }
    write_json(out / "summary.json", {"metrics": costs})
    (out / "figures").mkdir(exist_ok=True)
    training_curves(
        read_history(out / METRICS_FILE), out / "figures" / "training_curves.png", best_step=result.best_step
    )
    return result


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
