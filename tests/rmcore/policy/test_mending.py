"""While labelled pairs speak against a model, the next step is one command that changes the run, and never a policy."""

import re
import shlex
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from flows.cli import app
from flows.settings import load_config
from rmcore.config.data import DataConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.evaluation.diagnosis import ECE, OVERFITTING, REVERSED, UNDER_TRAINED, WILD, Diagnosis
from rmcore.policy.readiness.mending import MANY_STEPS, Trained, mending_of_checkpoint, mending_step, pairs_to_decide

OVER = {"value": 0.05, "ci_low": -0.03, "ci_high": 0.13, "num": 60}
NAMES = ("accuracy_over_baseline", "pairwise_accuracy", ECE, "train_test_gap")


def check(name, unclear, value=0.2, passed=False):
    return {"name": name, "value": value, "passed": passed, "unclear": unclear and not passed}


def verdict(status, rung=1):
    return {"rung": rung, "evidence": "labelled pairs", "status": status, "headline": "", "reasons": []}


def trained(data=None, **changed):
    train = TrainConfig(**{"epochs": None} | changed)
    config = PipelineConfig(data=DataConfig(source="pairs.csv", **data or {}), train=train)
    return Trained("mine-seed0-1a2b", config, num_steps=20, num_passes=1.05, seconds=40.0)


def mended(found=(), checks=(), over=OVER, run=None, temperature=1.0):
    metrics = {"accuracy_over_baseline": over, "temperature": {"value": temperature}}
    diagnoses = [Diagnosis("seen", name, "do") for name in found]
    return mending_step(verdict("fails"), diagnoses, checks, metrics, run or trained())


@given(
    st.sets(st.sampled_from([UNDER_TRAINED, OVERFITTING, REVERSED, WILD])),
    st.lists(
        st.builds(check, st.sampled_from(NAMES), st.booleans(), st.sampled_from([None, 0.2]), st.booleans()), max_size=4
    ),
    st.tuples(st.floats(-0.1, 0.2), st.floats(0.01, 0.2)),
    st.sampled_from(["fails", "unclear"]),
    st.sampled_from([1, 2]),
    st.sampled_from([20, MANY_STEPS]),
    st.floats(0.5, 12),
    st.sampled_from([None, 40]),
    st.floats(0.5, 2),
)
def test_it_is_one_command_that_there_is_and_changes_the_run(
    found, checks, gain, status, rung, steps, passes, fixed, temperature
):
    run = trained(steps=fixed)._replace(num_steps=steps, num_passes=passes)
    over = {"value": gain[0], "ci_low": gain[0] - gain[1], "ci_high": gain[0] + gain[1], "num": 200}
    metrics = {"accuracy_over_baseline": over, "temperature": {"value": temperature}}
    diagnoses = [Diagnosis("seen", name, "do") for name in found]
    more = mending_step(verdict(status, rung), diagnoses, checks, metrics, run)
    if more is None:
        assert all(one["passed"] for one in checks)
        return
    assert more["rung"] == rung
    assert all(int(named.replace(",", "")) >= over["num"] for named in re.findall(r"about ([\d,]+)", more["evidence"]))
    failing = [one for one in checks if not one["passed"]]
    if "longer" in more["evidence"]:
        assert any(one["value"] is not None and not one["unclear"] for one in failing)
    program, first, *words = shlex.split(more["command"])
    assert program == "rm-opt"
    if first == "data":
        assert words == ["check", "pairs.csv"]
        return
    options = {option for parameter in get_command(app).commands[first].params for option in parameter.opts}
    assert words[:2] == ["--from", run.name]
    assert {word for word in words if word.startswith("--")} <= options
    changed = load_config(None, None, [after for word, after in pairwise(words) if word == "--set"], run.config)
    assert changed != run.config


def test_a_training_that_learned_nothing_is_made_longer_and_in_the_end_faster():
    assert mended([UNDER_TRAINED])["command"].endswith("--set train.epochs=4")
    assert mended([UNDER_TRAINED], run=trained(steps=20))["command"].endswith("--set train.steps=60")
    long = trained(lr=1e-5)._replace(num_steps=MANY_STEPS)
    assert mended([UNDER_TRAINED], run=long)["command"].endswith("--set train.lr=3e-05")


def test_a_training_that_has_not_seen_all_of_its_pairs_sees_them_before_more_are_labelled():
    short = trained(steps=20)._replace(num_passes=0.3)
    for found, failed in (([], check(NAMES[0], True)), ([], check("train_test_gap", False))):
        assert mended(found, [failed], run=short)["command"].endswith("--set train.steps=60")
    long = short._replace(num_steps=MANY_STEPS)  # of very many pairs a part is enough
    assert "pairs" in mended(checks=[check(NAMES[0], True)], run=long)["evidence"]


def test_what_is_learned_by_heart_gets_fewer_passes():
    run = trained()._replace(num_passes=8.0)
    assert mended([OVERFITTING], run=run)["command"].endswith("--set train.epochs=4")
    assert mended(checks=[check("train_test_gap", False)], run=run)["command"].endswith("--set train.epochs=4")
    assert mended(checks=[check(ECE, False)], run=run, temperature=1.6)["command"].endswith("--set train.epochs=4")


def test_half_of_nearly_four_passes_are_two_and_of_one_there_is_no_half():
    """309 pairs in steps of 16 are seen 3.99 times in four passes."""
    assert mended([OVERFITTING], run=trained()._replace(num_passes=3.99))["command"].endswith("--set train.epochs=2")
    once = mended([OVERFITTING], [check(NAMES[0], True)], run=trained(epochs=1)._replace(num_passes=1.04))
    assert "train.epochs" not in once["command"]


def test_labels_that_may_be_reversed_are_looked_at_as_the_run_read_them():
    names = {"split": "test", "prompt_column": "q", "chosen_column": "winner", "rejected_column": "the loser"}
    more = mended([REVERSED], run=trained(names | {"grade_columns": ("a", "b"), "limit": 9}))
    words = shlex.split(more["command"])[3:]
    assert words[0] == "pairs.csv"
    asked = list(zip(words[1::2], words[2::2], strict=True))
    wanted = {f"--{name.replace('_', '-')}": value for name, value in names.items()} | {"--limit": "9"}
    assert sorted(asked) == sorted([*wanted.items(), ("--grade-columns", "a"), ("--grade-columns", "b")])
    parameters = get_command(app).commands["data"].commands["check"].params
    assert set(dict(asked)) <= {option for parameter in parameters for option in parameter.opts}


def test_what_was_not_measured_asks_for_no_longer_training_and_what_passes_for_no_pairs():
    passed = check("accuracy_over_baseline", False, passed=True)
    shown = {"value": 0.1, "ci_low": 0.05, "ci_high": 0.15, "num": 200}
    for failing in (check(ECE, False, None), check("train_test_gap", False, None), check(ECE, True)):
        assert mended(checks=[passed, failing], over=shown)["evidence"] == "more labelled pairs"
    assert mended(checks=[passed], over=shown) is None  # what logged answers leave open
    assert (
        mended(checks=[check(ECE, False, None)], temperature=2, run=trained()._replace(num_passes=3))["evidence"]
        == "more labelled pairs"
    )


def test_what_too_few_pairs_leave_open_gets_more_of_them():
    undecided = [check("accuracy_over_baseline", True)]
    near = OVER | {"value": 0.07}
    assert pairs_to_decide(near) == 123
    assert mended(checks=undecided, over=OVER | {"value": 0.09})["command"].endswith("--set data.test_fraction=0.3")
    far = mended(checks=undecided)
    assert far["command"].endswith("--set data.source=MORE_PAIRS")
    assert "154 held-out ones" in far["evidence"]


@pytest.mark.parametrize(("status", "rung"), [("passes", 1), ("passes", 2), ("not_ready", 3), ("unclear", 3)])
def test_a_model_that_passes_or_was_tried_on_a_policy_needs_no_mending(status, rung):
    assert mending_step(verdict(status, rung), [], [], {}, trained()) is None
    assert (
        mending_of_checkpoint(verdict(status, rung), ["--checkpoint", "out/best"], DataConfig(source="pairs.csv"))
        is None
    )
