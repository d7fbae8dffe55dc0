"""Which MLflow run a record belongs to: found by its uid and resumed, or made; and whose child it is.

A run with a uid is one outcome, named by its tag `rm.key`. Started again, it is resumed:

- finished with the same key: complete, nothing of it is sent again;
- not finished (killed, failed, or sent without some file): completed, with what MLflow has not got yet;
- another key, a finished run's outcome computed anew, or a parameter with another value (MLflow never changes one):
  another outcome. The old run is set aside, still there to be read, and a new one is made, so that two outcomes never
  mix in one run's curves.

A run names the process that feeds it, so that who starts next sees which open runs nobody feeds any more.

Parent and child find each other by uid, whichever comes first: a child looks for its parent after it was made, and a
parent, once made, takes the children that wait for it.
"""

import logging
from typing import TYPE_CHECKING

from tasks.run_owner import HOST, OWNER_FIELDS, has_died, this_machine, this_process
from tasks.run_record import KEY_TAG, RunRecord

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

UID_TAG = "rm.run_uid"
PARENT_UID_TAG = "rm.parent_uid"
KIND_TAG = "rm.kind"
OWNER_PREFIX = "rm."
"""Prefix of the tags that name the process which feeds a run."""
EXPERIMENT_PREFIX = "rm/"
"""Prefix of the names of all our experiments."""
MISSING_TAG = "rm.missing_files"
"""Files that were gone when the run was sent: such a run is not complete."""
PARENT_TAG = "mlflow.parentRunId"
FINISHED = "FINISHED"
SUPERSEDED = "superseded"
"""Kind of a run that was set aside, and the end of its name and uid."""


def find_run(client: "MlflowClient", experiment_id: str, uid: str) -> "Run | None":
    """The run of this uid; None where there is none (or only a deleted one)."""
    runs = client.search_runs([experiment_id], f"tags.`{UID_TAG}` = '{uid}'", max_results=1)
    return runs[0] if runs else None


def is_complete(run: "Run", record: RunRecord) -> bool:
    """Whether MLflow has everything of the outcome that `record` is about.

    FINISHED is the last thing that a run is told, after all that belongs to it.
    """
    same_key = record.key is not None and run.data.tags.get(KEY_TAG) == record.key
    return same_key and run.info.status == FINISHED and MISSING_TAG not in run.data.tags


def contradicts(run: "Run", record: RunRecord) -> bool:
    """Whether `run` holds another outcome than the one that `record` is about.

    A record without a key is about something that is still to be computed: never what a finished run with a key holds.
    """
    key, params = run.data.tags.get(KEY_TAG), run.data.params
    if key is not None and key != record.key and (record.key is not None or run.info.status == FINISHED):
        return True
    return any(params.get(name, value) != value for name, value in record.params.items())


def set_aside(client: "MlflowClient", run: "Run") -> None:
    """Take `run` out of all views and searches of its matrix; it keeps its numbers and its parent."""
    run_id, tags = run.info.run_id, run.data.tags
    logger.info("Run %s (%s) holds an earlier outcome; it is kept as superseded.", run.info.run_name, run_id)
    client.set_tag(run_id, KIND_TAG, SUPERSEDED)
    client.set_tag(run_id, UID_TAG, f"{tags[UID_TAG]} {SUPERSEDED}")
    still_open = run.info.status == "RUNNING"
    client.update_run(run_id, "KILLED" if still_open else None, f"{run.info.run_name} ({SUPERSEDED})")


def make_run(client: "MlflowClient", experiment_id: str, record: RunRecord) -> "Run":
    """A new run for `record`, without its parameters."""
    tags = {**identity_tags(record), **owner_tags()}
    return client.create_run(experiment_id, start_time=record.started_ms, run_name=record.run_name, tags=tags)


def identity_tags(record: RunRecord) -> dict[str, str]:
    """The tags that a run has from its start."""
    parent = {} if record.parent_uid is None else {PARENT_UID_TAG: record.parent_uid}
    return {**record.tags, UID_TAG: record.uid, **parent}


def owner_tags() -> dict[str, str]:
    """The tags that name this process, which feeds the run."""
    return {f"{OWNER_PREFIX}{name}": value for name, value in this_process().items()}


def reap_dead_runs(client: "MlflowClient") -> list[str]:
    """Set runs that a process of this machine left open when it was killed to KILLED; their names.

    A run without an owner, or of another machine, is left alone.
    """
    experiments = client.search_experiments(filter_string=f"name LIKE '{EXPERIMENT_PREFIX}%'")
    is_ours = f"tags.`{OWNER_PREFIX}{HOST}` = '{this_machine()}'"
    running = client.search_runs(
        [experiment.experiment_id for experiment in experiments], f"attributes.status = 'RUNNING' and {is_ours}"
    )
    dead = [run for run in running if has_died(_owner(run))]
    for run in dead:
        client.set_terminated(run.info.run_id, "KILLED")
    return [run.info.run_name for run in dead]


def _owner(run: "Run") -> dict[str, str]:
    tags = run.data.tags
    return {name: tags[f"{OWNER_PREFIX}{name}"] for name in OWNER_FIELDS if f"{OWNER_PREFIX}{name}" in tags}


def join_parent(client: "MlflowClient", run: "Run", parent_uid: str) -> bool:
    """Make `run` a child of the run `parent_uid`; False where MLflow does not know that one yet."""
    parent = find_run(client, run.info.experiment_id, parent_uid)
    if parent is not None and run.data.tags.get(PARENT_TAG) != parent.info.run_id:
        _set_parent(client, run, parent)
    return parent is not None


def adopt_children(client: "MlflowClient", parent: "Run", uid: str) -> None:
    """Make the runs that name `uid` as their parent children of `parent`."""
    for child in client.search_runs([parent.info.experiment_id], f"tags.`{PARENT_UID_TAG}` = '{uid}'"):
        if child.data.tags.get(PARENT_TAG) != parent.info.run_id:
            _set_parent(client, child, parent)


def _set_parent(client: "MlflowClient", child: "Run", parent: "Run") -> None:
    from mlflow.entities import RunTag

    # Parent and child may do this at the same moment. MLflow's `set_tag` reads and then inserts, so the second of two
    # fails on the table's key and its run would continue without MLflow; `log_batch` tries again.
    client.log_batch(child.info.run_id, tags=[RunTag(PARENT_TAG, parent.info.run_id)])
