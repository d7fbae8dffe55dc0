"""The plan of an experiment: each cell cached, partial or to run, why, and how long it would take.

Nothing runs here. A stage's key depends on the content of what it reads, so a stage is looked up where that is in the
store, or in one that machines share, and has to run in any case where it is not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.manifests import Entry
from rmcore.core.store import ArtifactRef, ArtifactStatus, Store, nearest
from rmcore.stages.order import missing, request
from rmcore.stages.stage import Stage
from rmcore.study.estimates import Estimates
from rmcore.training.resume import RESUME_FOLDER

SHOWN_DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """One pipeline run of an experiment: an arm under a seed."""

    arm: str
    seed: int
    config: PipelineConfig
    stages: tuple[str, ...]

    @property
    def label(self) -> str:
        """Short name of its run."""
        return f"{self.arm} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage of one cell."""

    name: str
    ref: ArtifactRef | None
    """Where it is; None: it has to run."""
    key: str | None
    """None where it cannot be known before an earlier stage has run."""
    why: str
    """Why it has to run; empty where it does not."""
    seconds: float | None
    """Expected wall seconds, 0 where nothing runs; None: unknown."""
    is_shared: bool = False
    """It is taken from other machines instead of being run."""


@dataclass(frozen=True, slots=True)
class CellPlan:
    """One cell and its stages in order."""

    cell: Cell
    stages: tuple[StagePlan, ...]

    @property
    def state(self) -> Literal["cached", "partial", "run"]:
        """cached: nothing runs; partial: more than the prepared data is there, or shared; run: all of it runs."""
        if all(stage.ref for stage in self.stages):
            return "cached"
        there = (stage for stage in self.stages if stage.ref is not None or stage.is_shared)
        return "partial" if any(stage.name != "prepare" for stage in there) else "run"

    @property
    def why(self) -> str:
        """Why the first missing stage has to run, or where all that are missing come from."""
        missing = sorted((stage for stage in self.stages if stage.why), key=lambda stage: stage.is_shared)
        return next((f"{stage.name}: {stage.why}" for stage in missing), "")

    @property
    def refs(self) -> dict[str, ArtifactRef]:
        """The artifacts that are there, by stage."""
        return {stage.name: stage.ref for stage in self.stages if stage.ref is not None}


@dataclass
class Planner:
    """Resolves cells against a store; an artifact that several cells share is looked at once."""

    store: Store
    estimates: Estimates
    shared_digest: Callable[[str, str], str | None] = lambda stage, key: None
    """Digest of an artifact, by stage and key, that other machines have and this one takes; None: they have not."""
    _checked: dict[tuple[str, str], ArtifactStatus] = field(default_factory=dict)
    _seen: dict[str, list[Entry]] = field(default_factory=dict)

    def plan(self, cell: Cell) -> CellPlan:
        """Plan what of a cell is there and what has to run."""
        stages: list[StagePlan] = []
        first: dict[str, str] = {}  # of a stage that has to run: the one that it has to run for

        def look(stage: Stage) -> ArtifactRef:
            plan, ref = self._look(cell, stage, first)
            stages.append(plan)
            return ref

        request(cell.stages, cell.config, look)
        return CellPlan(cell, tuple(stages))

    def _look(self, cell: Cell, stage: Stage, first: dict[str, str]) -> tuple[StagePlan, ArtifactRef]:
        """Plan one stage, and give its artifact, which may be missing."""
        name = stage.name
        behind = [first[needed] for needed in stage.upstream if needed in first]
        if behind:
            first[name] = behind[0]
            why = f"follows {behind[0]}"
            return StagePlan(name, None, None, why, self.estimates.seconds(cell.config, name)), missing(stage)
        key = stage.key
        status = self._status(name, key)
        if status.state == "valid":
            ref = self.store.ref(name, key)
            return StagePlan(name, ref, key, "", 0.0), ref
        digest = self.shared_digest(name, key)
        if digest is not None:
            ref = ArtifactRef(name, key, "", digest)  # what follows is keyed by its content alone
            return StagePlan(name, None, key, "taken from the shared store", 0.0, is_shared=True), ref
        first[name] = name
        is_corrupt = status.state == "corrupt"
        why = f"damaged: {status.damage}" if is_corrupt else self._why(name, key, stage.inputs)
        return StagePlan(name, None, key, why, self.estimates.seconds(cell.config, name)), missing(stage)

    def _status(self, name: str, key: str) -> ArtifactStatus:
        if (name, key) not in self._checked:
            self._checked[name, key] = self.store.status(name, key)
        return self._checked[name, key]

    def _why(self, name: str, key: str, inputs: Mapping[str, Any]) -> str:
        unfinished = self.store.unfinished(name, key) / RESUME_FOLDER
        if steps := [int(state.name.removeprefix("step_")) for state in unfinished.glob("step_*")]:
            return f"an earlier attempt was cut off; resumes from step {max(steps)}"
        if name not in self._seen:
            self._seen[name] = self.store.entries(name)
        close, differing = nearest(self._seen[name], inputs)
        if close is None:
            return "nothing like it is in the store"
        differing.pop("config.seed", None)  # each seed is a cell of its own, and says so
        if not differing:
            return f"differs from {close.key[:12]} in its seed alone"
        changes = [f"{setting} {_value(before)} -> {_value(now)}" for setting, (before, now) in differing.items()]
        more = len(changes) - SHOWN_DIFFERENCES
        listed = ", ".join(changes[:SHOWN_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")
        return f"differs from {close.key[:12]} in {listed}"


def total_seconds(plans: Sequence[CellPlan]) -> float | None:
    """Expected wall seconds of all that has to run, one stage after the other; None where a part is unknown.

    A stage that several cells share counts once.
    """
    due: dict[tuple[str, ...], float | None] = {}
    for plan in plans:
        for stage in plan.stages:
            if stage.ref is None:
                shared = (stage.name, stage.key) if stage.key else (stage.name, plan.cell.label)
                due[shared] = stage.seconds
    known = [seconds for seconds in due.values() if seconds is not None]
    return sum(known) if len(known) == len(due) else None


def _value(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"


def folders(refs: Mapping[str, ArtifactRef]) -> dict[str, Path]:
    """Folder of each artifact."""
    return {name: Path(ref.path) for name, ref in refs.items()}
