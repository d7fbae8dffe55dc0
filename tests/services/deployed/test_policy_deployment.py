"""Best-of-n and readiness v2: from forms, then as commands.

What a form computed a command finds done: the forms show that the worker computes it and what MLflow gets, the commands
what a user reads.
"""

import json
import shlex
from pathlib import Path

import pytest

from rmcore.stages.order import pipeline_stages
from tasks.mlflow_client import connect

pytestmark = pytest.mark.services


def files(services, study, folder):
    """Files in a folder of the one MLflow run of a study."""
    [run] = services.mlflow_runs(study)
    assert run["info"]["status"] == "FINISHED"
    return {file.path for file in connect(services.tracking).list_artifacts(run["info"]["run_id"], folder)}


def described(services, study):
    """The description of the one MLflow run of a study."""
    [run] = services.mlflow_runs(study)
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}["mlflow.note.content"]


def are_pngs(figures):
    return all(Path(path).read_bytes().startswith(b"\x89PNG") for path in figures.values())


def test_best_of_n_and_readiness_share_their_samples_and_show_in_mlflow(services, drawn):
    run, made = drawn["best-of-n"]
    assert made == ["overoptimization", "policy", "samples"]  # the rest is there: the smoke pipeline ran before
    found = files(services, "chosen", "overoptimization/figures")
    assert found == {"overoptimization/figures/overoptimization.png"}
    [told] = [text for text in services.artifacts(run["id"]) if "Best-of-n" in text]
    assert "samples of 8 prompts" in told
    assert services.edges(run["id"]) == {
        "prepare": set(), "train": {"prepare"}, "policy": {"prepare"}, "samples": {"prepare", "policy"},
        "overoptimization": {"prepare", "train", "samples"}, "report": {"overoptimization"},
    }  # fmt: skip
    assert "samples of 8 prompts" in services.report(run["id"])
    note = described(services, "chosen")
    assert "Best of 8" in note
    assert "report/report.html" in note
    run, made = drawn["readiness"]
    assert services.edges(run["id"])["report"] == {"readiness", "readiness_v2"}
    assert "report/report.html" in described(services, "judged")
    assert "Evidence level 3 of 4" in described(services, "judged")
    assert made == ["readiness_v2"]
    [told] = [text for text in services.artifacts(run["id"]) if "checks on samples of the policy" in text]
    assert "✗ fail" in told or "? undecided" in told  # six steps of training are not enough for any policy


def test_best_of_n_as_a_command_computes_nothing_again_and_shows(command, with_policy, drawn):
    before = command.made()
    outcome, said = command.outcome("readiness", "best-of-n", "--preset", "smoke", config=with_policy)
    assert outcome["executed"] == []
    assert command.made() == before
    found = outcome["results"]
    assert [row["n"] for row in found["overoptimization"]["best_of_n"]] == [1, 2, 4, 8]
    assert found["sampling"]["num_samples"] == 8 * 8
    assert "overoptimization" in outcome["figures"]
    assert are_pngs(outcome["figures"])
    assert json.loads((Path(outcome["folder"]) / "summary.json").read_text()) == found
    for words in ("computed nothing: every stage was cached", "figure", "record", "gold"):
        assert words in said


def test_a_run_with_a_policy_is_judged_by_its_samples_and_reported_with_them(command, with_policy, drawn):
    """Without one it is judged on labelled pairs: see the tests of the pipeline."""
    outcome, _ = command.outcome("run", "--preset", "smoke", config=with_policy)
    found = outcome["results"]
    assert outcome["executed"] == []
    assert found["verdict"]["rung"] == 3
    # Of eight samples a prompt: the best of fewer than sixteen, as many as have opponents left.
    assert {"win_rate_", "planned_gain"} < {check["name"].rstrip("0123456789") for check in found["gate"]}
    assert [stage["name"] for stage in found["stages"]] == [*pipeline_stages(with_policy)]
    on_samples = found["policy"]["readiness"]["verdict"]
    assert {**found["verdict"], "reasons": on_samples["reasons"]} == on_samples
    # What speaks against the whole outcome, such as a training of few steps, is named before what the samples say.
    assert found["verdict"]["reasons"][-len(on_samples["reasons"]) :] == on_samples["reasons"]
    assert found["readiness"]["version"] == "v1"  # kept beside it
    assert found["verdict"]["headline"] in Path(outcome["report"]).read_text()

    program, *words = shlex.split(found["next_rung"]["command"])
    assert (program, words[:2]) == ("rm-opt", ["readiness", "policy"])
    small = ["--set", "policy.num_prompts=8", "--set", "policy.samples_per_prompt=8"]  # those that were drawn
    again, _ = command.outcome(*words, *small)
    assert not {"prepare", "train", "policy", "samples"} & set(again["executed"])
    assert again["results"]["checkpoint"].startswith(str(command.services.home))
    program, *words = shlex.split(again["results"]["next_rung"]["command"])
    assert words[2].startswith(f"{found['study']}-seed0-readiness-")


def test_everything_may_come_from_outside(command, with_policy, smoke, drawn, own_pairs):
    """A reward model, a policy and pairs of one's own: there is no training, and nobody judges."""
    policy = min(command.services.home.glob("store/policy/*/model"), key=lambda one: one.stat().st_mtime)
    before = command.made()
    outcome, said = command.outcome(
        "readiness", "best-of-n", "--checkpoint", smoke.artifacts["train"] / "best", "--policy", policy,
        "--data", own_pairs, "--n", 4, "--prompts", 4, "--preset", "smoke", config=with_policy,
    )  # fmt: skip
    assert outcome["executed"] == ["prepare", "policy", "samples", "overoptimization"]
    assert "computed prepare, policy, samples, overoptimization" in said
    assert outcome["results"]["sampling"]["num_samples"] == 16
    assert outcome["results"]["overoptimization"]["judge"] == "nobody"
    assert outcome["figures"] == {}
    made = command.made() - before
    assert sorted(name.partition("/")[0] for name in made) == ["overoptimization", "policy", "prepare", "samples"]
    store = command.services.home / "store"
    assert not [name for name in made if (store / name / "model").exists()]  # the policy stays where it is


def test_readiness_v2_without_a_judge_is_refused_before_anything_runs(command, with_policy, own_pairs):
    before = command.made()
    theirs = ["--policy", "sft", "--data", own_pairs]
    done = command("readiness", "policy", *theirs, "--preset", "smoke", config=with_policy, check=False)
    assert done.returncode == 2
    assert "which is unknown for" in " ".join(done.stderr.split())
    assert "policy.samples" in done.stderr
    assert command.made() == before
