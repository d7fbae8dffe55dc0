"""Rungs of a training: each begins where the last one ended, and the last is, to the bit, a training in one piece."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.files import file_digest, read_json_lines
from rmcore.core.progress import silent
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.evaluation.rewards import CHOSEN_PROBABILITY, COLUMNS, RewardTable
from rmcore.stages.interface import VALIDATION_REWARDS
from rmcore.stages.settings import TrainSettings
from rmcore.stages.train import train_into
from rmcore.study.objectives import Scores
from rmcore.study.rungs import (
    REDUCTION,
    WORSE_LEVEL,
    Rungs,
    expected_share,
    hand_over,
    is_promoted,
    prompt_differences,
    worse_p,
)
from rmcore.training.resume import RESUME_FOLDER, rewind

CONFIG = PipelineConfig(
    model=ModelConfig(name="tiny", max_seq_len=64),
    train=TrainConfig(steps=9, pairs_per_step=4, lr=1e-3, warmup_steps=0, token_budget=512, log_every=2, callbacks=()),
)


@given(st.integers(1, 10_000))
def test_rungs_rise_to_all_steps_and_each_ends_with_an_evaluation(num_steps):
    rungs = Rungs.of(num_steps)
    assert rungs.ends[-1] == num_steps
    assert list(rungs.ends) == sorted(set(rungs.ends))
    assert all(end % rungs.ends[0] == 0 for end in rungs.ends[:-1])
    if num_steps >= REDUCTION**2:
        assert rungs.ends[0] == pytest.approx(num_steps / 9, abs=0.5)
    every = [rungs.config(CONFIG, place).train for place in range(len(rungs.ends))]
    assert [one.stop_step for one in every] == [*rungs.ends[:-1], None]
    assert {one.eval_every for one in every} == {rungs.ends[0]}


def test_a_trial_costs_a_quarter_of_a_training_on_average():
    assert expected_share() == pytest.approx(1 / 9 + 2 / 9 / 3 + 6 / 9 / 9)


def train(config, pairs, out):
    out.mkdir(parents=True, exist_ok=True)
    rewind(out)
    tracker = JsonlTracker(out / METRICS_FILE)
    train_into(TrainSettings.of(config), pairs[:40], pairs[40:60], out, tracker, silent)
    tracker.close()
    return out


def outcome(folder):
    weights = {path.relative_to(folder): file_digest(path) for path in sorted(folder.rglob("*.safetensors"))}
    rows = [
        (row["step"], {name: value for name, value in row["metrics"].items() if not name.startswith("cost/")})
        for row in read_json_lines(folder / METRICS_FILE)
    ]
    record = json.loads((folder / "training.json").read_text())
    told = {name: record[name] for name in ("num_steps", "planned_steps", "best_step", "best_value", "stop_reason")}
    return weights, rows, told, pd.read_parquet(folder / VALIDATION_REWARDS).to_dict("list")


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "muon", "keep_top_k": 2, "save_every": 4}, {"early_stopping_patience": 1, "lr": 1e-9}],
    ids=["kept checkpoints", "stops early"],
)
@pytest.mark.slow
def test_the_last_rung_ends_in_the_bits_of_a_training_in_one_piece(tmp_path, gold_pairs, changes):
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update=changes)})
    rungs = Rungs.of(9)
    assert rungs.ends == (1, 3, 9)
    whole = train(rungs.config(config, 2), gold_pairs, tmp_path / "whole")
    earlier = None
    for place in range(3):
        folder = tmp_path / f"rung_{place}"
        if earlier is not None:
            assert hand_over(earlier, folder)
        earlier = train(rungs.config(config, place), gold_pairs, folder)
        assert (folder / RESUME_FOLDER).exists() == (place < 2)
        last = max(row["step"] for row in read_json_lines(folder / METRICS_FILE))
        assert last <= rungs.ends[place]
    assert outcome(earlier) == outcome(whole)
    assert json.loads((earlier / "training.json").read_text())["resumed_from"]  # nothing was computed twice
    # What was handed over is untouched: it is an artifact of the store.
    assert (tmp_path / "rung_1" / RESUME_FOLDER / "step_3").is_dir() or changes.get("early_stopping_patience")


def test_a_training_that_went_on_already_is_handed_nothing_and_a_half_copied_one_is_begun_again(tmp_path):
    earlier, unfinished = tmp_path / "earlier", tmp_path / "unfinished"
    (earlier / RESUME_FOLDER / "step_1").mkdir(parents=True)
    (earlier / "best").mkdir()
    (earlier / "best" / "weights").write_text("one")
    (earlier / METRICS_FILE).write_text("{}\n")
    (unfinished / f".{RESUME_FOLDER}.tmp").mkdir(parents=True)  # killed while it was copied
    (unfinished / "best").mkdir()
    (unfinished / "best" / "weights").write_text("half of o")
    assert hand_over(earlier, unfinished)
    assert (unfinished / "best" / "weights").read_text() == "one"
    assert (unfinished / RESUME_FOLDER / "step_1").is_dir()
    assert not (unfinished / f".{RESUME_FOLDER}.tmp").exists()
    (unfinished / RESUME_FOLDER / "step_2").mkdir()
    assert not hand_over(earlier, unfinished)
    assert (unfinished / RESUME_FOLDER / "step_2").is_dir()


def test_the_rewards_that_a_training_leaves_are_those_of_its_best_step(tmp_path, gold_pairs):
    folder = train(Rungs.of(9).config(CONFIG, 2), gold_pairs, tmp_path / "whole")
    rewards = pd.read_parquet(folder / VALIDATION_REWARDS)
    assert set(rewards.columns) == {*COLUMNS, CHOSEN_PROBABILITY}
    assert list(rewards["pair_id"]) == [pair.pair_id for pair in gold_pairs[40:60]]
    margin = RewardTable.from_frame(rewards).margin
    best = json.loads((folder / "training.json").read_text())["best_value"]
    assert (margin[margin != 0] > 0).mean() == pytest.approx(best)


@given(st.lists(st.floats(0, 1), max_size=30), st.floats(0, 1))
def test_about_a_third_goes_on_and_a_better_one_always_before_a_worse_one(others, value):
    assert is_promoted(1.1, others, higher=True)
    assert is_promoted(-0.1, others, higher=False)
    promoted = [
        is_promoted(one, [*others[:place], *others[place + 1 :]], higher=True) for place, one in enumerate(others)
    ]
    kept = [one for one, goes in zip(others, promoted, strict=True) if goes]
    assert min(kept, default=0) >= max((one for one in others if one not in kept), default=0)
    if len(set(others)) == len(others) > 2:
        assert len(kept) == len(others) // REDUCTION


def scores(sums, counts=None, prompts=None):
    sums = np.asarray(sums, dtype=float)
    counts = np.ones_like(sums) if counts is None else np.asarray(counts, dtype=float)
    return Scores(tuple(f"{n:05d}" for n in range(len(sums))) if prompts is None else prompts, sums, counts)


def test_differences_are_over_the_prompts_that_say_something_about_both():
    one = scores([1, 2, 0, 3], [2, 2, 0, 3], ("a", "b", "c", "d"))
    other = scores([1, 0, 1], [1, 0, 1], ("a", "b", "d"))
    np.testing.assert_allclose(prompt_differences(one, other), [0.5 - 1, 1 - 1])
    assert worse_p(scores([1]), scores([0], prompts=("z",)), higher=True) == 1.0


def drawn(rng, skill, difficulty, pairs=3):
    """Right answers of a model by prompt: prompts differ in difficulty, as in data."""
    return scores(rng.binomial(pairs, 1 / (1 + np.exp(-(skill - difficulty)))), np.full(len(difficulty), pairs))


def test_a_clearly_worse_trial_is_found_and_an_equal_one_about_as_rarely_as_the_level_says():
    rng = np.random.default_rng(0)
    found, false = 0, 0
    repeats = 600
    for _ in range(repeats):
        difficulty = rng.normal(0, 1, 120)
        best, equal, worse = (drawn(rng, skill, difficulty) for skill in (0.8, 0.8, 0.3))
        found += worse_p(worse, best, higher=True) < WORSE_LEVEL
        false += worse_p(equal, best, higher=True) < WORSE_LEVEL
    assert found / repeats > 0.75
    error = 3 * math.sqrt(WORSE_LEVEL * (1 - WORSE_LEVEL) / repeats)
    assert WORSE_LEVEL / 2 < false / repeats < WORSE_LEVEL + error


def test_of_a_loss_the_larger_one_is_worse():
    rng = np.random.default_rng(1)
    low = rng.gamma(4, 0.1, 60)
    high = low + rng.gamma(4, 0.05, 60)
    assert worse_p(scores(high), scores(low), higher=False) < 1e-6
    assert worse_p(scores(low), scores(high), higher=False) == 1.0
