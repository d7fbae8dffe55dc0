"""The plan of a run or an experiment: its stages or cells, what of them is there, and what the rest would take."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from experiments.arms import Arm
from experiments.elements import Tuning
from experiments.schema import TUNING_SEED, Experiment
from flows.requirements import require_answers, require_run
from rmcore.config.changes import change_config
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.digests import make_key
from rmcore.core.errors import ConfigError
from rmcore.core.fingerprints import code_digests
from rmcore.core.store import ArtifactRef, Store
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.sources import iter_records, probe, source_kind
from rmcore.reporting.experiment_schema import Tuned
from rmcore.stages.reads import named, settled
from rmcore.stages.registry import STAGES, pipeline_stages, stage_code
from rmcore.study.analysis import Cells, LooksTaken, judge_hypotheses, resolve
from rmcore.study.cells import NUM_BINS, NUM_RESAMPLES, Measured, read_cell
from rmcore.study.estimates import CELL_STAGES
from rmcore.study.plan import Cell, CellPlan, Planner, folders, total_seconds
from rmcore.study.tuning import choose, trial_score
from tasks.device import visible_gpus
from tasks.probe import Probed, estimates, probe_unknown
from tasks.sharing import shared_digest

Runner = Literal["threads", "pool"]
"""Who computes the cells of a matrix: threads of this process, or other machines' workers (flows/pool.py)."""
TRIAL_STAGES = ("prepare", "train")


@dataclass(frozen=True)
class MatrixPlan:
    """All parts of an experiment, and its state."""

    experiment: Experiment
    cells: tuple[CellPlan, ...]
    trials: tuple[CellPlan, ...] = ()
    tuned: Mapping[str, Tuned] = field(default_factory=dict)
    """Arms whose tuning is decided."""
    probed: Probed = field(default_factory=Probed)
    """Why a time is not known."""

    @property
    def seconds(self) -> float | None:
        """Expected wall seconds of what has to run, shared out over the GPUs where there are any; None: unknown."""
        alone = total_seconds([*self.trials, *self.cells])
        # Slots of a CPU share its cores, so two of them are hardly faster than one; a GPU each is.
        return None if alone is None else alone / max(1, len(visible_gpus()))

    @property
    def due(self) -> list[CellPlan]:
        """Cells and trials of which something has to run."""
        return [plan for plan in (*self.trials, *self.cells) if plan.state != "cached"]

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
                f"({len(self.due)} cells and trials are not in the store). Raise the budget, or take fewer arms, seeds "
                "or steps; nothing was run."
            )


def make_plan(
    experiment: Experiment, store: Store, home: Path, *, measure: bool = True, failed: frozenset[str] = frozenset()
) -> MatrixPlan:
    """Resolve every cell and trial; where nothing is known about their speed, two real steps are timed first.

    Args:
        experiment: what is declared.
        store: what there is.
        home: `$RM_OPT_HOME`; probes of throughput are kept in it.
        measure: whether unknown speeds may be measured now.
        failed: labels of trials that were tried and failed, which the choice of a setting does not wait for.
    """
    arms = experiment.arms()
    for path in dict.fromkeys(path for arm in arms if (path := arm.config.evaluate.answers) is not None):
        require_answers(path, experiment.metrics)
    folder, elsewhere = home / "throughput", shared_digest()
    due = _resolve(experiment, arms, Planner(store, estimates(store, folder), elsewhere), failed)
    unknown = [plan.cell.config for plan in due.due] if measure and due.seconds is None else []
    if not unknown:
        return due
    probed = probe_unknown(store, folder, unknown)
    found = _resolve(experiment, arms, Planner(store, estimates(store, folder), elsewhere), failed)
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
        if source is not None and source != "gold" and source_kind(source) in ("file", "folder"):
            probe(iter_records(source, split=split), source, columns, data.pairs_per_row)


def plan_run(config: PipelineConfig, store: Store, home: Path) -> tuple[CellPlan, Probed]:
    """Plan what of one pipeline run is there and what has to run, with why a time is not known.

    Where nothing is known about the speed of its training, two real steps are timed first, unless the device is busy.
    """
    folder, elsewhere, probed = home / "throughput", shared_digest(), Probed()
    cell = Cell(config.study, config.study, config.seed, config, tuple(pipeline_stages(config)))
    plan = Planner(store, estimates(store, folder), elsewhere).plan(cell)
    if any(stage.seconds is None and stage.name in CELL_STAGES for stage in plan.stages):
        probed = probe_unknown(store, folder, [config])
        plan = Planner(store, estimates(store, folder), elsewhere).plan(cell)
    return plan, probed


def _resolve(experiment: Experiment, arms: list[Arm], planner: Planner, failed: frozenset[str]) -> MatrixPlan:
    trials = tuple(plan for arm in arms for plan in _trials(experiment, arm, planner, failed))
    tuned = decide_tuning(experiment, trials, failed)
    cells = []
    for arm in arms:
        waits = _waits_for(experiment, arm, tuned)
        cells += [planner.plan(cell, waits_for=waits) for cell in arm_cells(experiment, arm, tuned.get(arm.name))]
    return MatrixPlan(experiment, tuple(cells), trials, tuned)


def _trials(experiment: Experiment, arm: Arm, planner: Planner, failed: frozenset[str]) -> list[CellPlan]:
    """Plan the trials of an arm's tuning, with those beyond an edge of its range where the best one is there."""
    tuning = experiment.tuning
    if tuning is None or arm.name not in tuning.ranges:
        return []
    plans: list[CellPlan] = []
    due = tuning.values(arm.name)
    while due:
        try:
            plans += [planner.plan(cell) for cell in trial_cells(tuning, arm, due)]
        except ValidationError:  # beyond the range is what the setting may not be
            break
        scores = _scores(tuning, plans, failed)
        best = None if scores is None else choose(tuning.setting, tuning.ranges[arm.name], tuning.metric, scores)
        due = [] if scores is None or best is None else tuning.beyond(arm.name, scores, best["chosen"])
    return plans


def _scores(tuning: Tuning, trials: Sequence[CellPlan], failed: frozenset[str]) -> dict[float, float | None] | None:
    """Score of each trial of an arm, None for one that failed; None where one has still to run."""
    if any(plan.state != "cached" and plan.cell.label not in failed for plan in trials):
        return None
    return {
        plan.cell.trial: trial_score(Path(plan.refs["train"].path), tuning.metric) if plan.state == "cached" else None
        for plan in trials
        if plan.cell.trial is not None
    }


def measured_cell(declared: Experiment, cell: Cell, refs: Mapping[str, ArtifactRef]) -> Measured:
    """Read what a finished cell measured of what the experiment reports."""
    target = declared.target_accuracy
    return read_cell(cell.arm, cell.seed, folders(refs), declared.metrics, target_accuracy=target)


def judged(declared: Experiment, cells: Cells, taken: int) -> LooksTaken:
    """Judge the claims after the first `taken` looks."""
    control = declared.arm_name(declared.control)
    return judge_hypotheses(
        declared.claims(), cells, declared.seeds, control=control, looks=declared.looks, taken=taken
    )


def cells_of_look(
    declared: Experiment, plans: Sequence[CellPlan], number: int, still_open: Sequence[str]
) -> list[CellPlan]:
    """Give the cells that a look needs: of all arms at the first one, then of those that an open claim is about.

    Args:
        declared: the experiment.
        plans: all of its cells.
        number: of the look, from 1.
        still_open: claims that are open after the look before.
    """
    seeds = set(declared.seeds[: declared.when()[number - 1]])
    if number == 1:
        return [plan for plan in plans if plan.cell.seed in seeds]
    claims = resolve(declared.claims(), declared.arm_name(declared.control))
    arms = {one[side] for one in claims if one["name"] in still_open for side in ("arm", "versus")}
    return [plan for plan in plans if plan.cell.seed in seeds and plan.cell.arm in arms]


def seeds_by_arm(declared: Experiment, cells: Iterable[Cell]) -> dict[str, list[int]]:
    """List the seeds under which each arm was to run, in declared order, from the cells that were run."""
    ran = {(cell.arm, cell.seed) for cell in cells}
    return {arm.name: [seed for seed in declared.seeds if (arm.name, seed) in ran] for arm in declared.arms()}


@dataclass(frozen=True, slots=True)
class LookPlan:
    """One look of an experiment, as far as it is known before it is taken."""

    num_seeds: int
    cells: tuple[CellPlan, ...]
    """All that it needs, of claims that are open after the looks before, or may be."""
    taken: LooksTaken | None
    """Outcome where all of its cells, and those of the looks before, are in the store."""


def plan_looks(plan: MatrixPlan) -> list[LookPlan]:
    """Plan every look: those whose cells are all there with their outcome, the others as if no claim were closed."""
    declared = plan.experiment
    measured: dict[tuple[str, int], Measured] = {}
    looks: list[LookPlan] = []
    still_open = tuple(one.name for one in declared.hypotheses)
    known = True
    for number, num_seeds in enumerate(declared.when(), 1):
        cells = tuple(cells_of_look(declared, plan.cells, number, still_open))
        known = known and all(one.state == "cached" for one in cells)
        if known:
            for cell, refs in ((one.cell, one.refs) for one in cells):
                if (cell.arm, cell.seed) not in measured:
                    measured[cell.arm, cell.seed] = measured_cell(declared, cell, refs)
            taken = judged(declared, measured, number)
            still_open = taken.open
            looks.append(LookPlan(num_seeds, cells, taken))
            if not still_open:
                break
        else:
            looks.append(LookPlan(num_seeds, cells, None))
    return looks


def arm_cells(experiment: Experiment, arm: Arm, tuned: Tuned | None) -> list[Cell]:
    """The cells of an arm, one a seed, with its tuned setting where that is decided."""
    config = arm.config if tuned is None else change_config(arm.config, {tuned["setting"]: tuned["chosen"]})
    stages = tuple(experiment.stages())
    return [Cell(arm.name, arm.name, seed, change_config(config, {"seed": seed}), stages) for seed in experiment.seeds]


def trial_cells(tuning: Tuning, arm: Arm, values: Sequence[float]) -> list[Cell]:
    """The trials of an arm's tuning at these values."""
    short = tuning.setting.rpartition(".")[2]
    return [
        Cell(
            f"{arm.name} {short}={value:g}",
            arm.name,
            TUNING_SEED,
            change_config(arm.config, {tuning.setting: value, "seed": TUNING_SEED}),
            TRIAL_STAGES,
            trial=value,
        )
        for value in values
    ]


def decide_tuning(
    experiment: Experiment, trials: tuple[CellPlan, ...], failed: frozenset[str] = frozenset()
) -> dict[str, Tuned]:
    """The chosen value of every arm all of whose trials are in the store or have `failed` (labels)."""
    tuning, decided = experiment.tuning, dict[str, Tuned]()
    if tuning is None:
        return decided
    for arm in tuning.ranges:
        scores = _scores(tuning, [plan for plan in trials if plan.cell.arm == arm], failed)
        if scores is None:
            continue
        if found := choose(tuning.setting, tuning.ranges[arm], tuning.metric, scores):
            decided[arm] = found
    return decided


def _waits_for(experiment: Experiment, arm: Arm, tuned: Mapping[str, Tuned]) -> str:
    tuning = experiment.tuning
    if tuning is None or arm.name not in tuning.ranges or arm.name in tuned:
        return ""
    return f"{tuning.setting} is tuned first"


def frozen(experiment: Experiment) -> dict[str, Any]:
    """Gather what is pre-registered: the declaration, the content of its data, and the analysis that will judge it."""
    content = (*STAGES["prepare"].reads, "evaluate.answers")
    sources = {arm.name: named(arm.config, content) for arm in experiment.arms()}
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
        made[name] = stage_code(STAGES[name]) | {"named": digests}
    for arm in experiment.arms():
        if (arm.config.data, arm.config.model) != (experiment.base.data, experiment.base.model):
            own = _named(experiment, arm.config)
            if own != base:
                made[f"arm {arm.name}"] = own
    return make_key(made)[:12]


def _named(experiment: Experiment, config: PipelineConfig) -> dict[str, dict[str, str]]:
    """Digests of all that a config names by address, by stage."""
    return {name: named(settled(config), STAGES[name].reads) for name in experiment.stages()}
