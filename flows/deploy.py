"""Objects of Prefect that `rm-opt up` makes next to deployments: pools, a variable, schedules, an automation."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import yaml
from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    VariableCreate,
    VariableUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.objects import StateType
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from flows.prefect_client import prefect_at
from flows.worker import HEARTBEAT_SECONDS
from tasks.declared_deployments import FIELDS, FILE, JOB_TEMPLATE, read_declared
from tasks.local_services import CELLS_POOL, CLUSTER, WORK_POOL
from tasks.sharing import SHARED_VARIABLE

SCHEDULED = "experiment/experiment"
"""Flow and deployment that the shipped schedules are of."""
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
    """Write down in Prefect what `rm-opt worker` asks for: where MLflow and artifacts are.

    Args:
        api: address of Prefect's API, ending in `/api`.
        environment: of the services.
    """
    value = {"mlflow": environment["MLFLOW_TRACKING_URI"], "shared": environment.get(SHARED_VARIABLE) or None}
    with prefect_at(api) as client:
        if client.read_variable_by_name(CLUSTER) is None:
            client.create_variable(VariableCreate(name=CLUSTER, value=value))
        else:
            client.update_variable(VariableUpdate(name=CLUSTER, value=value))


def drop_undeclared(api: str, project: Path) -> list[str]:
    """Delete deployments that the project's prefect.yaml does not declare; gives their names.

    The server takes no other code (tasks/declared_deployments.py), so they are of another checkout, or of an attack.
    """
    declared = read_declared(project)
    dropped = []
    with prefect_at(api) as client:
        for one in client.read_deployments():
            if declared.foreign(one.model_dump(include=set(FIELDS))):
                client.delete_deployment(one.id)
                dropped.append(one.name)
    return dropped


def ship_schedules(api: str, project: Path) -> None:
    """Give the deployment *experiment* the schedules of a project's prefect.yaml that it does not have yet.

    One that is there is its user's: it stays as it was switched and changed.
    """
    found = yaml.safe_load((project / FILE).read_text(encoding="utf-8")).get("definitions", {}).get("schedules", [])
    if not found:
        return
    with prefect_at(api) as client:
        deployment = client.read_deployment_by_name(SCHEDULED)
        known = {one.slug for one in deployment.schedules}
        if missing := [DeploymentScheduleCreate.model_validate(one) for one in found if one["slug"] not in known]:
            client.create_deployment_schedules(deployment.id, missing)


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
