"""Schedules of experiments: those that prefect.yaml ships, and the end of one that has nothing left to look at."""

from pathlib import Path
from uuid import UUID

import yaml
from prefect import runtime
from prefect.client.schemas.actions import DeploymentScheduleCreate

from flows.prefect_client import prefect_at
from tasks.declared_deployments import FILE

DEPLOYMENT = "experiment/experiment"


def ship_schedules(api: str, project: Path) -> None:
    """Give the deployment *experiment* the schedules of a project's prefect.yaml that it does not have yet.

    One that is there is its user's: it stays as it was switched and changed.

    Raises:
        ServiceError: Prefect does not answer.
    """
    found = yaml.safe_load((project / FILE).read_text(encoding="utf-8"))
    shipped = [
        DeploymentScheduleCreate.model_validate(one) for one in found.get("definitions", {}).get("schedules", [])
    ]
    if not shipped:
        return
    with prefect_at(api) as client:
        deployment = client.read_deployment_by_name(DEPLOYMENT)
        known = {one.slug for one in deployment.schedules}
        if missing := [one for one in shipped if one.slug not in known]:
            client.create_deployment_schedules(deployment.id, missing)


def pause_own_schedule() -> bool:
    """Switch off the schedule that started this flow run; gives whether one did.

    Raises:
        ServiceError: Prefect does not answer or refuses.
    """
    with prefect_at(None) as client:
        run = client.read_flow_run(UUID(str(runtime.flow_run.id)))
        by = run.created_by
        if run.deployment_id is None or by is None or by.id is None or by.type != "SCHEDULE":
            return False
        client.update_deployment_schedule(run.deployment_id, by.id, active=False)
    return True
