"""One cell of an experiment as a flow run of its own, for a worker on any machine: plain data in, shared artifacts out.

It computes the cell's stages, which reach all machines through the shared store, and tracks nothing: the run that
planned the experiment takes the artifacts from there, as it takes those of a cell that was computed before.
"""

from typing import Any

from tasks.home import configure_environment

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from pydantic import BaseModel, ConfigDict

from flows.console import say, shown_while_waiting
from flows.form import described_flow
from flows.pipeline import begin_flow_run
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.hardware import device_type
from rmcore.core.manifests import make_key
from rmcore.core.store import ArtifactRef
from rmcore.stages.order import request, stage_of
from rmcore.stages.stage import Stage
from rmcore.stages.stages import STAGES
from rmcore.study.plan import Cell
from tasks.sharing import named_store, share_all
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
