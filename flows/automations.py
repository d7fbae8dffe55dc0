"""Automations of Prefect: messages to a webhook (a run failed, waits for long, a study was decided), and silent runs.

`rm-opt up` makes three automations where `RM_OPT_WEBHOOK_URL` names an address to post to. The address is a secret:
whoever has it can post there. So it is a variable (an option would stand in `ps` and in the shell's history), no
process that `up` starts inherits it, and Prefect keeps it encrypted, in a block, from which its page shows dots.
Without the variable nothing is made, as an automation that tells nobody would only look like one, and what an earlier
`up` made stays. Each can be turned off on Prefect's page of automations; `up` leaves that switch as it is.

Prefect's server handles the events of a run in their order. Where its database was locked over one of them, it tells of
the next a quarter of an hour later: a server that is very busy may be that late.

Where the records are in PostgreSQL, so that other machines may work for this one, another automation marks a run as
Crashed whose worker has not been heard of for `SILENCE`: nobody else may know that its machine is gone.

A message is JSON with a `text`, which Slack, Mattermost and others show, and beside it what programs read.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from uuid import UUID

from prefect import runtime
from prefect.automations import AutomationCore, CallWebhook, ChangeFlowRunState, EventTrigger, Posture
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentCreate, BlockDocumentUpdate
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from flows.prefect_api import api_is_embedded
from flows.prefect_client import prefect_at
from flows.worker import HEARTBEAT_SECONDS

DECIDED, UNDECIDED = "rm-opt.study.decided", "rm-opt.study.failed"
"""Events of a study: all of it ran and its claims have verdicts, or cells failed."""
WEBHOOK = "rm-opt-webhook"
"""Name of the block that holds the address."""
LONGEST_WAIT = timedelta(minutes=30)
_WAITING = ("Late", "Pending", "AwaitingConcurrencySlot", "Waiting for the device")
"""States in which a run that is due does nothing. One that is scheduled for later is Scheduled, and not waited for."""
_HEARTBEAT = "prefect.flow-run.heartbeat"
SILENCE = timedelta(seconds=2.5 * HEARTBEAT_SECONDS)
_SILENT = ("Completed", "Failed", "Crashed", "Cancelled", "AwaitingRetry", "Scheduled", "Paused", "Suspended")
"""States after which a run sends no heartbeat."""
_BEGUN = ("Running", "Completed", "Failed", "Crashed", "Cancelling", "Cancelled")
_FLOW_RUN = ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"})
_STUDY = ResourceSpecification.model_validate({"prefect.resource.id": "rm-opt.study.*"})
_OF_RUN = '"run": {{ flow_run.name | tojson }}, "address": {{ flow_run | ui_url | tojson }}}'


def tell_study(
    study: str, verdicts: Mapping[str, str], headline: str, report: Path | None, failed: Sequence[str] = ()
) -> None:
    """Emit the event of a study that has ended: `DECIDED` with its verdicts, or `UNDECIDED` where parts of it failed.

    A study without claims decides nothing and emits none; neither does a run whose API ends with it.

    Args:
        study: its name.
        verdicts: on each claim, by name.
        headline: what it came to, in one sentence.
        report: its page.
        failed: cells that failed.
    """
    if api_is_embedded() or not (verdicts or failed):
        return
    emit_event(
        UNDECIDED if failed else DECIDED,
        resource={"prefect.resource.id": f"rm-opt.study.{study}", "prefect.resource.name": study},
        related=[
            {
                "prefect.resource.id": f"prefect.flow-run.{runtime.flow_run.id}",
                "prefect.resource.role": "flow-run",
                "prefect.resource.name": str(runtime.flow_run.name),
            }
        ],
        payload={
            "study": study,
            "headline": headline,
            "verdicts": dict(verdicts),
            "failed": list(failed),
            "report": str(report),
            "address": str(runtime.flow_run.ui_url),
        },
    )


def deploy_automations(api: str, address: str) -> list[str]:
    """Make or renew the automations that post to `address`; their names.

    Args:
        api: address of Prefect's API, ending in `/api`.
        address: of the webhook.

    Raises:
        ServiceError: Prefect does not answer.
    """
    with prefect_at(api) as client:
        wanted = automations(_webhook(client, address))
        for automation in wanted:
            _deploy(client, automation)
    return [automation.name for automation in wanted]


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


def _webhook(client: SyncPrefectClient, address: str) -> UUID:
    """The block with the address, made or renewed."""
    block_type = client.read_block_type_by_slug("webhook")
    schema = client.get_most_recent_block_schema_for_block_type(block_type.id)
    assert schema is not None  # noqa: S101 - Prefect's server brings both along
    data = {"method": "POST", "url": address, "headers": {"Content-Type": "application/json"}}
    try:
        found = client.read_block_document_by_name(WEBHOOK, "webhook", include_secrets=False)
    except ObjectNotFound:
        block = BlockDocumentCreate(name=WEBHOOK, data=data, block_type_id=block_type.id, block_schema_id=schema.id)
        return client.create_block_document(block, include_secrets=False).id
    client.update_block_document(
        found.id, BlockDocumentUpdate(block_schema_id=schema.id, data=data, merge_existing_data=False)
    )
    return found.id


def automations(webhook: UUID, longest_wait: timedelta = LONGEST_WAIT) -> list[AutomationCore]:
    """The automations that call the block `webhook`."""
    minutes = f"{longest_wait.total_seconds() / 60:g} minutes"
    return [
        _automation(
            "rm-opt: a run failed",
            "A flow run has ended as Failed or Crashed.",
            EventTrigger(
                match=_FLOW_RUN,
                expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
            ),
            webhook,
            '{"event": "failed", "text": {{ ("Run " ~ flow_run.name ~ " ended as " ~ flow_run.state.name ~ ": " ~ '
            'flow_run.state.message) | tojson }}, "state": {{ flow_run.state.name | tojson }}, ' + _OF_RUN,
        ),
        _automation(
            "rm-opt: a run waits",
            f"A flow run that is due has not begun to work, or has waited for the device, for {minutes}.",
            EventTrigger(
                match=_FLOW_RUN,
                after={f"prefect.flow-run.{state}" for state in _WAITING},
                expect={f"prefect.flow-run.{state}" for state in _BEGUN},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                within=longest_wait,
            ),
            webhook,
            '{"event": "waits", "text": {{ ("Run " ~ flow_run.name ~ " has been waiting for '
            f'{minutes}") | tojson }}}}, ' + _OF_RUN,
        ),
        _automation(
            "rm-opt: a study was decided",
            "All cells of a study ran, and its claims have verdicts.",
            EventTrigger(match=_STUDY, expect={DECIDED}, posture=Posture.Reactive),
            webhook,
            '{"event": "decided", "text": {{ ("Study " ~ event.payload.study ~ ": " ~ event.payload.headline) | tojson '
            '}}, "study": {{ event.payload.study | tojson }}, "verdicts": {{ event.payload.verdicts | tojson }}, '
            '"address": {{ event.payload.address | tojson }}}',
        ),
    ]


def _automation(name: str, description: str, trigger: EventTrigger, webhook: UUID, payload: str) -> AutomationCore:
    call = CallWebhook(block_document_id=webhook, payload=payload)
    return AutomationCore(name=name, description=description, trigger=trigger, actions=[call])
