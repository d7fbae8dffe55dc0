"""The checkpoints of one training and what was measured at each: rows for figure, table, MLflow and people."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.store import MANIFEST, ArtifactRef, make_key
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.markdown import escape, table
from tasks.run_record import summary_metrics

Row = dict[str, Any]
"""{"step": int, "metrics": {"hessian/lambda_max": ...}}: what rmcore.reporting.figures.trajectory draws."""
HEADINGS = ("step", "λmax ± residual", "λmin ± residual", "trace ± error", "margin size", "λmax at margins of 1")
CAPTION = (
    "Raw λmax falls merely because margins grow, so a falling one says nothing by itself: read it beside the size of "
    "the margins, and compare steps by λmax at margins of size 1 (margins divided by their root mean square). A "
    "residual bounds the distance to a true eigenvalue on these pairs; the error of the trace is that of random "
    "probes. Neither is an error over prompts."
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved checkpoint of a training."""

    step: int
    trained: ArtifactRef
    """The training's artifact, with the digest of this checkpoint's own files: that of the artifact covers `best/`."""

    @property
    def name(self) -> str:
        """Its folder in the artifact."""
        return f"step_{self.step}"

    def settings(self, config: PipelineConfig) -> PipelineConfig:
        """`config`, measuring this checkpoint."""
        return config.model_copy(update={"landscape": config.landscape.model_copy(update={"checkpoint": self.name})})


def require_checkpoints(config: PipelineConfig) -> None:
    """Refuse a training that would keep nothing to measure on the way.

    Raises:
        ConfigError: train.save_every is not set.
    """
    if config.train.save_every is None:
        raise ConfigError(
            "train.save_every is not set, so this training would keep no checkpoint at regular steps: there is no "
            "trajectory to measure. Set it to the steps between measurements, for example --set train.save_every=25."
        )


def kept_checkpoints(trained: ArtifactRef) -> list[Checkpoint]:
    """The `step_*` checkpoints in the artifact of a training, in the order of steps."""
    files = json.loads((Path(trained.path) / MANIFEST).read_text(encoding="utf-8"))["files"]
    found: dict[int, dict[str, str]] = {}
    for path, entry in files.items():
        if inside := re.fullmatch(r"step_(\d+)/(.+)", path):
            found.setdefault(int(inside[1]), {})[inside[2]] = entry["sha256"]
    return [Checkpoint(step, replace(trained, digest=make_key(found[step]))) for step in sorted(found)]


def read_metrics(landscape: Path) -> dict[str, float]:
    """The numbers of a landscape artifact under the names that the pipeline gives them, residuals among them."""
    metrics = summary_metrics(landscape, "landscape")
    record = json.loads((landscape / "curvature.json").read_text(encoding="utf-8"))
    residuals = {
        "hessian/test_lambda_max": record["spectrum"]["residuals"][0],
        "hessian/test_lambda_min": record["spectrum"]["residuals"][-1],
        "hessian/test_lambda_max_normalized": record.get("normalized", {}).get("lambda_max_residual"),
    }
    return metrics | {f"{name}_residual": value for name, value in residuals.items() if name in metrics}


def history_row(step: int, metrics: dict[str, float]) -> Row:
    """A checkpoint's numbers under the names that a training logs, which the figure reads."""
    plain = {name.replace("hessian/test_", "hessian/", 1): value for name, value in metrics.items()}
    return {"step": step, "metrics": {"hessian/trace": plain.pop("hessian/trace_estimate"), **plain}}


def table_row(row: Row) -> dict[str, float]:
    """A row as columns: step, then the numbers without their group."""
    return {"step": row["step"]} | {name.removeprefix("hessian/"): value for name, value in row["metrics"].items()}


def shown_row(row: Row) -> list[str]:
    """A row as people read it, under `HEADINGS`."""
    found = table_row(row)

    def with_error(name: str, error: str) -> str:
        return f"{numbers.decimal(found.get(name))} ± {numbers.decimal(found.get(error))}"

    return [
        numbers.count(row["step"]),
        with_error("lambda_max", "lambda_max_residual"),
        with_error("lambda_min", "lambda_min_residual"),
        with_error("trace", "trace_standard_error"),
        numbers.decimal(found.get("margin_scale")),
        numbers.decimal(found.get("lambda_max_normalized")),
    ]


def trajectory_headline(rows: Sequence[Row]) -> str:
    """From where to where the curvature went, at margins of one size where that was measured."""
    if not rows:
        return "No checkpoint was kept, so nothing was measured"
    name = "lambda_max_normalized" if "hessian/lambda_max_normalized" in rows[0]["metrics"] else "lambda_max"
    what = "λmax at margins of 1" if name.endswith("normalized") else "λmax"
    first, last = (numbers.decimal(table_row(row).get(name)) for row in (rows[0], rows[-1]))
    return f"{what} went from {first} at step {rows[0]['step']} to {last} at step {rows[-1]['step']}"


def trajectory_markdown(run_name: str, rows: Sequence[Row]) -> str:
    """The table with what it must not be read as, for Prefect's artifact view."""
    found = table(HEADINGS, map(shown_row, rows), right=range(len(HEADINGS)))
    return f"# Curvature along the training of {escape(run_name)}\n\n{found}\n\n{CAPTION}\n"
