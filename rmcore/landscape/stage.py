"""Stage landscape: curvature of the loss at the best checkpoint of a training, on held-out pairs.

Writes `spectrum.json`, `summary.json` and one figure.
"""

from collections.abc import Mapping
from typing import Any

from rmcore.core.progress import Report
from rmcore.landscape.settings import LandscapeConfig, training_passes
from rmcore.stages.measurement import measurement

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


def curvature_metrics(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Give the numbers of a record that runs are compared by."""
    metrics = {f"hessian/test_{name}": record[name] for name in SPECTRUM_METRICS}
    metrics["hessian/test_lambda_max_standard_error"] = record["over_prompts"]["standard_error"]
    if "normalized" in record:
        metrics["hessian/test_lambda_max_normalized"] = record["normalized"]["lambda_max"]
        metrics["hessian/test_margin_scale"] = record["normalized"]["temperature"]
    return metrics


@measurement(file="spectrum.json", numbers=curvature_metrics, passes=training_passes)
def measure(rm: Any, pairs: list[Any], settings: LandscapeConfig, *, seed: int, report: Report) -> dict[str, Any]:
    """Measure the curvature on `num_pairs` of the pairs."""
    from rmcore.landscape.measure import draw_sample, measure_curvature

    sample = draw_sample(rm, pairs, settings, seed=seed)
    return measure_curvature(rm, sample, settings, seed=seed, report=report)
