"""The rewards of the validation pairs that a training leaves, which model cards read."""

import json

import pandas as pd
import pytest

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.evaluation.rewards import CHOSEN_PROBABILITY, COLUMNS, RewardTable
from rmcore.stages.interface import VALIDATION_REWARDS
from rmcore.stages.reads import settled
from rmcore.stages.train import train_into

CONFIG = PipelineConfig(
    model=ModelConfig(name="tiny", max_seq_len=64),
    train=TrainConfig(steps=9, pairs_per_step=4, lr=1e-3, warmup_steps=0, token_budget=512, eval_every=1, callbacks=()),
)


@pytest.mark.slow
def test_the_rewards_that_a_training_leaves_are_those_of_its_best_step(tmp_path, gold_pairs):
    train_into(settled(CONFIG), gold_pairs[:40], gold_pairs[40:60], tmp_path, NullTracker(), silent)
    rewards = pd.read_parquet(tmp_path / VALIDATION_REWARDS)
    assert set(rewards.columns) == {*COLUMNS, CHOSEN_PROBABILITY}
    assert list(rewards["pair_id"]) == [pair.pair_id for pair in gold_pairs[40:60]]
    margin = RewardTable.from_frame(rewards).margin
    best = json.loads((tmp_path / "training.json").read_text())["best_value"]
    assert (margin[margin != 0] > 0).mean() == pytest.approx(best)
