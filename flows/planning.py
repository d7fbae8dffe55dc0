"""The plan of a run or an experiment: its stages or cells, what of them is there, and what the rest would take."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from experiments.schema import Arm, Experiment
from flows.requirements import require_answers, require_run
from rmcore.config.data import GOLD
from rmcore.config.model import FROM_POLICY
from rmcore.config.pipeline import PipelineConfig, change_config
from rmcore.core.child_process import ForkedProcess
from rmcore.core.errors import ConfigError
from rmcore.core.files import exclusive, write_json
from rmcore.core.fingerprints import code_digests
from rmcore.core.manifests import make_key
from rmcore.core.metrics import CELL_STAGES
from rmcore.core.store import ArtifactRef, Store
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.sources import iter_records, probe, source_kind
from rmcore.reporting.experiment_schema import HypothesisResult
from rmcore.stages.order import pipeline_stages, resolve
from rmcore.stages.stage import contents
from rmcore.stages.stages import STAGES
from rmcore.study.analysis import Cells, judge_hypotheses
from rmcore.study.cells import NUM_BINS, NUM_RESAMPLES, Measured, read_cell
from rmcore.study.estimates import Estimates, SpeedProbe, probe_kind
from rmcore.study.plan import Cell, CellPlan, Planner, folders, total_seconds
from tasks.device import as_seen, free_slots, holders, slots_environment, visible_gpus
from tasks.sharing import shared_digest

Runner = Literal["threads", "pool"]
"""Who computes the cells of a matrix: threads of this process, or other machines' workers (flows/pool.py)."""


def estimates(store: Store, folder: Path) -> Estimates:
    """Gather what is known about run times: finished artifacts, and the probes kept in `folder`."""
    probes = {}
    for path in folder.glob("*.json"):
        try:
            record = json.loads(path.read_text())
            probes[record["kind"]] = SpeedProbe(**record["probe"])
        except (ValueError, KeyError, TypeError):
            continue  # cut short: it is measured again
    return Estimates(store.entries(), probes)


@dataclass(frozen=True, slots=True)
class Probed:
    """Outcome of timing two steps of each kind of training that nothing was known about."""

    problems: tuple[str, ...] = ()
    """Why some could not be timed, one line each."""
    is_device_held: bool = False
    """Whether that was because another run held the device."""


def probe_unknown(store: Store, folder: Path, configs: Iterable[PipelineConfig]) -> Probed:
    """Time two steps for each kind of training that nothing is known about.

    While another run holds the device nothing is timed: it would wait for hours, or measure both. One that cannot be
    timed (it diverges, say) speaks for itself alone: the next of its kind is tried.
    """
    known, problems = estimates(store, folder), list[str]()
    unknown: dict[str, list[PipelineConfig]] = {}
    for config in configs:
        if not known.knows(config):
            unknown.setdefault(probe_kind(config), []).append(config)
    for name, alike in unknown.items():
        if alike[0].model.name == FROM_POLICY:
            problems.append("the reward model starts from a policy that is not trained yet, so no step can be timed")
            continue
        model = Path(alike[0].model.name).name
        for config in _distinct(alike):
            if busy := holders(store):
                return _held(busy)
            with free_slots(store, f"a probe of {model}'s speed", config.device) as slots:
                if slots is None:  # taken since it was looked at
                    return _held(holders(store))
                print(f"measuring two steps of {model}: nothing like it has run here yet", file=sys.stderr)
                outcome = _run(config, slots)
            if "probe" in outcome:
                _remember(folder, name, outcome["probe"])
                break
        else:
            problems.append(f"{model}: {outcome['error']}")
    return Probed(tuple(problems))


def _held(busy: list[str]) -> Probed:
    by = " and ".join(busy) or "another run"
    return Probed((f"the device is held by {by}, so no speed was measured; ask again when it is free",), True)


def _distinct(configs: Iterable[PipelineConfig]) -> list[PipelineConfig]:
    """Those that differ in more than the seed, in order."""
    return list({config.model_copy(update={"seed": 0}).model_dump_json(): config for config in configs}.values())


def _remember(folder: Path, name: str, probe: dict) -> None:
    with exclusive(folder / ".lock"):  # two plans may measure the same
        write_json(folder / f"{make_key({'kind': name})[:12]}.json", {"kind": name, "probe": probe})


def _run(config: PipelineConfig, slots: list[int]) -> dict:
    with tempfile.TemporaryDirectory(prefix="rm-opt-") as scratch:
        out, spec, log = (Path(scratch) / name for name in ("out.json", "spec.json", "log.txt"))
        seen = config.model_copy(update={"device": as_seen(config.device)})
        record = {"config": seen.model_dump(mode="json"), "out": str(out)}
        spec.write_text(json.dumps(record | {"started": time.time()}))
        with log.open("w") as output:
            process = ForkedProcess(
                "rmcore.study.probe", spec, output, os.environ | slots_environment(slots, config.device)
            )
            try:
                status = process.wait()
            finally:  # interrupted, it has nothing to save
                process.kill()
                process.wait()
        if status or not out.is_file():
            said = log.read_text(errors="replace").strip().splitlines() or ["no message"]
            return {"error": f"its process ended with status {status}: {said[-1]}"}
        outcome: dict = json.loads(out.read_text())
        return outcome


@dataclass(frozen=True)
class MatrixPlan:
    """All parts of an experiment, and its state."""

    experiment: Experiment
    cells: tuple[CellPlan, ...]
    probed: Probed = field(default_factory=Probed)
    """Why a time is not known."""

    @property
    def seconds(self) -> float | None:
        """Expected wall seconds of what has to run, shared out over the GPUs where there are any; None: unknown."""
        alone = total_seconds(self.cells)
        # Slots of a CPU share its cores, so two of them are hardly faster than one; a GPU each is.
        return None if alone is None else alone / max(1, len(visible_gpus()))

    @property
    def due(self) -> list[CellPlan]:
        """Cells of which something has to run."""
        return [plan for plan in self.cells if plan.state != "cached"]

    def check_budget(self) -> None:
        """Refuse a plan that would take longer than the experiment may.

        Where another run holds the device, so that no speed can be measured, nothing is refused: it is queued behind
        that run.

        Raises:
            ConfigError: it would, or nobody knows.
        """
        budget = self.experiment.budget_minutes
        if self.due and self.seconds is None and self.probed.is_device_held:
            return
        if self.due and self.seconds is None:
            why = "; ".join(self.probed.problems) or "nothing like it has run here"
            raise ConfigError(
                f"budget_minutes={budget:g} cannot be kept: how long this matrix takes is not known ({why}). Correct "
                "that and look at --plan."
            )
        if self.due and (self.seconds or 0) > 60 * budget:
            raise ConfigError(
                f"budget_minutes={budget:g}: this matrix would take about {(self.seconds or 0) / 60:.0f} minutes "
                f"({len(self.due)} cells are not in the store). Raise the budget, or take fewer arms, seeds "
                "or steps; nothing was run."
            )


def make_plan(experiment: Experiment, store: Store, home: Path) -> MatrixPlan:
    """Resolve every cell; where nothing is known about their speed, two real steps are timed first.

    Args:
        experiment: what is declared.
        store: what there is.
        home: `$RM_OPT_HOME`; probes of throughput are kept in it.
    """
    arms = experiment.arms()
    for path in dict.fromkeys(path for arm in arms if (path := arm.config.evaluate.answers) is not None):
        require_answers(path, experiment.metrics)
    folder, elsewhere = home / "throughput", shared_digest()
    due = _resolve(experiment, arms, Planner(store, estimates(store, folder), elsewhere))
    unknown = [plan.cell.config for plan in due.due] if due.seconds is None else []
    if not unknown:
        return due
    probed = probe_unknown(store, folder, unknown)
    found = _resolve(experiment, arms, Planner(store, estimates(store, folder), elsewhere))
    return replace(found, probed=probed)


def require_start(config: PipelineConfig) -> None:
    """Refuse a run that could not start, or could not come to its end.

    Raises:
        ConfigError: there is no such device, or as `require_run`.
        DataError: the pairs cannot be read, or as `require_run`.
    """
    require_run(config)
    if config.device.startswith("cuda"):
        from rmcore.models.device import pick_device  # here: torch, which a plan on a CPU needs not

        pick_device(config.device)
    data = config.data
    columns = ColumnMap.from_config(data)
    for source, split in ((data.source, data.split), (data.eval_source, data.eval_split or data.split)):
        if source is not None and source != GOLD and source_kind(source) in ("file", "folder"):
            probe(iter_records(source, split=split), source, columns)


def plan_run(config: PipelineConfig, store: Store, home: Path) -> tuple[CellPlan, Probed]:
    """Plan what of one pipeline run is there and what has to run, with why a time is not known.

    Where nothing is known about the speed of its training, two real steps are timed first, unless the device is busy.
    """
    folder, elsewhere, probed = home / "throughput", shared_digest(), Probed()
    cell = Cell(config.study, config.seed, config, pipeline_stages(config))
    plan = Planner(store, estimates(store, folder), elsewhere).plan(cell)
    if any(stage.seconds is None and stage.name in CELL_STAGES for stage in plan.stages):
        probed = probe_unknown(store, folder, [config])
        plan = Planner(store, estimates(store, folder), elsewhere).plan(cell)
    return plan, probed


def _resolve(experiment: Experiment, arms: list[Arm], planner: Planner) -> MatrixPlan:
    return MatrixPlan(experiment, tuple(planner.plan(cell) for arm in arms for cell in arm_cells(experiment, arm)))


def measured_cell(declared: Experiment, cell: Cell, refs: Mapping[str, ArtifactRef]) -> Measured:
    """Read what a finished cell measured of what the experiment reports."""
    target = declared.target_accuracy
    return read_cell(cell.arm, cell.seed, folders(refs), declared.metrics, target_accuracy=target)


def judged(declared: Experiment, cells: Cells) -> list[HypothesisResult]:
    """Judge the claims, all together."""
    return judge_hypotheses(declared.claims(), cells, declared.seeds, control=declared.arm_name(declared.control))


def arm_cells(experiment: Experiment, arm: Arm) -> list[Cell]:
    """The cells of an arm, one a seed."""
    stages = tuple(resolve(experiment.stages(), arm.config))
    return [Cell(arm.name, seed, change_config(arm.config, {"seed": seed}), stages) for seed in experiment.seeds]


def frozen(experiment: Experiment) -> dict[str, Any]:
    """Gather what is pre-registered: the declaration, the content of its data, and the analysis that will judge it."""
    sources = {
        arm.name: contents(arm.config.data, "data.") | contents(arm.config.evaluate, "evaluate.")
        for arm in experiment.arms()
    }
    analysis = {
        "level": 0.95,
        "correction": "Holm over all hypotheses",
        "resamples": NUM_RESAMPLES,
        "calibration_bins": NUM_BINS,
        "code": make_key(code_digests("rmcore.study.analysis"))[:12],
    }
    return experiment.frozen() | {"data": sources, "analysis": analysis}


def matrix_key(experiment: Experiment, registration_hash: str) -> str:
    """12 hex digits that name a matrix: what is registered, its data, and the code and libraries that run it."""
    base = _named(experiment, experiment.base)
    made: dict[str, object] = {"registration": registration_hash}
    for name, digests in base.items():
        made[name] = STAGES[name].code() | {"named": digests}
    for arm in experiment.arms():
        if (arm.config.data, arm.config.model) != (experiment.base.data, experiment.base.model):
            own = _named(experiment, arm.config)
            if own != base:
                made[f"arm {arm.name}"] = own
    return make_key(made)[:12]


def _named(experiment: Experiment, config: PipelineConfig) -> dict[str, dict[str, str]]:
    """Digests of all that a config names by address, by stage."""
    return {name: contents(stage) for name, stage in resolve(experiment.stages(), config).items()}
