"""Stage landscape: curvature of the loss at the best checkpoint of a training, on held-out pairs.

Writes `spectrum.json`, `summary.json` and one figure.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.landscape.settings import LandscapeConfig
from rmcore.stages.stage import Measuring, stage

SPECTRUM_METRICS = (
    "lambda_max",
    "lambda_min",
    "trace_estimate",
    "trace_standard_error",
    "condition_number",
    "effective_rank",
    "negative_mass",
    "sharpness_score",
    "flatness_index",
)


@stage("landscape", outcome=("spectrum.json",))
class LandscapeStage(Measuring):
    """Curvature of the loss on held-out pairs."""

    landscape: LandscapeConfig
    seed: int


def run(settings: LandscapeStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Measure the curvature on `num_pairs` test pairs."""
    from rmcore.data.table import read_pairs
    from rmcore.landscape.measure import measure_curvature
    from rmcore.landscape.sample import draw_sample
    from rmcore.stages.trained import load_trained

    rm = load_trained(settings)
    pairs = read_pairs(settings.prepared.folder / "test.parquet")
    sample = draw_sample(rm, pairs, settings.landscape, seed=settings.seed)
    write_curvature(measure_curvature(rm, sample, settings.landscape, seed=settings.seed, report=report), out)


def write_curvature(record: Mapping[str, Any], out: Path) -> None:
    """Write the record, what trackers show of it, and the figure."""
    from rmcore.landscape.blocks import eigenvalues_figure
    from rmcore.reporting.figures.style import save

    write_json(out / "spectrum.json", record)
    write_json(out / "summary.json", {"metrics": curvature_metrics(record)})
    save(eigenvalues_figure(record), out / "figures" / "eigenvalues.png")


def curvature_metrics(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of a record that runs are compared by."""
    metrics = {f"hessian/test_{name}": record[name] for name in SPECTRUM_METRICS}
    metrics["hessian/test_lambda_max_standard_error"] = record["over_prompts"]["standard_error"]
    if "normalized" in record:
        metrics["hessian/test_lambda_max_normalized"] = record["normalized"]["lambda_max"]
        metrics["hessian/test_margin_scale"] = record["normalized"]["temperature"]
    return metrics
