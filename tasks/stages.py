"""One thin Prefect task a stage.

The cache key is the store's own key, and `refresh_cache` is set where the store says that the artifact is missing or
damaged. Prefect's own policies would not do: equal inputs collide between tasks, a task's source says nothing of what
it imports, and a cached result is not looked at again.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger

from rmcore.core.store import ArtifactRef, Store
from rmcore.stages.stage import Stage
from tasks.device import Wait, Waiting
from tasks.execution import Follow, execute

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage's artifact, whether it was there already, and why it was not if it should have been."""

    ref: ArtifactRef
    cached: bool
    damage: str
    """Damage of the artifact that was there before; empty where none was, or it was whole."""
    handed: str
    """Result of the task: Prefect knows the task by this very object. (The parts of a dict may be shared.)"""
    read: tuple[str, ...]
    """Stages whose artifacts it read."""


def run_stage(
    store: Store,
    stage: Stage,
    follow: Follow,
    on_interrupt: Callable[[], None] = lambda: None,
    before: Callable[[], None] = lambda: None,
    waiting: Waiting = lambda: nullcontext(Wait()),
    label: str = "",
    run: str | None = None,
    after: Iterable[StageRun] = (),
) -> StageRun:
    """Run a stage as a Prefect task, or take its artifact from the store.

    The task is called `label`, or as the stage, and Prefect draws an edge to it from each of the runs `after` which it
    comes; its log says how far it is.

    `on_interrupt` is called on Ctrl-C or SIGTERM, after the stage has cleaned up and before Prefect hears of it.
    `before` is called when the stage has its lock and its slot and is about to start, and may refuse with an
    RmcoreError.
    `waiting` is entered where something has to run, and what it gives knows what the stage waits for. `run` is the name
    by which others who wait know this run.
    """
    name, key = stage.name, stage.key
    store.hold(key)  # before it is looked at: from then on nobody may collect it
    status = store.status(name, key)
    ran: list[bool] = []

    def store_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:
        return key

    @task(
        name=name,
        cache_key_fn=store_key,
        refresh_cache=status.state != "valid",
        persist_result=True,
        result_serializer="json",
        task_run_name=(label or name).replace("{", "{{").replace("}", "}}"),
    )
    def stage_task() -> str:
        try:
            with waiting() as wait:
                ref, here = execute(store, stage, follow, before, get_run_logger().info, run=run, wait=wait)
        except (KeyboardInterrupt, TerminationSignal):
            on_interrupt()
            raise
        ran.append(here)
        return ref.path

    handed = stage_task(wait_for=[run.handed for run in after])
    damage = status.damage if any(ran) else ""
    return StageRun(store.ref(name, key), cached=not any(ran), damage=damage, handed=handed, read=tuple(stage.upstream))


@dataclass(frozen=True, slots=True)
class Step(Generic[Found]):
    """A part of a flow that is no stage: what came of it, and what Prefect knows its task by."""

    found: Found
    handed: str


def run_step(name: str, work: Callable[[], Found], after: Iterable[Any]) -> Step[Found]:
    """Do a part of a flow that is no stage, such as its report, as a Prefect task, which the run's page draws.

    It has an edge from each of `after`: what tasks handed on, or futures.
    """
    found: list[Found] = []

    @task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)
    def step_task() -> str:
        found.append(work())
        return f"{name} is done"  # a new object, which is this task's own

    handed = step_task(wait_for=list(after))
    return Step(found[0], handed)
