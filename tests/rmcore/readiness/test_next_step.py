"""The next step is one command that changes the best run, that none has had, on the same held-out prompts."""

import re
import shlex
from dataclasses import asdict
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_command

from flows.cli import app
from flows.settings import load_config
from rmcore.config.data import DataConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.evaluation.diagnosis import OVERFITTING, REVERSED, STUCK, UNDER_TRAINED, WILD, GateCheck
from rmcore.readiness.next_step import (
    MANY_STEPS,
    Tried,
    best_of,
    held_out_by,
    next_step,
    pairs_to_decide,
    so_far,
    step_of_checkpoint,
    visible_gain,
)
from rmcore.readiness.verdict import verdict_on_labels
from rmcore.training.record import planned_steps

MINILM = ModelConfig(name="minilm", max_seq_len=128)


def verdict(status="unclear", rung=1):
    return {"rung": rung, "evidence": "labelled pairs", "status": status, "headline": "", "reasons": []}


def share(value, half=0.03, num=900):
    return {"value": value, "ci_low": value - half, "ci_high": value + half, "num": num, "reason": None}


def tried(
    name="mine-seed0-1a2b",
    *,
    found=(),
    gap=0.1,
    early=True,
    accuracy=0.7,
    over_first=None,
    unused=0,
    cut=0.0,
    num=400,
    status="unclear",
    rung=1,
    half=0.03,
    data=None,
    model=MINILM,
    **train,
):
    config = PipelineConfig(
        data=DataConfig(source="pairs.csv", **data or {}), model=model, train=TrainConfig(**{"lr": 5e-5} | train)
    )
    steps = planned_steps(config.train, num)
    return Tried(
        name,
        config,
        verdict(status, rung),
        frozenset(found),
        {"pairwise_accuracy": share(accuracy, half), "accuracy_over_baseline": share(0.02, half)},
        gap,
        {
            "steps": steps,
            "best_step": steps // 3 if early else steps,
            "num_pairs": 16 * steps,
            "num_distinct": num,
            "max_positions": 512,
            "truncation": {"test": {"num_cut_sides": round(2000 * cut), "num_pairs": 1000}},
            "wall_seconds": 40.0,
        },
        unused,
        None if over_first is None else share(over_first, half),
    )


def changes(more):
    """The settings that a printed command changes, as text."""
    program, first, *words = shlex.split(more["command"])
    assert (program, first, words[0]) == ("rm-opt", "run", "--from")
    return dict(after.split("=", 1) for word, after in pairwise(words) if word == "--set")


def step_of(*runs):
    return changes(next_step(runs))


FACTS = st.fixed_dictionaries(
    {
        "found": st.sets(st.sampled_from([UNDER_TRAINED, STUCK, OVERFITTING, REVERSED, WILD])),
        "gap": st.none() | st.floats(-0.1, 0.5),
        "early": st.booleans(),
        "accuracy": st.floats(0.3, 0.99),
        "unused": st.sampled_from([0, 300, 9000]),
        "cut": st.sampled_from([0.0, 0.05, 0.7]),
        "half": st.floats(0.005, 0.2),
        "rung": st.sampled_from([1, 2]),
        "status": st.sampled_from(["fails", "unclear"]),
        "data": st.sampled_from([{}, {"pairs_per_prompt": 1}]),
        "lr": st.sampled_from([5e-6, 5e-5, 1e-3]),
    },
    optional={"steps": st.sampled_from([1, 40, MANY_STEPS]), "epochs": st.sampled_from([None, 1.0, 3.0, 7.5])},
)


NAMES = {option for parameter in get_command(app).commands["run"].params for option in parameter.opts}


@settings(max_examples=40, deadline=None)
@given(FACTS, st.data())
def test_a_chain_of_steps_repeats_no_recipe_keeps_its_held_out_prompts_and_ends_in_labels(facts, data):
    runs = [tried("run-0", **facts)]
    for number in count(1):
        assert number < 60, "the advice does not end"
        more, best = next_step(runs), best_of(runs)
        words = shlex.split(more["command"])
        if words[1] == "data":
            assert REVERSED in facts["found"]
            return
        assert words[3] == best.name
        assert {word for word in words if word.startswith("--")} <= NAMES
        if "MORE_PAIRS" in more["command"]:
            assert re.search(r"\d", more["evidence"])
            return
        config = load_config(None, None, [f"{name}={value}" for name, value in changes(more).items()], best.config)
        assert held_out_by(config) == held_out_by(runs[0].config)
        assert config not in [run.config for run in runs]
        accuracy = data.draw(st.floats(-0.2, 0.2))
        runs.append(
            best._replace(name=f"run-{number}", config=config, over_first=share(accuracy, facts["half"]), num_unused=0)
        )


def test_a_recipe_counts_as_run_however_its_length_or_what_changes_no_outcome_was_set():
    first = tried("a-1", epochs=4.0, gap=0.3)
    assert step_of(first) == {"train.epochs": "2"}
    again = tried("b-2", steps=planned_steps(TrainConfig(epochs=2), 400), over_first=-0.1)
    assert "train.epochs" not in step_of(first, again)
    first = tried("a-1", epochs=2.0, unused=300, data={"pairs_per_prompt": 1})
    assert step_of(first) == {"data.pairs_per_prompt": "null"}
    more = tried("b-2", epochs=2.0, num=700, over_first=-0.1, log_every=5)
    elsewhere = more._replace(config=more.config.model_copy(update={"device": "cpu"}))
    assert "data.pairs_per_prompt" not in step_of(first, elsewhere)


def test_the_next_step_starts_from_the_best_run():
    runs = [tried("a-1"), tried("b-2", lr=1e-4, over_first=0.05), tried("c-3", lr=2e-4, over_first=0.02)]
    assert shlex.split(next_step(runs)["command"])[3] == "b-2"
    assert "shown to be better than a-1" in so_far(runs)
    assert "not shown" in so_far([runs[0], tried("b-2", over_first=0.01)])
    assert so_far(runs[:1]) is None


ONE = {"data": {"pairs_per_prompt": 1}}
BY_HEART = {"gap": 0.4, "epochs": 4.0}
FREE = {"unused": 300, "cut": 0.7, **ONE}
UNSEEN = {"unused": 990, "num": 510, "half": 0.15, **ONE}
STEPS = {
    "pairs at hand come before labels": [
        ({"unused": 300, **ONE}, {"data.pairs_per_prompt": "null"}),
        ({"unused": 9000, "data": {"pairs_per_prompt": 2}}, {"data.pairs_per_prompt": "8"}),
    ],
    "so do the ends of texts": [
        ({"cut": 0.69}, {"model.max_seq_len": "256"}),
        ({"cut": 0.69, "token_budget": 300}, {"model.max_seq_len": "256", "train.token_budget": "512"}),
    ],
    "pairs learned by heart are met with more pairs before a shorter training": [
        (BY_HEART, {"train.epochs": "2"}),
        (BY_HEART | {"unused": 1012, "num": 80, "half": 0.1, **ONE}, {"data.pairs_per_prompt": "4"}),
    ],
    "a training that did not work is mended before anything else": [
        (FREE | {"found": [WILD], "lr": 4e-5}, {"train.lr": "1e-05"}),
        (FREE | {"found": [UNDER_TRAINED], "lr": 5e-6}, {"train.lr": "5e-05"}),
        (FREE | {"found": [UNDER_TRAINED], "lr": 1e-4, "steps": 20}, {"train.steps": "60"}),
    ],
    "the cheaper of two changes with evidence comes first": [
        ({"unused": 9000, "cut": 0.2, "epochs": 1.0, **ONE}, {"model.max_seq_len": "256"}),
        ({"gap": 0.02, "epochs": 1.0, "cut": 0.2}, {"model.max_seq_len": "256"}),
    ],
    "pairs whose effect cannot be seen come before a try without a sign and after what can be seen": [
        (UNSEEN, {"data.pairs_per_prompt": "null"}),
        (UNSEEN | {"cut": 0.7}, {"model.max_seq_len": "256"}),
    ],
}


@pytest.mark.parametrize("rule", STEPS)
def test_the_order_of_steps(rule):
    for run, change in STEPS[rule]:
        assert step_of(tried(**run)) == change
    # Texts are read no longer than the model has positions.
    assert "model.max_seq_len" not in step_of(tried(cut=0.69, model=ModelConfig(name="minilm", max_seq_len=512)))


def rates_around(run):
    """The same run with both learning rates next to its own, which did harm."""
    for lr in (1e-4, 2.5e-5):
        train = run.config.train.model_copy(update={"lr": lr})
        config = run.config.model_copy(update={"train": train})
        yield run._replace(name=f"lr-{lr}", config=config, over_first=share(-0.05, 0.02))


def test_a_change_that_the_held_out_pairs_cannot_show_gives_way_to_labels_with_their_number():
    few = tried(cut=0.05, half=0.1)
    more = next_step([few, *(run._replace(over_first=share(-0.05, 0.1)) for run in rates_around(few))])
    assert changes(more) == {"data.source": "MORE_PAIRS"}
    assert re.search(r"about [\d,]+ held-out ones", more["evidence"])


def test_the_number_of_labels_follows_the_chains_own_learning_curve():
    few = tried("a-1", num=400, accuracy=0.70, half=0.02, data={"pairs_per_prompt": 1})
    many = tried("b-2", num=800, accuracy=0.72, half=0.02, over_first=0.02, data={"pairs_per_prompt": 2})
    rates = [*rates_around(many)]
    # 2 points a doubling, and 2 can be seen
    assert "about 800 more to train on" in next_step([few, many, *rates])["evidence"]
    worse = many._replace(metrics={**many.metrics, "pairwise_accuracy": share(0.69, 0.02)})
    assert "label other prompts" in next_step([few, worse, *rates])["evidence"]
    assert "a guess" in next_step([few, *rates_around(few)])["evidence"]
    # The best run may be the only one of its recipe: others that differ in their pairs alone show the curve.
    best, beyond = (
        tried(f"lr-{lr}", num=800, half=0.02, over_first=gain, data={"pairs_per_prompt": 2}, lr=lr)
        for lr, gain in ((1e-4, 0.05), (2e-4, 0.01))
    )
    assert "400 to 800 pairs brought" in next_step([few, many, best, beyond])["evidence"]


def test_labels_that_may_be_reversed_are_looked_at_as_the_run_read_them():
    names = {"split": "test", "prompt_column": "q", "chosen_column": "winner", "rejected_column": "the loser"}
    more = next_step([tried(found=[REVERSED], accuracy=0.4, data=names | {"grade_columns": ("a", "b"), "limit": 9})])
    words = shlex.split(more["command"])[3:]
    assert words[0] == "pairs.csv"
    asked = list(zip(words[1::2], words[2::2], strict=True))
    wanted = {f"--{name.replace('_', '-')}": value for name, value in names.items()} | {"--limit": "9"}
    assert sorted(asked) == sorted([*wanted.items(), ("--grade-columns", "a"), ("--grade-columns", "b")])
    parameters = get_command(app).commands["data"].commands["check"].params
    assert set(dict(asked)) <= {option for parameter in parameters for option in parameter.opts}


def test_what_can_be_seen_and_the_pairs_that_would_decide_follow_from_intervals():
    assert visible_gain([tried(half=0.04)]) > visible_gain([tried(half=0.02)])
    assert visible_gain([tried(), tried(over_first=0.1, half=0.05)]) == pytest.approx(0.05)
    assert pairs_to_decide(share(0.05, 0.1, 100)) == 400
    assert pairs_to_decide(share(-0.05, 0.1, 100)) is None
    assert pairs_to_decide(share(0.05, 0.01, 100)) is None


@pytest.mark.parametrize(("status", "rung"), [("passes", 1), ("passes", 2), ("not_ready", 3), ("unclear", 3)])
def test_a_model_that_passes_or_was_tried_on_a_policy_needs_no_step_here(status, rung):
    assert next_step([tried(status=status, rung=rung)]) is None
    words = ["--checkpoint", "out/best"]
    assert step_of_checkpoint(verdict(status, rung), [], words, DataConfig(source="pairs.csv")) is None


@pytest.mark.parametrize("is_open", [False, True])
def test_a_checkpoint_of_which_the_training_pairs_alone_are_not_named_needs_no_label(is_open):
    shown = GateCheck("pairwise_accuracy", 0.7, 0.6, not is_open, "accuracy", is_open)
    checks = [shown, GateCheck("train_test_gap", None, 15.0, False, "gap: not measured")]
    words, data = ["--checkpoint", "out/best"], DataConfig(source="pairs.csv", prompt_column="q")
    verdict_on_it = verdict_on_labels(checks, None, {"num": 60})
    more = step_of_checkpoint(verdict_on_it, [asdict(check) for check in checks], words, data)
    program, *asked = shlex.split(more["command"])
    assert (program, asked[:2]) == ("rm-opt", ["readiness", "pairs"])
    named = dict(zip(asked[2::2], asked[3::2], strict=True))
    assert named["--data"] == ("MORE_PAIRS" if is_open else "pairs.csv")
    assert (named["--prompt-column"], named["--train-data"]) == ("q", "PAIRS_IT_WAS_TRAINED_ON")
    assert (more["cost"] == "no new label") is not is_open
