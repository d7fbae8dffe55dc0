"""Cells of a matrix on a Ray cluster: for many short cells, as a running Ray process takes the next one at once.

Whoever runs the matrix plans, judges and reports; a cell is plain settings on the way out and artifacts of the shared
store on the way back, as in `flows.pool`. Ray starts a cell again whose process or machine died, at most twice.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect.exceptions import TerminationSignal

from flows.cell import CellOrder, order, refuse_other, untracked
from flows.console import say
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import RmcoreError
from rmcore.core.ray_cluster import RayCluster
from rmcore.core.store import ArtifactRef, Store
from rmcore.stages.registry import stage_call
from rmcore.study.plan import CellPlan
from tasks.device import SLOTS_VARIABLE, visible_gpus
from tasks.execution import SAVING_SECONDS, execute
from tasks.home import home, make_home
from tasks.sharing import SHARED_VARIABLE, named_store, share_all

MOST_RESTARTS = 2
"""Times that a cell is begun anew whose process died; one that kills three has a reason of its own."""
PASSED_ON = (SHARED_VARIABLE, "RM_OPT_DATA", "AWS_ENDPOINT_URL", "AWS_REGION", "HF_HUB_OFFLINE")
"""Variables that cells need as they are here. Credentials each machine has its own: a cluster's records show these."""


@dataclass
class RayRunner:
    """Runs cells on the cluster of RAY_ADDRESS, or on this machine as one.

    Args:
        study: name of the experiment.
    """

    study: str

    def ready(self, plans: Sequence[CellPlan]) -> Iterator[tuple[CellPlan, str | None]]:
        """Give each plan when its cell can be taken from the shared store, or with the reason why it never will.

        Cells that are cached come first. On Ctrl-C or SIGTERM inside, running cells are asked to save and end.

        Raises:
            ConfigError: no store is shared, Ray is not installed, or the cluster has no login or nothing to run on.
            ServiceError: no cluster answers.
        """
        yield from ((plan, None) for plan in plans if plan.state == "cached")
        due = [plan for plan in plans if plan.state != "cached"]
        if not due:
            return
        named_store()
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        with RayCluster("--runner ray") as cluster:
            for cpus, gpus in {_needs(cluster, plan.cell.config) for plan in due}:
                cluster.require_room(cpus, gpus)
            running = {self._start(cluster, plan, passed_on): plan for plan in due}
            say(f"{len(due)} cells on the Ray cluster at {cluster.name}, with {cluster.resources()}")
            try:
                while running:
                    done = cluster.first_of(list(running))
                    yield running.pop(done), _why_not(cluster, done)
            except (KeyboardInterrupt, TerminationSignal, GeneratorExit):
                cluster.cancel(list(running), 2 * SAVING_SECONDS)
                raise

    def _start(self, cluster: RayCluster, plan: CellPlan, passed_on: Mapping[str, str]) -> Any:
        cpus, gpus = _needs(cluster, plan.cell.config)
        task = cluster.ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            max_retries=MOST_RESTARTS,
            runtime_env={"env_vars": dict(passed_on)},
        )(compute)
        return task.options(name=plan.cell.label).remote(order(self.study, plan.cell).model_dump(mode="json"))


def compute(asked: dict[str, Any]) -> dict[str, str]:
    """Compute one cell in a process of Ray's, without an orchestrator; the digest of each stage's artifact.

    Raises:
        RmcoreError: what a stage refused with, or this machine would compute something else than was planned.
    """
    wanted = CellOrder.model_validate(asked)
    config = PipelineConfig.model_validate(wanted.config)
    if not visible_gpus():  # Ray hands out the cores: a process has as many threads as it was given
        os.environ.setdefault(SLOTS_VARIABLE, str(os.cpu_count() or 1))
        threads = int(os.environ.get("OMP_NUM_THREADS", "1")) // config.train.num_processes
        os.environ["OMP_NUM_THREADS"] = str(max(1, threads))
    make_home(home())
    refuse_other(wanted, config)
    store = Store(home() / "store")
    refs: dict[str, ArtifactRef] = {}
    for name in wanted.stages:
        call = stage_call(name, config, refs)
        store.hold(call.key)
        refs[name], _ = execute(store, call, untracked, lambda: None, run=f"{wanted.label} of {wanted.study}")
    share_all(store, refs)
    return {name: ref.digest for name, ref in refs.items()}


def _needs(cluster: RayCluster, config: PipelineConfig) -> tuple[int, int]:
    """Cores and GPUs of a cell."""
    number = config.train.num_processes
    return number, number if cluster.has_gpus(config.device) else 0


def _why_not(cluster: RayCluster, done: Any) -> str | None:
    """Say what a cell failed with; None where it is done."""
    try:
        cluster.result(done)
    except RmcoreError as error:
        return str(error)
    return None
