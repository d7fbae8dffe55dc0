"""Stage landscape: curvature of the loss at the best checkpoint of a training, on held-out pairs.

Writes `spectrum.json`, `summary.json` and one figure.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmcore.config.landscape import LandscapeConfig
from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, report_left_out
from rmcore.core.tracking import Tracker
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.data.rendering import DroppedPair, TokenizedPair
from rmcore.data.table import read_pairs
from rmcore.landscape.measure import measure_curvature
from rmcore.landscape.sample import CurvatureSample, random_order
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.reporting.figures.landscape import eigenvalues_figure
from rmcore.reporting.figures.style import save
from rmcore.stages.stages import LandscapeStage
from rmcore.stages.trained import load_trained

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


def run(settings: LandscapeStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Measure the curvature on `num_pairs` test pairs."""
    rm = load_trained(settings)
    pairs = read_pairs(settings.prepared.folder / "test.parquet")
    sample = draw_sample(rm, pairs, settings.landscape, seed=settings.seed)
    write_curvature(measure_curvature(rm, sample, settings.landscape, seed=settings.seed, report=report), out)


def draw_sample(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], config: LandscapeConfig, *, seed: int
) -> CurvatureSample:
    """`config.num_pairs` of `pairs`, drawn by `seed` among those that the model can read.

    A drawn pair that it cannot read, which an evaluation leaves out as well, makes way for the next one and is said on
    stderr.

    Raises:
        DataError: there are no pairs, or none can be read.
    """
    order = random_order(len(pairs), seed)
    read: dict[int, TokenizedPair] = {}
    dropped: list[DroppedPair] = []
    tried = 0
    while len(read) < config.num_pairs and tried < len(order):
        some = order[tried : tried + config.num_pairs - len(read)]  # tokenize no more of a large file than is measured
        tried += len(some)
        for position, found in zip(some, rm.renderer.try_pairs([pairs[place] for place in some]), strict=True):
            if isinstance(found, TokenizedPair):
                read[position] = found
            else:
                dropped.append(found)
    if dropped and not read:
        raise DataError(f"none of the {len(pairs)} pairs can be read as this model reads text: {dropped[0].reason}")
    if dropped:
        report_left_out(len(dropped), "drawn pairs", f"pair {dropped[0].pair_id}: {dropped[0].reason}")
    kept = sorted(read)
    return CurvatureSample([read[one] for one in kept], [prompt_text(pairs[one].prompt) for one in kept], rm.pad_id)


def write_curvature(record: Mapping[str, Any], out: Path) -> None:
    """Write the record, what trackers show of it, and the figure."""
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
