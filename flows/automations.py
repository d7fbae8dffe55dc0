"""The automation of Prefect that marks silent runs.

Where the records are in PostgreSQL, so that other machines may work for this one, it marks a run as Crashed whose
worker has not been heard of for `SILENCE`: nobody else may know that its machine is gone. Prefect's page of automations
has a switch for it, and makes others.
"""

from datetime import timedelta

from prefect.automations import AutomationCore, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.schemas.events import ResourceSpecification

from flows.prefect_client import prefect_at
from flows.worker import HEARTBEAT_SECONDS

_HEARTBEAT = "prefect.flow-run.heartbeat"
SILENCE = timedelta(seconds=2.5 * HEARTBEAT_SECONDS)
_SILENT = ("Completed", "Failed", "Crashed", "Cancelled", "AwaitingRetry", "Scheduled", "Paused", "Suspended")
"""States after which a run sends no heartbeat."""
_FLOW_RUN = ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"})


def deploy_watch(api: str) -> None:
    """Make or renew the automation that marks silent runs as Crashed.

    Args:
        api: address of Prefect's API, ending in `/api`.

    Raises:
        ServiceError: Prefect does not answer.
    """
    trigger = EventTrigger(
        match=_FLOW_RUN,
        after={_HEARTBEAT},
        expect={_HEARTBEAT, *(f"prefect.flow-run.{state}" for state in _SILENT)},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        within=SILENCE,
    )
    silent = AutomationCore(
        name="rm-opt: a run is silent",
        description=f"Nothing was heard of a worker's run for {SILENCE.total_seconds():g} s: it is marked as Crashed.",
        trigger=trigger,
        actions=[
            ChangeFlowRunState(
                name="Crashed",
                state=StateType.CRASHED,
                message="its machine is silent: nothing was heard of it",
                force=False,
            )
        ],
    )
    with prefect_at(api) as client:
        _deploy(client, silent)


def _deploy(client: SyncPrefectClient, automation: AutomationCore) -> None:
    found = client.read_automations_by_name(automation.name)
    if found:
        client.update_automation(found[0].id, automation.model_copy(update={"enabled": found[0].enabled}))
    else:
        client.create_automation(automation)
