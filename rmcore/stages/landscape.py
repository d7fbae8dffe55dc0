"""Stage landscape: curvature of the loss at one checkpoint of a training, the best one by default, on held-out pairs.

Writes `spectrum.json` (ends and trace), `curvature.json` (those and all parts), `summary.json` and the figures.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmcore.config.landscape import LandscapeConfig
from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, tell_left_out
from rmcore.core.tracking import Tracker
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.data.rendering import DroppedPair, TokenizedPair
from rmcore.data.table import read_pairs
from rmcore.landscape.measure import measure_curvature
from rmcore.landscape.sample import CurvatureSample, random_order
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.reporting.figures.curvature import draw_curvature
from rmcore.stages.interface import Upstream
from rmcore.stages.settings import LandscapeSettings
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


def run(settings: LandscapeSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Measure the curvature on `num_pairs` test pairs."""
    rm = load_trained(settings, checkpoint_folder(upstream["train"], settings.landscape.checkpoint))
    pairs = read_pairs(upstream["prepare"] / "test.parquet")
    sample = draw_sample(rm, pairs, settings.landscape, seed=settings.seed)
    write_curvature(measure_curvature(rm, sample, settings.landscape, seed=settings.seed, report=report), out)


def checkpoint_folder(trained: Path, name: str) -> Path:
    """Folder of the checkpoint `name` in the artifact of a training.

    Raises:
        DataError: the training kept no such checkpoint.
    """
    if not (trained / name).is_dir():
        found = [path.name for path in trained.iterdir() if path.name == "best" or path.name.startswith("step_")]
        kept = sorted(found, key=lambda name: (len(name), name))  # in the order of steps
        raise DataError(
            f"{trained} holds no checkpoint {name}: that training kept {', '.join(kept) or 'none'}. Set "
            "landscape.checkpoint to one of these, or keep more with train.save_every."
        )
    return trained / name


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
        tell_left_out(len(dropped), "drawn pairs", f"pair {dropped[0].pair_id}: {dropped[0].reason}")
    kept = sorted(read)
    return CurvatureSample([read[one] for one in kept], [prompt_text(pairs[one].prompt) for one in kept], rm.pad_id)


def write_curvature(record: Mapping[str, Any], out: Path) -> None:
    """Write the record, what trackers show of it, and the figures."""
    write_json(out / "spectrum.json", record["spectrum"])
    write_json(out / "curvature.json", record)
    write_json(out / "summary.json", {"metrics": curvature_metrics(record)})
    draw_curvature(record, out / "figures")


def curvature_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a record that runs are compared by: name -> number, None, or one with its 95 % interval."""
    spectrum = record["spectrum"]
    metrics: dict[str, Any] = {f"hessian/test_{name}": spectrum[name] for name in SPECTRUM_METRICS}
    if "density" in record:  # from several start vectors, where the spectrum's own are from one
        metrics |= {f"hessian/test_{name}": record["density"][name] for name in ("negative_mass", "effective_rank")}
    if "normalized" in record:
        metrics["hessian/test_lambda_max_normalized"] = record["normalized"].get("lambda_max")
        metrics["hessian/test_margin_scale"] = record["normalized"]["temperature"]
    if "gauss_newton" in record:
        found = record["gauss_newton"]
        for name in ("lambda_max", "trace", "effective_rank"):
            ends = {end: found[f"{name}_{end}"] for end in ("ci_low", "ci_high")}
            metrics[f"hessian/test_gauss_newton_{name}"] = {"value": found[name]} | ends
    if "slices" in record:
        metrics["hessian/test_sam_sharpness"] = record["slices"]["sam"]["sharpness"]
    return metrics
