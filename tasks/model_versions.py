"""Checkpoints in MLflow's model registry: one version per key, with rmcore's code to load it, and how it was judged.

Aliases follow the evidence: `candidate` is the newest version, `passed-labels` passed on labelled pairs or logged
answers, `ready` was judged so on a policy's samples, `confirmed` gained when it was optimised against.
"""

import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rmcore
from rmcore.readiness.verdict import LOWEST_READY_RUNG, PASSED, verdict_tags
from rmcore.reporting.html.note import plain
from rmcore.reporting.schema import NextRung, Verdict
from rmcore.reporting.verdict_style import check_result
from tasks.mlflow_client import tolerating
from tasks.run_record import MAX_VALUE_CHARS, texts

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion

MODEL_REQUIREMENTS = ("mlflow", "torch", "transformers", "safetensors", "pydantic", "numpy", "pandas", "jinja2")
"""Packages that serve a registered model elsewhere; named, because MLflow's own guess would import torch here."""
REGISTRY_SCHEME = "models:/"
CANDIDATE, PASSED_LABELS, READY, CONFIRMED = "candidate", "passed-labels", "ready", "confirmed"
"""Aliases: the newest version; passed at evidence level 1 or 2; ready at 3 (or gained); gained at 4."""
TOP_RUNG = 4
CONFIRMATION_TAG = "rm.confirmation"
"""Tag of what the fourth level has shown of a version: gained, lost or unclear. Later judgements on less leave it."""
CONFIRMATION_HEADLINE_TAG = "rm.confirmation_headline"
_CONFIRMED_BY: Mapping[str, dict[str, bool]] = {"gained": {CONFIRMED: True}, "lost": {CONFIRMED: False, READY: False}}
"""How a status of the fourth level moves aliases; an unclear one moves none."""


def judgement_tags(
    gate: Sequence[Mapping[str, Any]], readiness: Mapping[str, Any], verdict: Verdict, next_rung: NextRung | None
) -> dict[str, str]:
    """Tags of a model version that say how it was judged."""
    checks = {f"rm.gate.{check['name']}": f"{check_result(check)[2:]}: {check['text']}" for check in gate}
    numbers = {
        f"rm.original_score.{part}": value for part, value in readiness.items() if isinstance(value, int | float | str)
    }
    is_decided = verdict["rung"] == TOP_RUNG and verdict["status"] in _CONFIRMED_BY
    confirmation = confirmation_tags(verdict) if is_decided else {}
    return texts(verdict_tags(verdict, next_rung) | checks | numbers) | confirmation


def alias_moves(verdict: Verdict) -> dict[str, bool]:
    """The aliases about which a verdict says something, and whether a version with it earned them.

    >>> alias_moves({"rung": 1, "status": "passes", "evidence": "", "headline": "", "reasons": []})
    {'ready': False, 'passed-labels': True}
    """
    rung, status = verdict["rung"], verdict["status"]
    moves = {READY: rung >= LOWEST_READY_RUNG and status in PASSED}
    if rung < LOWEST_READY_RUNG:
        moves[PASSED_LABELS] = status == "passes"
    return moves | (_CONFIRMED_BY.get(status, {}) if rung == TOP_RUNG else {})


def confirmation_tags(verdict: Verdict) -> dict[str, str]:
    """Tags of a model version that say what optimising against it has shown, at the fourth level."""
    return texts({CONFIRMATION_TAG: verdict["status"], CONFIRMATION_HEADLINE_TAG: verdict["headline"]})


def register_checkpoint(
    client: "MlflowClient",
    run: "Run",
    *,
    checkpoint: str,
    name: str,
    key: str,
    tags: Mapping[str, str],
    moves: Mapping[str, bool],
    note: str,
) -> str:
    """The version of `checkpoint` in the registered model `name`, made where its `key` has none; judged again.

    Its tags, aliases and description in Markdown are set: `moves` says whether it earned each alias that its evidence
    speaks about, and the alias `candidate` is the newest version's. A version that lost on the fourth level is not
    ready for what a lower one says, until it gains there.

    `run` names it as its outcome. The caller holds a lock: two callers at once would make two versions of one key.
    """
    from mlflow.entities import LoggedModelOutput

    found = client.search_model_versions(f"name = '{name}' and tags.`rm.key` = '{key}'", max_results=1)
    version = found[0] if found else _new_version(client, run, Path(checkpoint), name, key)
    newest = max(int(one.version) for one in client.search_model_versions(f"name = '{name}'"))
    is_newest = {CANDIDATE: True} if int(version.version) == newest else {}
    _judge(client, version, note, tags, {**moves, **is_newest})
    model_id, outputs = version.tags["rm.model_id"], client.get_run(run.info.run_id).outputs
    if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
        client.log_outputs(run.info.run_id, [LoggedModelOutput(model_id, step=0)])
    return str(version.version)


def confirm_versions(client: "MlflowClient", key: str, tags: Mapping[str, str]) -> list[str]:
    """Tell every version of a checkpoint's `key` what serving it has shown; their addresses, `models:/NAME/VERSION`.

    The caller holds the lock of `register_checkpoint`.
    """
    found = client.search_model_versions(f"tags.`rm.key` = '{key}'")
    for version in found:
        if tags[CONFIRMATION_TAG] not in _CONFIRMED_BY and CONFIRMATION_TAG in version.tags:
            continue  # the earlier link is kept
        note = (version.description or "").removesuffix(_confirmation(version.tags))
        _judge(client, version, note, tags, _CONFIRMED_BY.get(tags[CONFIRMATION_TAG], {}))
    return [f"{REGISTRY_SCHEME}{version.name}/{version.version}" for version in found]


def _judge(
    client: "MlflowClient", version: "ModelVersion", note: str, tags: Mapping[str, str], moves: Mapping[str, bool]
) -> None:
    """Set the tags of a version, describe it by the note of its last judgement and, where that is another one, by what
    the fourth level has shown, give it the aliases that it earned and take those away that it has not.
    """
    name, number, known = version.name, version.version, {**version.tags, **tags}
    # Each call takes some hundredths of a second, and most runs judge a version as it was judged before.
    for tag, text in tags.items():
        if version.tags.get(tag) != text:
            client.set_model_version_tag(name, number, tag, text)
    more = "" if known.get("rm.headline") == known.get(CONFIRMATION_HEADLINE_TAG) else _confirmation(known)
    if version.description != (description := note[: MAX_VALUE_CHARS - len(more)] + more):
        client.update_model_version(name, number, description)
    if known.get(CONFIRMATION_TAG) == "lost":
        moves = {**moves, READY: False}
    has = client.get_model_version(name, number).aliases
    for alias, earned in moves.items():
        if earned and alias not in has:
            client.set_registered_model_alias(name, alias, number)
        elif not earned and alias in has:
            client.delete_registered_model_alias(name, alias)


def _confirmation(tags: Mapping[str, str]) -> str:
    if CONFIRMATION_TAG not in tags:
        return ""
    headline = plain(tags.get(CONFIRMATION_HEADLINE_TAG, ""))
    return f"\n**Evidence level {TOP_RUNG} of {TOP_RUNG}**, optimised against: {tags[CONFIRMATION_TAG]}. {headline}\n"


def _new_version(client: "MlflowClient", run: "Run", checkpoint: Path, name: str, key: str) -> "ModelVersion":
    with tolerating("RESOURCE_ALREADY_EXISTS"):
        client.create_registered_model(name)
    logged = client.create_logged_model(
        run.info.experiment_id,
        name=name,
        source_run_id=run.info.run_id,
        tags={"rm.key": key},
        model_type="reward-model",
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_reward_model(folder, checkpoint, run_id=run.info.run_id, logged_model=logged)
        client.log_model_artifacts(logged.model_id, str(folder))
    client.finalize_logged_model(logged.model_id, "READY")
    # The logged model's own folder, with its id, is the one local path that a server accepts as source;
    # `models:/<id>` would be looked up at MLflow's global address instead of this client's.
    return client.create_model_version(
        name,
        source=logged.artifact_location,
        run_id=run.info.run_id,
        model_id=logged.model_id,
        tags={"rm.key": key, "rm.model_id": logged.model_id},
    )


def save_reward_model(folder: Path, checkpoint: Path, *, run_id: str, logged_model: Any) -> None:
    """Write `checkpoint` with rmcore's code as an MLflow pyfunc folder: (prompt, response) strings to a reward.

    The caller holds a lock: MLflow hands the model from code over through a global variable.
    """
    import pandas as pd
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types.schema import ColSpec, Schema

    save_model(
        folder,
        python_model=str(Path(__file__).with_name("registered_model.py")),
        artifacts={"checkpoint": checkpoint.absolute().as_uri()},  # of a plain path MLflow decodes what looks quoted
        code_paths=[str(Path(rmcore.__file__).parent)],
        signature=ModelSignature(
            inputs=Schema([ColSpec("string", "prompt"), ColSpec("string", "response")]),
            outputs=Schema([ColSpec("double", "reward")]),
        ),
        input_example=pd.DataFrame({"prompt": ["What is 2 + 3?"], "response": ["2 + 3 is 5."]}),
        # A local build such as 2.13.0+cpu is on no package index.
        pip_requirements=[f"{name}=={installed_version(name).partition('+')[0]}" for name in MODEL_REQUIREMENTS],
        mlflow_model=Model(
            artifact_path=logged_model.artifact_location,
            model_uuid=logged_model.model_id,
            model_id=logged_model.model_id,
            run_id=run_id,
        ),
    )
