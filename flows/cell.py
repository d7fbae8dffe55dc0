"""One cell of an experiment as a flow run of its own, for a worker on any machine: plain data in, shared artifacts out.

It computes the cell's stages, which reach all machines through the shared store, and tracks nothing: whoever planned
the experiment takes the artifacts from there, as it takes those of a cell that was computed before.
"""

from typing import Any

from tasks.home import configure_environment

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from flows.console import say, told_while_waiting
from flows.form import described_flow
from flows.pipeline import open_store
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.store import ArtifactRef
from rmcore.stages.registry import STAGES, stage_call
from rmcore.study.plan import Cell
from tasks.sharing import named_store
from tasks.stages import StageRun, run_stage


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
    prepare_key: str
    """Key of the first of them where the experiment was planned: it digests the code, the data and the versions."""


def order(study: str, cell: Cell) -> CellOrder:
    """Describe a cell for `cell`."""
    return CellOrder(
        study=study,
        label=cell.label,
        config=cell.config.model_dump(mode="json"),
        stages=cell.stages,
        prepare_key=stage_call(cell.stages[0], cell.config, {}).key,
    )


@described_flow("cell", "prepare ──> train ──> evaluate ──> …", lambda given: f"{given['order'].label}")
def cell(order: CellOrder) -> dict[str, Any]:
    """Compute one cell of an experiment into the store that machines share; experiments with `--runner pool` start it.

    Args:
        order: the cell.

    Returns:
        {"stages": digest of each stage's artifact}.

    Raises:
        ConfigError: no store is shared (RM_OPT_SHARED), or this machine would compute something else than was planned.
    """
    config = PipelineConfig.model_validate(order.config)
    named_store()  # nobody would get the cell without one
    found = stage_call(order.stages[0], config, {}).key
    if found != order.prepare_key:
        raise ConfigError(
            f"this machine would compute another {order.stages[0]} ({found[:12]}) than was planned "
            f"({order.prepare_key[:12]}): its code, its data or its versions differ. Update its checkout and its data."
        )
    store = open_store()
    refs: dict[str, ArtifactRef] = {}
    runs: dict[str, StageRun] = {}
    for name in order.stages:
        runs[name] = run_stage(
            store,
            name,
            config,
            refs,
            _untracked,
            waiting=partial(told_while_waiting, name),
            label=name,
            run=f"{order.label} of {order.study}",
            after=[runs[needed] for needed in STAGES[name].needs(config) if needed in runs],
        )
        refs[name] = runs[name].ref
        say(f"{name:<10} {'there already' if runs[name].cached else 'done'}")
    return {"stages": {name: ref.digest for name, ref in refs.items()}}


@contextmanager
def _untracked(metrics: Path) -> Iterator[None]:
    yield
