"""`rm-opt rlhf` as a user runs it: ten steps from preferences to a policy, with a real vLLM reward server."""

import importlib.util
import re
from pathlib import Path

import pytest

from flows.cli import app
from rmcore.data.table import write_pairs

_SPEC = importlib.util.spec_from_file_location("commands", Path(__file__).with_name("commands.py"))
commands = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(commands)

pytestmark = pytest.mark.services
SETTINGS = {
    "evaluate.num_resamples": 100,
    "landscape.parts": "[normalized]",
    "readiness.planned_kl": 0.4,
    "policy.sft_examples": 300,
    "policy.sft_epochs": 1,
    "policy.num_prompts": 8,
    "policy.samples_per_prompt": 8,
    "policy.max_new_tokens": 40,
    "policy.gradient_prompts": 0,
    "rlhf.measure_every": 5,
    "rlhf.prompts_per_step": 2,
    "rlhf.group_size": 4,
    "rlhf.num_prompts": 8,
    "rlhf.samples_per_prompt": 2,
}
PIPELINE = ["prepare", "train", "evaluate", "landscape", "readiness"]
POLICY = ["policy", "samples", "optimize", "readiness_v2", "grpo"]
SMALL = ["rlhf", "--preset", "smoke", *commands.assignments(SETTINGS)]


@pytest.fixture(scope="module")
def home(tmp_path_factory, vllm):
    home = commands.Home(tmp_path_factory.mktemp("rlhf"))
    home.environment["RM_OPT_VLLM"] = vllm
    return home


@pytest.fixture(scope="module")
def cold(home):
    """What the first command leaves: nothing was there before."""
    outcome, said = home.outcome(*SMALL, "--policy-steps", 10)
    assert outcome["executed"] == PIPELINE + POLICY
    return outcome, said


def test_a_cold_start_ends_with_a_policy_and_says_whether_gold_rose(cold):
    outcome, said = cold
    record = outcome["results"]["rlhf"]
    assert record["rewards"] == "vllm"
    assert [point["step"] for point in record["curve"]] == [0, 5, 10]
    assert record["verdict"]["status"] in ("rose", "fell", "unclear")
    assert record["verdict"]["headline"] in said
    page = Path(outcome["report"]).read_text()
    assert record["verdict"]["headline"].replace("+", "&#43;") in page or record["verdict"]["headline"] in page
    assert "data:image/png" in page


def test_the_same_command_computes_nothing_and_finds_the_same(home, cold):
    outcome, _ = home.outcome(*SMALL, "--policy-steps", 10)
    assert outcome["executed"] == []
    assert outcome["results"]["rlhf"] == cold[0]["results"]["rlhf"]


def test_the_reward_model_alone_is_the_pipeline_and_shares_its_artifacts(home, cold):
    outcome, said = home.outcome(*SMALL, "--mode", "rm")
    assert outcome["executed"] == []
    assert outcome["results"].get("rlhf") is None
    assert "verdict" in said


def test_a_policy_alone_is_trained_against_a_checkpoint_of_anywhere(home, cold):
    arguments = ["--mode", "policy", "--checkpoint", cold[0]["checkpoint"], "--policy-steps", 2, "--refresh-every", 1]
    outcome, said = home.outcome(*SMALL, *arguments, "--set", "rlhf.rewards=local", "--set", "rlhf.refresh_pairs=16")
    assert outcome["executed"] == ["optimize", "grpo"]
    record = outcome["results"]
    assert record["rewards"] == "local"
    assert [done["step"] for done in record["seeds"][0]["refreshes"]] == [1]
    assert commands.are_pngs({"rlhf": outcome["figures"]["rlhf"]})
    assert record["verdict"]["headline"] in said


def test_pairs_of_ones_own_without_a_judge_are_optimised_and_nothing_is_claimed(home, gold_pairs):
    write_pairs(gold_pairs[:80], home.folder / "pairs.parquet")
    local = ["--set", "rlhf.rewards=local", "--policy-steps", 1]
    outcome, said = home.outcome(*SMALL, "--preference-data", "pairs.parquet", "--set", "study=own", *local)
    assert "readiness_v2" not in outcome["executed"]
    assert outcome["results"]["rlhf"]["verdict"]["status"] == "unknown"
    assert "nobody judged" in said


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--mode", "policy"], "--checkpoint"),
        (["--checkpoint", "somewhere"], "--mode policy"),
        (["--judge", "no_such_module:judge"], "no_such_module"),
        (["--preference-data", "pairs.parquet", "--refresh-every", "2"], "policy.judge"),
        (["--set", "rlhf.rewards=vllm", "--set", "rlhf.aggregate=mean"], "rlhf"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(home, gold_pairs, arguments, word):
    write_pairs(gold_pairs[:80], home.folder / "pairs.parquet")
    before = home.artifacts()
    done = home.rm_opt(*SMALL, *arguments, check=False)
    assert done.returncode != 0
    assert word in " ".join(done.stderr.split())
    assert home.artifacts() == before


def test_the_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        app(["rlhf", "--help"])
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "rm-opt rlhf --refresh-every 10 --seeds 3" in " ".join(said.split())
