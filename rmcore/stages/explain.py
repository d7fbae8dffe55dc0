"""Stage explain: why the best checkpoint ranks its worst held-out mistakes as it does.

Writes `explain.json` (`rmcore.explain.record.Explained`) and `summary.json`. No verdict follows from it.
"""

from pathlib import Path
from typing import Any

from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.data.table import count_pairs, iter_pairs, read_pairs
from rmcore.explain.record import TrainingData, explain_mistakes
from rmcore.stages.interface import Upstream
from rmcore.stages.settings import ExplainSettings
from rmcore.stages.trained import load_trained


def run(settings: ExplainSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Explain mistakes on the test pairs by words, edits and training pairs."""
    asked = settings.explain
    rm = load_trained(settings, upstream["train"] / "best")
    training = TrainingData.drawn(
        iter_pairs(upstream["prepare"] / "train.parquet"),
        count_pairs(upstream["prepare"] / "train.parquet"),
        most=asked.train_pairs,
        seed=settings.seed,
        label_smoothing=settings.label_smoothing,
        memory_gib=asked.memory_gib,
        head_only=settings.head_only,
    )
    held_out = read_pairs(upstream["prepare"] / "test.parquet")
    found = explain_mistakes(rm, held_out, training, most=asked.mistakes, seed=settings.seed, report=report)
    write_json(out / "explain.json", found.to_dict())
    numbers: dict[str, Any] = {
        "eval/test_mistakes": found.num_mistakes,
        "eval/test_kinds_of_mistakes": len(found.kinds),
    }
    write_json(out / "summary.json", {"metrics": numbers})
