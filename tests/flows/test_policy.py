"""best-of-n, readiness v2 and its validation as a user runs them: real Prefect and MLflow, a process a command.

Works in a copy of the packages, as the tests of the pipeline do: a key digests the code.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from flows.cli import app
from rmcore.data.table import write_pairs

_SPEC = importlib.util.spec_from_file_location("commands", Path(__file__).with_name("commands.py"))
commands = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(commands)
Home, are_pngs, assignments = commands.Home, commands.are_pngs, commands.assignments

pytestmark = pytest.mark.services
PER_PROMPT = "policy.samples_per_prompt"
SETTINGS = {
    "evaluate.num_resamples": 100,
    "landscape.parts": "[normalized]",
    "readiness.planned_kl": 0.4,
    "policy.engine": "generate",
    "policy.sft_examples": 300,
    "policy.sft_epochs": 1,
    "policy.num_prompts": 8,
    PER_PROMPT: 8,
    "policy.max_new_tokens": 40,
    "policy.gradient_prompts": 1,
}
CHAIN = ["prepare", "train", "policy", "samples", "optimize"]
WHOLE = ["prepare", "train", "evaluate", "landscape", "readiness", "policy", "samples", "optimize", "readiness_v2"]
SMALL = ["--preset", "smoke", *assignments(SETTINGS)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def drawn(home):
    """What the first command leaves: nothing was there before."""
    outcome, said = home.outcome("best-of-n", *SMALL)
    assert outcome["executed"] == CHAIN
    return outcome, said


def test_best_of_n_draws_scores_and_shows(drawn):
    outcome, said = drawn
    found = outcome["results"]
    assert [row["n"] for row in found["optimize"]["best_of_n"]] == [1, 2, 4, 8]
    assert found["sampling"]["num_samples"] == 8 * 8
    assert {"overoptimization", "ensemble_disagreement"} <= outcome["figures"].keys()
    assert are_pngs(outcome["figures"])
    assert json.loads((Path(outcome["folder"]) / "summary.json").read_text()) == found
    for words in ("computed prepare, train, policy, samples, optimize", "figure", "record", "gold"):
        assert words in said


def test_a_second_best_of_n_computes_nothing_and_finds_the_same(home, drawn):
    before = home.artifacts()
    outcome, said = home.outcome("best-of-n", *SMALL)
    assert outcome["executed"] == []
    assert outcome["results"] == drawn[0]["results"]
    assert "computed nothing: every stage was cached" in said
    assert home.artifacts() == before


def test_readiness_v2_goes_on_from_the_same_samples(home, drawn):
    outcome, said = home.outcome("readiness", "--policy", "sft", *SMALL)
    assert outcome["executed"] == ["evaluate", "landscape", "readiness", "readiness_v2"]
    found = outcome["results"]
    assert found["readiness"]["version"] == "v2"
    assert found["verdict"]["headline"] in said
    assert said.count("FAIL") == len(found["verdict"]["reasons"]) > 0  # six steps make no reward model
    parts = drawn[0]["results"]["optimize"]["parts"]
    assert found["readiness"]["parts"]["signal_share"] == parts["signal_share"]


def test_a_run_with_a_policy_is_judged_by_v2_and_reported_with_it(home, drawn):
    """Without one it is v1: see the tests of the pipeline."""
    outcome, _ = home.outcome("run", *SMALL)
    found = outcome["results"]
    assert "readiness v2" in found["verdict"]["headline"]
    assert {"on_policy_accuracy", "planned_gain"} < {check["name"] for check in found["gate"]}
    assert [stage["name"] for stage in found["stages"]] == WHOLE
    assert found["policy"]["readiness"]["verdict"] == found["verdict"]
    assert found["readiness"]["version"] == "v1"  # kept beside it
    assert found["verdict"]["headline"] in Path(outcome["report"]).read_text()


def test_the_study_runs_and_says_which_score_it_is(home, drawn):
    small = SETTINGS | {"validation.steps": 2, "validation.measured_prompts": 4, "readiness.min_gain": 0.02}
    small |= {"data.gold.num_prompts": 60, "data.test_fraction": 0.15}  # the smoke run's, so its samples are there
    outcome, said = home.outcome("readiness", "--validate", "--size", "smoke", *assignments(small))
    found = outcome["results"]
    assert outcome["executed"] == ["population", "validation"]
    assert (found["num_backbones"], found["num_models"]) == (2, 22)
    assert found["verdict"] in said
    assert set(outcome["figures"]) == {"readiness_against_gain"}
    assert are_pngs(outcome["figures"])
    [validation] = home.folder.glob("store/validation/*")
    fit = json.loads((validation / "readiness_fit.json").read_text())
    assert fit["population"]["num_models"] == 22
    assert len(fit["features"]) == len(fit["means"]) == len(fit["coefficients"])


@pytest.fixture(scope="module")
def own_pairs(tmp_path_factory, gold_pairs):
    path = tmp_path_factory.mktemp("own") / "pairs.parquet"
    write_pairs(gold_pairs[:60], path)
    return path


def test_everything_may_come_from_outside(home, drawn, own_pairs):
    """A reward model, a policy and pairs of one's own: there is no training, and nobody judges."""
    [trained], [policy] = home.folder.glob("store/train/*"), home.folder.glob("store/policy/*/model")
    before = home.artifacts()
    others = {name: value for name, value in SETTINGS.items() if name not in ("policy.num_prompts", PER_PROMPT)}
    outcome, _ = home.outcome(
        "best-of-n", "--checkpoint", trained / "best", "--policy", policy, "--data", own_pairs,
        "--n", 4, "--prompts", 4, "--preset", "smoke", *assignments(others),
    )  # fmt: skip
    assert outcome["executed"] == ["prepare", "policy", "samples", "optimize"]
    assert outcome["results"]["sampling"]["num_samples"] == 16
    assert outcome["results"]["optimize"]["judge"] == "nobody"
    assert outcome["figures"] == {}
    made = {path.parent for path in home.artifacts() - before}
    assert {folder.parent.name for folder in made} == {"prepare", "policy", "samples", "optimize"}
    assert not [folder for folder in made if (folder / "model").exists()]  # the policy stays where it is


@pytest.mark.parametrize("command", ["readiness", "run"])
def test_readiness_v2_without_a_judge_is_refused_before_anything_runs(home, drawn, own_pairs, command):
    before = home.artifacts()
    theirs = {"readiness": ["--policy", "sft", "--data", own_pairs], "run": ["--set", f"data.source={own_pairs}"]}
    done = home.rm_opt(command, *theirs[command], *SMALL, check=False)
    assert done.returncode == 2
    assert "nobody knows it" in " ".join(done.stderr.split())
    assert "policy.samples" in done.stderr
    assert home.artifacts() == before


@pytest.mark.parametrize("command", ["best-of-n", "readiness"])
def test_the_help_shows_examples(command, capsys):
    with pytest.raises(SystemExit):
        app([command, "--help"])
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "Example" in said
    assert f"rm-opt {command}" in " ".join(said.replace("│", " ").split())
