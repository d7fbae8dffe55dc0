"""The deployment `score`: a registered model behind real vLLM, for as long as it takes to score a file."""

import json

import pandas as pd
import psutil
import pytest

from experiments.presets import PRESETS
from rmcore.data.table import read_pairs
from rmcore.model import BradleyTerryRM
from rmcore.processes import marked
from rmcore.serving.parity import FLOAT32_TOLERANCE
from tasks.mlflow_client import connect

pytestmark = pytest.mark.services
NUM_PAIRS = 6


@pytest.fixture(scope="module")
def trained(services):
    """The checkpoint of a run that registered it as rm-to-score, and the folder of the pairs it was measured on."""
    config = PRESETS["smoke"].model_copy(update={"study": "to-score"}).model_dump(mode="json")
    config["evaluate"]["num_resamples"] = 100
    run = services.wait(services.trigger({"config": config}).raise_for_status().json()["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    [prepared], [checkpoint] = (
        services.home.glob("store/prepare/*/test.parquet"),
        services.home.glob("store/train/*/best"),
    )
    return BradleyTerryRM.from_pretrained(checkpoint, device="cpu"), prepared, checkpoint


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
    run, seen = score(services, model="models:/rm-to-score@candidate", data=str(prepared), limit=NUM_PAIRS)
    assert len(seen) > 2, "a front door, the keeper and vLLM"
    assert not still_running(seen)
    [folder] = services.home.glob("scores/rm-to-score-1-*")
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
    assert any("pairwise accuracy" in text and "rm-to-score/1" in text for text in described)
    assert any(one["info"]["run_id"] in text for text in described)


def test_a_checkpoint_folder_scores_rows_of_prompt_and_response_and_tells_what_it_cut(
    vllm, services, trained, tmp_path
):
    rm, _, checkpoint = trained
    rows = [
        ("What is 2 + 2?", "4"),
        ("Grüße! 🙂", "Hello."),
        ("Count.", "one two " * 2 * rm.renderer.rendering.max_seq_len),
    ]
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in [*rows, ("no answer", None)]]
    file.write_text("\n".join(lines) + "\n")
    score(services, model=str(checkpoint), data=str(file))
    [folder] = services.home.glob(f"scores/{checkpoint.parent.name}-best-*")
    table = pd.read_parquet(folder / "rewards.parquet")
    assert table[["prompt", "response"]].values.tolist() == [list(row) for row in rows]
    assert table.reward.tolist() == pytest.approx(rm.score(*zip(*rows, strict=True)).tolist(), abs=FLOAT32_TOLERANCE)
    assert (table.cut > 0).tolist() == [False, False, True]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["num_rows"], summary["num_unusable"], summary["num_cut"]) == (3, 1, 1)
    assert summary["pairwise_accuracy"] is None


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


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("models:/rm-to-score/99", "rm-to-score has the versions 1 (@candidate"),
        ("models:/rm-to-score@best", "rm-to-score has the versions 1 (@candidate"),
        ("models:/rm-unknown/1", "there are the models rm-to-score"),
        ("models:/rm-to-score", "models:/NAME@ALIAS"),
    ],
    ids=["version", "alias", "name", "form"],
)
def test_a_model_that_is_not_registered_is_refused_with_what_there_is(services, trained, model, said):
    before = services.mlflow_runs("scores")
    started = services.trigger({"model": model, "data": str(trained[1])}, "score").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "FAILED"
    assert said in run["state"]["message"]
    assert services.mlflow_runs("scores") == before


@pytest.mark.parametrize(("field", "value"), [("limit", 0), ("over_length", "chop")], ids=["bound", "choice"])
def test_a_bad_parameter_is_refused_by_the_form_naming_the_field(services, field, value):
    answer = services.trigger({"model": "models:/rm-to-score/1", "data": "pairs.jsonl", field: value}, "score")
    assert answer.status_code == 409
    assert field in answer.text
