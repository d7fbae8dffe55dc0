"""The deployment `score`: a registered model behind real vLLM, for as long as it takes to score a file."""

import json

import pandas as pd
import psutil
import pytest

from rmcore.core.errors import RmcoreError
from rmcore.core.processes import marked
from rmcore.data.table import read_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.parity import FLOAT32_TOLERANCE
from tasks.mlflow_client import connect
from tasks.model_versions import checkpoint_of

pytestmark = pytest.mark.services
NUM_PAIRS = 6


@pytest.fixture(scope="module")
def trained(smoke):
    """The checkpoint of a run that registered it as rm-from-ui, the pairs it was measured on, and its folder."""
    checkpoint = smoke.artifacts["train"] / "best"
    rm = BradleyTerryRM.from_pretrained(checkpoint, device="cpu")
    return rm, smoke.artifacts["prepare"] / "test.parquet", checkpoint


def of_vllm(services):
    """Processes of reward servers that this home's flow runs started, vLLM's own below them."""
    doors = [p for p in marked("RM_OPT_HOME", str(services.home)) if "rmcore.serving.process" in p.cmdline()]
    return {process for door in doors for process in (door, *door.children(recursive=True))}


def still_running(processes):
    _, alive = psutil.wait_procs(processes, timeout=60)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def score(services, **parameters):
    """The flow run of the deployment when it has ended, and the processes of vLLM that were seen meanwhile."""
    started = services.trigger(parameters, "score").raise_for_status().json()
    seen = set()
    run = services.wait(started["id"], until=lambda: seen.update(of_vllm(services)))
    assert run["state_type"] == "COMPLETED", run["state"]
    return run, seen


def tracked(services, run):
    """The MLflow run of a flow run."""
    found = {
        tags["prefect.flow_run_id"]: (one, tags)
        for one in services.mlflow_runs("scores")
        for tags in [{tag["key"]: tag["value"] for tag in one["data"]["tags"]}]
    }
    return found[run["id"]]


def test_a_registered_model_scores_pairs_as_pytorch_does_and_nothing_of_vllm_stays(vllm, services, trained):
    rm, prepared, _ = trained
    run, seen = score(services, model="models:/rm-from-ui@candidate", data=str(prepared), limit=NUM_PAIRS)
    assert len(seen) > 2, "an HTTP app, the supervisor and vLLM"
    assert not still_running(seen)
    assert services.edges(run["id"]) == {"read": set(), "score": {"read"}, "write": {"score"}}
    [folder] = services.home.glob("scores/rm-from-ui-1-*")
    table = pd.read_parquet(folder / "rewards.parquet")
    pairs = read_pairs(prepared)[:NUM_PAIRS]
    columns = ["pair_id", "prompt_id", "reward_chosen", "reward_rejected", "chosen_cut", "rejected_cut"]
    assert table.columns.tolist() == columns
    assert table.pair_id.tolist() == [pair.pair_id for pair in pairs]
    for side in ("chosen", "rejected"):
        expected = rm.score([pair.prompt for pair in pairs], [getattr(pair, side) for pair in pairs])
        assert table[f"reward_{side}"].tolist() == pytest.approx(expected.tolist(), abs=FLOAT32_TOLERANCE)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["pairwise_accuracy"] == (table.reward_chosen > table.reward_rejected).mean()
    one, tags = tracked(services, run)
    metrics = {metric["key"]: metric["value"] for metric in one["data"]["metrics"]}
    assert one["info"]["status"] == "FINISHED"
    assert (tags["rm.kind"], tags["rm.checkpoint_digest"]) == ("scores", summary["checkpoint_digest"])
    assert metrics["cost/rows_per_second"] == pytest.approx(summary["rows_per_second"])
    assert [file.path for file in connect(services.tracking).list_artifacts(one["info"]["run_id"])] == ["summary.json"]
    described = services.artifacts(run["id"])
    assert any("pairwise accuracy" in text and "rm-from-ui/1" in text for text in described)
    assert any(one["info"]["run_id"] in text for text in described)


def test_a_cancelled_run_leaves_nothing_of_vllm(vllm, services, trained):
    _, prepared, checkpoint = trained
    started = services.trigger({"model": str(checkpoint), "data": str(prepared)}, "score").raise_for_status().json()
    place = f"{services.api}/flow_runs/{started['id']}"
    services.wait(started["id"], until=lambda: len(of_vllm(services)) > 2)
    family = of_vllm(services)
    assert len(family) > 2
    services.http.post(f"{place}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()
    assert services.wait(started["id"])["state_type"] == "CANCELLED"
    assert not still_running(family)
    assert not still_running(of_vllm(services))


def test_a_model_that_is_not_registered_is_refused_with_what_there_is(services, trained):
    before = services.mlflow_runs("scores")
    parameters = {"model": "models:/rm-from-ui/99", "data": str(trained[1])}
    run = services.wait(services.trigger(parameters, "score").raise_for_status().json()["id"])
    assert run["state_type"] == "FAILED"
    assert "rm-from-ui has the versions 1 (@candidate" in run["state"]["message"]
    assert services.mlflow_runs("scores") == before


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("models:/rm-from-ui@best", r"rm-from-ui has the versions 1 \(@candidate"),
        ("models:/rm-unknown/1", "there are the models .*rm-from-ui"),
        ("models:/rm-from-ui", "models:/NAME@ALIAS"),
    ],
    ids=["alias", "name", "form"],
)
def test_other_names_of_models_are_refused_too(services, trained, tmp_path, model, said):
    with pytest.raises(RmcoreError, match=said):
        checkpoint_of(model, services.tracking, tmp_path)


@pytest.mark.parametrize(("field", "value"), [("limit", 0), ("over_length", "chop")], ids=["bound", "choice"])
def test_a_bad_parameter_is_refused_by_the_form_naming_the_field(services, field, value):
    answer = services.trigger({"model": "models:/rm-from-ui/1", "data": "pairs.jsonl", field: value}, "score")
    assert answer.status_code == 409
    assert field in answer.text
