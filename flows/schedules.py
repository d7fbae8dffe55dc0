"""Schedules of experiments that prefect.yaml ships."""

from pathlib import Path

import yaml
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
