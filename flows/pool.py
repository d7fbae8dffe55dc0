"""Cells of a matrix on other machines: each is a flow run in a work pool, which workers there take from.

The process of the matrix starts the runs, watches them, and takes the artifacts of a finished cell from the shared
store. A cell whose worker ended or died is started again, as long as attempts last, else at most five times. Names of
attempts are the same in every run of a matrix, so one that was killed finds its cells running, or done. A worker
computes a cell's stages, which reach all machines through the shared store, and tracks nothing.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from tasks.home import configure_environment

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.states import Cancelled, Cancelling, Crashed
from pydantic import BaseModel, ConfigDict

from flows.console import say, shown_while_waiting
from flows.form import described_flow
from flows.pipeline import begin_flow_run
from flows.prefect_api import api_is_embedded
from flows.prefect_client import prefect_at, workers_online
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.hardware import device_type
from rmcore.core.manifests import make_key
from rmcore.core.store import ArtifactRef
from rmcore.stages.order import request, stage_of
from rmcore.stages.stage import Stage
from rmcore.stages.stages import STAGES
from rmcore.study.plan import Cell, CellPlan
from tasks.local_services import CELLS_POOL
from tasks.sharing import named_store, share_all
from tasks.stages import StageRun, run_stage

DEPLOYMENT = "cell/worker-cell"
MOST_RESTARTS = 5
"""Times in a row that a cell is started again whose worker ended or died; one that kills more has its own reason."""
LASTING = timedelta(minutes=10)
"""An attempt that ran for longer is not counted: it has saved states, from which the next one continues."""
START_SECONDS = 180.0
"""How long a worker may take to start a run that it has claimed; one that ended meanwhile says nothing."""
POLL_SECONDS = 2.0
PATIENCE_SECONDS = 120.0
"""Without a server for so long, and with nothing heard of the cells, the matrix ends; the cells go on."""
MOST_AT_ONCE = 200
"""Runs that one request asks about, which is the most that Prefect answers."""


class CellOrder(BaseModel):
    """All that a worker has to know of a cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: str
    """Name of the experiment, for those who wait for the same stage."""
    label: str
    """Name of the cell."""
    config: dict[str, Any]
    """All settings, JSON-ready."""
    stages: tuple[str, ...]
    """Stages to compute, in order."""
    made_by: str
    """Digest, where it was planned, of the data, the code of all stages and the versions that enter keys."""
    device: str
    """cpu or cuda, for which it was planned: part of keys, so another one's artifacts would never be found."""


def order(study: str, cell: Cell) -> CellOrder:
    """Describe a cell for `cell`."""
    return CellOrder(
        study=study,
        label=cell.label,
        config=cell.config.model_dump(mode="json"),
        stages=cell.stages,
        made_by=_made_by(cell.stages, cell.config),
        device=device_type(cell.config.device),
    )


@described_flow("cell", "prepare ──> train ──> evaluate ──> …", lambda given: f"{given['order'].label}")
def cell(order: CellOrder) -> dict[str, Any]:
    """Compute one cell of an experiment into the store that machines share; experiments with `--runner pool` start it.

    Args:
        order: the cell.

    Returns:
        {"stages": digest of each stage's artifact}.

    Raises:
        StoreError: what was computed could not be shared.
        ConfigError: no store is shared (RM_OPT_SHARED), or this machine would compute something else than was planned.
    """
    config = PipelineConfig.model_validate(order.config)
    named_store()
    refuse_other(order, config)
    store = begin_flow_run()
    runs: dict[str, StageRun] = {}

    def run(stage: Stage) -> ArtifactRef:
        done = runs[stage.name] = run_stage(
            store,
            stage,
            lambda metrics: nullcontext(),  # they come with the artifact
            waiting=partial(shown_while_waiting, stage.name),
            label=stage.name,
            run=f"{order.label} of {order.study}",
            after=[runs[needed] for needed in stage.upstream],
        )
        say(f"{stage.name:<10} {'there already' if done.cached else 'done'}")
        return done.ref

    request(order.stages, config, run)
    refs = {name: done.ref for name, done in runs.items()}
    share_all(store, refs)
    return {"stages": {name: ref.digest for name, ref in refs.items()}}


def refuse_other(order: CellOrder, config: PipelineConfig) -> None:
    """Refuse a cell that this machine would not compute as it was planned.

    Raises:
        ConfigError: code, data or versions differ.
    """
    here = device_type(config.device)
    if here != order.device:
        raise ConfigError(
            f"this machine would compute on {here}, and the cell was planned for {order.device}, because device=auto "
            f"is what the machine that plans has: plan it with `--device {here}`, or start workers on machines with "
            f"{order.device}."
        )
    found = _made_by(order.stages, config)
    if found != order.made_by:
        raise ConfigError(
            f"this machine would compute something else ({found}) than was planned ({order.made_by}): its code, its "
            "data or the versions of torch and transformers differ. Update its checkout, its environment and its data."
        )


def _made_by(stages: Sequence[str], config: PipelineConfig) -> str:
    code = {name: STAGES[name].code() for name in stages}
    return make_key({"first": stage_of(stages[0], config).key, "code": code})[:12]


@dataclass
class _Watched:
    """A cell that runs elsewhere."""

    plan: CellPlan
    attempt: int
    run: UUID
    restarts: int = 0
    claimed: float | None = None
    """When a worker was first seen to have claimed it, as long as it has not started it."""
    state: str = "SCHEDULED"


@dataclass
class PoolRunner:
    """Runs cells in the pool `rm-opt-cells`.

    Args:
        study: name of the experiment.
        key: of the matrix; cells of another one are other runs.
    """

    study: str
    key: str
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _told: str = ""
    _deployment: UUID | None = None

    def require_workers(self) -> None:
        """Check that a worker takes cells, before anything starts.

        Raises:
            ConfigError: no store is shared, no server runs that workers could reach, or no worker is online.
            ServiceError: Prefect does not answer.
        """
        named_store()
        if api_is_embedded():
            raise ConfigError(
                "--runner pool hands cells out through a server, and none runs here: start one with "
                "`rm-opt up --database postgresql://… --host ADDRESS`, or leave --runner pool out to compute here."
            )
        if not workers_online(CELLS_POOL):
            raise ConfigError(
                "no worker takes cells: start `rm-opt worker` on the machines that shall compute, or leave "
                "--runner pool out to compute here."
            )

    def ready(self, plans: Sequence[CellPlan]) -> Iterator[tuple[CellPlan, str | None]]:
        """Give each plan when its cell can be taken from the shared store, or with the reason why it never will.

        Cells that are cached come first. On Ctrl-C or SIGTERM inside, the cells' runs are cancelled.

        Raises:
            ServiceError: Prefect is away for longer than `PATIENCE_SECONDS`.
        """
        yield from ((plan, None) for plan in plans if plan.state == "cached")
        due = [plan for plan in plans if plan.state != "cached"]
        if not due:
            return
        self.require_workers()
        try:
            with prefect_at(None) as client:
                for plan in due:
                    attempt, run = self._start(client, plan, 0)
                    self._watched[plan.cell.label] = _Watched(plan, attempt, run)
            yield from self._finished()
        except (KeyboardInterrupt, TerminationSignal, GeneratorExit):
            self._cancel()
            raise

    def _start(self, client: SyncPrefectClient, plan: CellPlan, attempt: int) -> tuple[int, UUID]:
        """Begin the first attempt from `attempt` on that has not ended in vain in an earlier run of the matrix."""
        deployment = self._deployment = self._deployment or _find_deployment(client)
        made = order(self.study, plan.cell)
        while True:
            run = client.create_flow_run_from_deployment(
                deployment,
                parameters={"order": made.model_dump(mode="json")},
                name=plan.cell.label,
                idempotency_key=f"{self.key}-{plan.cell.label}-{made.made_by}-{attempt}",
                tags=["rm-opt-cell"],
            )
            if run.state is None or not run.state.is_final() or run.state.is_completed():
                return attempt, run.id
            attempt += 1

    def _finished(self) -> Iterator[tuple[CellPlan, str | None]]:
        heard = time.monotonic()
        while self._watched:
            over: list[tuple[CellPlan, str | None]] = []
            try:
                with prefect_at(None) as client:
                    runs = self._read(client)
                    heard = time.monotonic()
                    for label, one in list(self._watched.items()):
                        is_over, error = self._judge(client, one, runs.get(one.run))
                        if is_over:
                            del self._watched[label]
                            over.append((one.plan, error))
                self._report_counts()
            except ServiceError as error:
                if time.monotonic() - heard > PATIENCE_SECONDS:
                    raise
                self._tell(f"waiting for Prefect's server: {error}")
            yield from over
            if self._watched:
                time.sleep(POLL_SECONDS)

    def _read(self, client: SyncPrefectClient) -> dict[UUID, FlowRun]:
        ids = [one.run for one in self._watched.values()]
        found = [
            run
            for start in range(0, len(ids), MOST_AT_ONCE)
            for run in client.read_flow_runs(
                flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": ids[start : start + MOST_AT_ONCE]}}),
                limit=MOST_AT_ONCE,
            )
        ]
        return {run.id: run for run in found}

    def _judge(self, client: SyncPrefectClient, one: _Watched, run: FlowRun | None) -> tuple[bool, str | None]:
        """Whether a cell's run is over, and what it failed with; one that crashed is started again."""
        if run is None or run.state is None:
            return True, "its flow run was deleted"
        state = run.state
        one.state = state.type.value
        if state.is_pending():
            one.claimed = time.monotonic() if one.claimed is None else one.claimed
            if time.monotonic() - one.claimed > START_SECONDS:
                client.set_flow_run_state(one.run, Crashed(message="its worker did not start it"), force=True)
            return False, None
        one.claimed = None
        if state.is_completed():
            return True, None
        if not state.is_crashed():
            return state.is_final(), _why(state)
        if run.total_run_time > LASTING:
            one.restarts = 0
        if one.restarts == MOST_RESTARTS:
            return True, f"its worker ended {MOST_RESTARTS + 1} times: {_why(state)}"
        one.attempt, one.run = self._start(client, one.plan, one.attempt + 1)
        one.restarts += 1
        say(f"{one.plan.cell.label:<24} its worker ended; started again ({one.restarts} of {MOST_RESTARTS})")
        return False, None

    def _report_counts(self) -> None:
        counts = Counter(one.state for one in self._watched.values())
        running = counts["RUNNING"]
        self._tell(
            f"{running} cell{'' if running == 1 else 's'} running elsewhere, {len(self._watched) - running} waiting"
        )

    def _tell(self, line: str) -> None:
        if line != self._told and (self._watched or not self._told):
            say(line)
        self._told = line

    def _cancel(self) -> None:
        """Ask for the end of what runs; it saves first. Where Prefect is away, too, the cells go on."""
        for one in self._watched.values():
            with suppress(ServiceError, ObjectNotFound), prefect_at(None) as client:
                # What has not begun has no worker that would end it.
                asked = Cancelling if one.state == "RUNNING" else Cancelled
                client.set_flow_run_state(one.run, asked(message="the matrix was stopped"))
        self._watched.clear()


def _find_deployment(client: SyncPrefectClient) -> UUID:
    try:
        return client.read_deployment_by_name(DEPLOYMENT).id
    except ObjectNotFound as error:
        raise ServiceError(
            f"Prefect has no deployment {DEPLOYMENT}: run `rm-opt up` of this version there once."
        ) from error


def _why(state: State) -> str | None:
    return " ".join((state.message or f"its flow run ended as {state.name}").split())
