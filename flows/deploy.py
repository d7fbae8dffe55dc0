"""Objects of Prefect that `rm-opt up` makes next to deployments: pools, a variable, an automation."""

from collections.abc import Mapping
from datetime import timedelta

from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.schemas.actions import VariableCreate, VariableUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import StateType
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from flows.prefect_client import prefect_at
from flows.worker import HEARTBEAT_SECONDS
from tasks.home import PYTHON_VARIABLE
from tasks.local_services import CELLS_POOL, CLUSTER, WORK_POOL
from tasks.sharing import SHARED_VARIABLE

JOB_TEMPLATE = {
    # Names neither environment nor folder, so those are the worker's; and no run may bring values of its own: with
    # Prefect's template they are the choice of any user who may create a run. Where no command is named, Prefect (3.8)
    # starts a program before its engine, which imports all of Prefect once more.
    "job_configuration": {"command": f"'{{{{ ${PYTHON_VARIABLE} }}}}' -m prefect.engine", "stream_output": True},
    # Prefect wants the variable declared, and its worker reads it from its own environment, never from a run's values.
    "variables": {
        "type": "object",
        "properties": {f"${PYTHON_VARIABLE}": {"const": ""}},
        "additionalProperties": False,
    },
}
SILENCE = timedelta(seconds=2.5 * HEARTBEAT_SECONDS)
_HEARTBEAT = "prefect.flow-run.heartbeat"
_SILENT = ("Completed", "Failed", "Crashed", "Cancelled", "AwaitingRetry", "Scheduled", "Paused", "Suspended")
"""States after which a run sends no heartbeat."""


def ensure_work_pools(api: str) -> None:
    """Make the workers' pools, or give those that are there our template: Prefect's own lets a run name its command.

    Raises:
        ServiceError: Prefect at `api` does not answer, as for all functions here.
    """
    with prefect_at(api) as client:
        for name in (WORK_POOL, CELLS_POOL):
            try:
                found = client.read_work_pool(name)
            except ObjectNotFound:
                client.create_work_pool(WorkPoolCreate(name=name, type="process", base_job_template=JOB_TEMPLATE))
                continue
            if found.base_job_template != JOB_TEMPLATE:
                client.update_work_pool(name, WorkPoolUpdate(base_job_template=JOB_TEMPLATE))


def report_cluster(api: str, environment: Mapping[str, str]) -> None:
    """Write down in Prefect what `rm-opt worker` asks for: where the shared store is.

    Args:
        api: address of Prefect's API, ending in `/api`.
        environment: of the services.
    """
    value = {"shared": environment.get(SHARED_VARIABLE) or None}
    with prefect_at(api) as client:
        if client.read_variable_by_name(CLUSTER) is None:
            client.create_variable(VariableCreate(name=CLUSTER, value=value))
        else:
            client.update_variable(VariableUpdate(name=CLUSTER, value=value))


def deploy_watch(api: str) -> None:
    """Make or renew the automation that marks a run as Crashed whose worker has not been heard of for `SILENCE`.

    For records in PostgreSQL, where other machines may work for this one: no other one may know that it is gone.
    Prefect's page of automations has a switch for it.
    """
    trigger = EventTrigger(
        match=ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"}),
        after={_HEARTBEAT},
        expect={_HEARTBEAT, *(f"prefect.flow-run.{state}" for state in _SILENT)},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        within=SILENCE,
    )
    message = "its machine is silent: nothing was heard of it"
    crash = ChangeFlowRunState(name="Crashed", state=StateType.CRASHED, message=message, force=False)
    silent = AutomationCore(
        name="rm-opt: a run is silent",
        description=f"Nothing was heard of a worker's run for {SILENCE.total_seconds():g} s: it is marked as Crashed.",
        trigger=trigger,
        actions=[crash],
    )
    with prefect_at(api) as client:
        if found := client.read_automations_by_name(silent.name):
            client.update_automation(found[0].id, silent.model_copy(update={"enabled": found[0].enabled}))
        else:
            client.create_automation(silent)
