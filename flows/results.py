"""From the outcomes of a matrix to the one record that report, MLflow and the command line show."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from experiments.arms import Arm, shown_changes
from experiments.library import SHIPPED, Chosen
from experiments.schema import Experiment
from flows.matrix import Outcome
from flows.planning import judged
from rmcore.core.hardware import price_per_hour
from rmcore.core.metrics import CELL_METRICS, CURVES
from rmcore.core.store import Store
from rmcore.reporting.experiment_schema import (
    ArmResult,
    CellResult,
    Cost,
    CurveData,
    ExperimentResults,
    MetricInfo,
    Registration,
)
from rmcore.stages.results import artifact_seconds, environment, run_key
from rmcore.study.analysis import Cells, arm_bands, arm_metrics
from rmcore.study.cells import Measured
from tasks.device import device_slots


@dataclass
class MatrixState:
    """One run of a registered experiment, and how far it is."""

    declared: Experiment
    store: Store
    registration: Registration
    command: str

    def __post_init__(self) -> None:
        self.measured: dict[str, Measured] = {}
        """Cells by label."""
        self.expected: float | None = None
        """Seconds that what has run was expected to take; None: unknown."""
        self.started = time.monotonic()

    def cells(self, outcomes: Mapping[str, Outcome]) -> Cells:
        """Give what was measured of the cells that did not fail, by arm and seed."""
        finished = [cell for label, cell in self.measured.items() if label in outcomes and not outcomes[label].error]
        return {(cell.arm, cell.seed): cell for cell in finished}


def gather(matrix: MatrixState, outcomes: Mapping[str, Outcome]) -> ExperimentResults:
    """Judge the hypotheses and describe every arm and cell."""
    declared = matrix.declared
    arms = declared.arms()
    measured = matrix.cells(outcomes)
    control = declared.arm_name(declared.control)
    return {
        "name": declared.name,
        "size": declared.size,
        "title": declared.title,
        "question": declared.question,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "control": control,
        "seeds": list(declared.seeds),
        "metrics": {name: _info(name) for name in declared.metrics},
        "registration": matrix.registration,
        "hypotheses": judged(declared, measured),
        "arms": [_arm(arm, declared, control, measured) for arm in arms],
        "cells": [
            _cell(outcome, measured.get((outcome.cell.arm, outcome.cell.seed)), matrix) for outcome in outcomes.values()
        ],
        "curves": {metric: _curves(metric, list(measured.values())) for metric in CURVES},
        "notes": _notes(matrix, arms, outcomes),
        "cost": _cost(matrix, outcomes),
        "command": matrix.command,
        "base": declared.base.model_dump(mode="json"),
        "environment": environment(declared.base.device),
        "mlflow_url": None,
    }


def command(declared: Experiment, named: str, chosen: Chosen) -> str:
    """The command line that runs the same matrix."""
    budget = chosen.get("budget_minutes")
    given = {
        "--size": declared.size if named in SHIPPED else None,
        "--seeds": chosen.get("seeds"),
        "--arms": None if chosen.get("arms") is None else ",".join(chosen["arms"] or ()),
        "--budget": None if budget is None else f"{budget:g}",
        **{f"--{name}": chosen.get(name) for name in ("model", "data", "epochs", "device")},
    }
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return shlex.join(["rm-opt", "experiment", named, *words, *(["--grid"] if chosen.get("grid") else [])])


def _info(name: str) -> MetricInfo:
    spec = CELL_METRICS[name]
    return {"label": spec.cell_label or spec.label, "unit": spec.unit, "higher_is_better": spec.higher_is_better}


def _arm(arm: Arm, declared: Experiment, control: str, measured: Cells) -> ArmResult:
    metrics = arm_metrics(measured, arm.name, declared.seeds, declared.metrics)
    base = declared.base.model_copy(update={"study": declared.name})
    return {
        "name": arm.name,
        "is_control": arm.name == control,
        "changes": shown_changes(base, arm.config),
        "merged": list(arm.merged),
        "metrics": metrics,
        "bands": arm_bands(metrics),
    }


def _cell(outcome: Outcome, measured: Measured | None, matrix: MatrixState) -> CellResult:
    failed = outcome.error is not None
    return {
        "arm": outcome.cell.arm,
        "seed": outcome.cell.seed,
        "status": "failed" if failed else "computed" if outcome.computed else "cached",
        "error": outcome.error,
        "key": None if failed else run_key(outcome.refs),
        "metrics": {name: None if measured is None else measured.value(name) for name in matrix.declared.metrics},
        "device_seconds": None if failed else artifact_seconds(matrix.store, outcome.refs.values(), on_device=True),
        "diagnoses": [] if measured is None else [asdict(found) for found in measured.diagnoses],  # type: ignore[misc]
        "gate": [] if measured is None else [asdict(check) for check in measured.gate],  # type: ignore[misc]
        "paths": {name: ref.path for name, ref in outcome.refs.items()},
    }


def _curves(metric: str, cells: Sequence[Measured]) -> list[CurveData]:
    curves: list[CurveData] = []
    for cell in cells:
        points = {int(row["step"]): row["metrics"].get(metric) for row in cell.history if metric in row["metrics"]}
        kept = {step: float(value) for step, value in sorted(points.items()) if value is not None}
        if kept:
            curves.append({"arm": cell.arm, "seed": cell.seed, "steps": list(kept), "values": list(kept.values())})
    return curves


def _notes(matrix: MatrixState, arms: Sequence[Arm], outcomes: Mapping[str, Outcome]) -> list[str]:
    notes = [f"{', '.join(arm.merged)}: the same settings as {arm.name}; merged into it." for arm in arms if arm.merged]
    declared = matrix.declared
    early = sum(_made_before(matrix.store, outcome, matrix.registration["frozen_at"]) for outcome in outcomes.values())
    if early:
        notes.append(
            f"{early} of {len(outcomes)} cells had been trained before this registration was frozen, by an earlier run "
            "that shared them: for these the claims were not written down before the data."
        )
    if any(CELL_METRICS[name].unit in ("seconds", "pairs/s") for name in declared.metrics):
        notes.append(
            f"Times and throughputs were taken with up to {device_slots()} cells side by side, those of cached "
            "cells earlier: what else the machine did then is in them. Compare speeds on an idle machine."
        )
    failed = [label for label, outcome in outcomes.items() if outcome.error]
    if failed:
        notes.append(f"{len(failed)} of {len(outcomes)} cells failed and are missing everywhere: {', '.join(failed)}.")
    return notes


def _made_before(store: Store, outcome: Outcome, frozen_at: str) -> bool:
    ref = outcome.refs.get("train")
    manifest = (store.manifest("train", ref.key) if ref else None) or {}
    return "created" in manifest and manifest["created"] < datetime.fromisoformat(frozen_at).timestamp()


def _cost(matrix: MatrixState, outcomes: Mapping[str, Outcome]) -> Cost:
    refs = [ref for outcome in outcomes.values() for ref in outcome.refs.values()]
    failed = sum(outcome.error is not None for outcome in outcomes.values())
    computed = sum(outcome.computed and outcome.error is None for outcome in outcomes.values())
    return {
        "estimated_seconds": matrix.expected,
        "measured_seconds": artifact_seconds(matrix.store, refs),
        "device_seconds": artifact_seconds(matrix.store, refs, on_device=True),
        "price_per_hour": price_per_hour(),
        "run_seconds": time.monotonic() - matrix.started,
        "num_computed": computed,
        "num_cached": len(outcomes) - computed - failed,
        "num_failed": failed,
    }
