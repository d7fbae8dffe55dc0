"""Stage explain: why the best checkpoint ranks its worst held-out mistakes as it does.

Writes `explain.json` (`rmcore.explain.record.Explained`) and `summary.json`. No verdict follows from it.
"""

from pathlib import Path
from typing import Any

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.data.table import read_pairs
from rmcore.explain.record import explain_mistakes
from rmcore.stages.interface import Upstream
from rmcore.stages.requirements import required_explain
from rmcore.stages.trained import load_trained


def run(settings: PipelineConfig, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Explain mistakes on the test pairs by words and edits."""
    asked = required_explain(settings)
    rm = load_trained(settings, upstream["train"] / "best")
    held_out = read_pairs(upstream["prepare"] / "test.parquet")
    found = explain_mistakes(rm, held_out, most=asked.mistakes, seed=settings.seed, report=report)
    write_json(out / "explain.json", found.to_dict())
    numbers: dict[str, Any] = {
        "eval/test_mistakes": found.num_mistakes,
        "eval/test_kinds_of_mistakes": len(found.kinds),
    }
    write_json(out / "summary.json", {"metrics": numbers})
