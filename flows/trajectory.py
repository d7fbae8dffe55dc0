"""The curvature of the loss at each saved checkpoint of a training: prepare, train, landscape once each. Order only."""

import json
from pathlib import Path
from typing import Any

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
import pandas as pd
from prefect import runtime

from flows.checkpoints import (
    Row,
    history_row,
    kept_checkpoints,
    read_metrics,
    require_checkpoints,
    table_row,
    trajectory_headline,
    trajectory_markdown,
)
from flows.form import FIELDS, Form, configured_flow, presets_for
from flows.pipeline import (
    REPORT_FILE,
    REPORT_FOLDER,
    open_store,
    places,
    run_and_say,
    run_stages,
    show_on_page,
)
from flows.progress import shown_progress
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.store import Store, flatten
from rmcore.reporting.figures.style import save
from rmcore.reporting.figures.trajectory import curvature_trajectory_figure
from rmcore.reporting.html.note import run_note
from rmcore.reporting.html.text_page import write_text_report
from rmcore.stages.results import run_key
from tasks.stages import StageRun, run_step
from tasks.tracking import RunTracker

FORM = Form(
    "trajectory",
    FIELDS | {"save_every": "train.save_every"},
    ("data", "model", "train", "landscape"),
    presets_for("trajectory", "run"),
)
PICTURE = """
prepare ──> train ─┬─> landscape of step 25
                   ├─> landscape of step 50
                   └─> … of each checkpoint that train.save_every keeps ──> report: table, figure
"""


@configured_flow("trajectory", FORM, PICTURE, "-trajectory")
def trajectory(config: PipelineConfig) -> dict[str, Any]:
    """Train a reward model and measure the curvature of its loss at each checkpoint that train.save_every keeps.

    Every checkpoint is measured on the same held-out pairs with the same random vectors. What was trained or measured
    before is not done again.

    Args:
        config: of the run; landscape says what is measured (its checkpoint is each one in turn).

    Returns:
        {"results": {"run_name", "best_step", "checkpoints": rows in the order of steps}, "figure": path, "table": path,
        "report": HTML file, "mlflow_url": address or None, "executed": what was computed: stages, and step_N of each
        one measured}.

    Raises:
        ConfigError: train.save_every is not set.
    """
    require_checkpoints(config)
    store = open_store()
    run_name = f"{config.study}-seed{config.seed}-trajectory"
    with RunTracker.start(
        study=config.study,
        run_name=run_name,
        tags={"rm.kind": "trajectory", "rm.seed": str(config.seed), "prefect.flow_run_id": str(runtime.flow_run.id)},
        params=flatten(config.model_dump(mode="json")),
        loggers=config.loggers,
    ) as tracker:
        tracker.watch_machine()
        runs = run_stages(("prepare", "train"), config, store, tracker)
        best_step = _best_step(Path(runs["train"].ref.path))
        measured = _measure(config, store, tracker, runs)
        rows = [history_row(step, metrics) for step, metrics in measured.items()]
        markdown = trajectory_markdown(run_name, rows)

        def tell() -> tuple[Path, Path, Path]:
            figure, table = _write(run_name, runs, rows, best_step)
            report = write_text_report(run_name, markdown, {figure.stem: figure}, figure.with_name(REPORT_FILE))
            _track(tracker, runs, measured, rows, (figure, table), report)
            return figure, table, report

        after = [run.handed for name, run in runs.items() if name not in ("prepare", "train")]
        figure, table, report = run_step("report", tell, after).found
    show_on_page(markdown, report, tracker.url)
    return {
        "results": {"run_name": run_name, "best_step": best_step, "checkpoints": rows},
        "figure": str(figure),
        "table": str(table),
        "report": str(report),
        "mlflow_url": tracker.url,
        "executed": [name for name, run in runs.items() if not run.cached],
    }


def _best_step(trained: Path) -> int:
    return int(json.loads((trained / "training.json").read_text(encoding="utf-8"))["best_step"])


def _measure(
    config: PipelineConfig, store: Store, tracker: RunTracker, runs: dict[str, StageRun]
) -> dict[int, dict[str, float]]:
    """Run the landscape stage once for each checkpoint, noting it in `runs`; the numbers by step."""
    measured = {}
    after = [runs["prepare"], runs["train"]]
    kept = kept_checkpoints(runs["train"].ref)
    with shown_progress("checkpoints", len(kept)) as progress:
        for one in kept:
            upstream = {"prepare": runs["prepare"].ref, "train": one.trained}
            settings = one.settings(config)
            run = run_and_say(
                store, "landscape", settings, upstream, tracker, label=one.name, after=after, progress=progress
            )
            runs[one.name] = run
            measured[one.step] = read_metrics(Path(run.ref.path))
    return measured


def _write(run_name: str, runs: dict[str, StageRun], rows: list[Row], best_step: int) -> tuple[Path, Path]:
    """The figure and the table, in a folder of the run's own."""
    folder = home() / "reports" / f"{run_name}-{run_key({name: run.ref for name, run in runs.items()})[:12]}"
    figure = save(curvature_trajectory_figure(rows, best_step=best_step), folder / "curvature_trajectory.png")
    table = folder / "curvature_trajectory.csv"
    pd.DataFrame([table_row(row) for row in rows]).to_csv(table, index=False)
    return figure, table


def _track(
    tracker: RunTracker,
    runs: dict[str, StageRun],
    measured: dict[int, dict[str, float]],
    rows: list[Row],
    files: tuple[Path, Path],
    report: Path,
) -> None:
    """Send each checkpoint's numbers at its step, the table, the figure and the report."""
    for step, metrics in measured.items():
        tracker.log_metrics(metrics, step)
    tracker.log_table([table_row(row) for row in rows], "checkpoints")
    for file in files:
        tracker.log_file(file, "trajectory")
    tracker.log_file(report, REPORT_FOLDER)
    tracker.describe(run_note(trajectory_headline(rows), *places(report)))
    tracker.set_tags(
        {
            "rm.key": run_key({name: run.ref for name, run in runs.items()}),
            "rm.cache": ",".join(name for name, run in runs.items() if run.cached) or "none",
        }
    )
