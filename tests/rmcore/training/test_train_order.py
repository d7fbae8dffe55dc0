"""A curriculum changes the order in which a training sees its pairs, and nothing else."""

import numpy as np
import pytest

from experiments.presets import PRESETS
from rmcore.config.data import GoldConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.store import ArtifactRef
from rmcore.core.tracking import METRICS_FILE, JsonlTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.registry import stage_call
from rmcore.stages.settings import TrainSettings
from rmcore.stages.train import train_into
from rmcore.stages.train_order import curriculum_order
from rmcore.training.length import planned_steps
from rmcore.training.loop import Trainer
from rmcore.training.ranks import ALONE

SMOKE = PRESETS["smoke"]
PAIRS = [
    type(pair)(pair.prompt, pair.chosen, pair.rejected, target_margin=float(index % 17))
    for index, pair in enumerate(generate_pairs(GoldConfig(num_prompts=24, pairs_per_prompt=2), 0).pairs)
]


def config(**changes):
    train = {"steps": 4, "pairs_per_step": 6, "eval_every": 4, "best_metric": "last", "early_stopping_patience": None}
    settings = SMOKE.train.model_dump() | train | {"callbacks": ()} | changes
    return PipelineConfig.model_validate(SMOKE.model_dump() | {"train": settings})


@pytest.fixture(scope="module")
def rm():
    return BradleyTerryRM.new(SMOKE.model, seed=0, device="cpu")


def order(rm, settings, pairs=PAIRS):
    return curriculum_order(rm, settings.train, rm.renderer.tokenize_pairs(pairs), pairs, ALONE, seed=settings.seed)


def train(settings, pairs, place):
    place.mkdir()
    tracker = JsonlTracker(place / METRICS_FILE)
    train_into(TrainSettings.of(settings), pairs, [], place, tracker, lambda done, total, text: None)
    tracker.close()
    return BradleyTerryRM.from_pretrained(place / "best", device="cpu").model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("margins", ["annotated", "predicted"])
@pytest.mark.parametrize("curriculum", ["easy_first", "hard_first"])
def test_steps_hold_every_pair_once_an_epoch(rm, curriculum, margins):
    settings = config(curriculum=curriculum, curriculum_margins=margins, steps=16)
    steps = order(rm, settings)
    assert len(steps) == planned_steps(settings.train, len(PAIRS)) == 16
    assert sorted(index for step in steps[:8] for index in step) == list(range(len(PAIRS)))
    assert steps == order(rm, settings)


def test_margins_decide_what_comes_early(rm):
    easy, hard = (
        np.mean(
            [PAIRS[index].target_margin for step in order(rm, config(curriculum=name, steps=8))[:2] for index in step]
        )
        for name in ("easy_first", "hard_first")
    )
    assert easy > hard


@pytest.mark.slow
def test_a_curriculum_trains_on_its_own_order_and_none_on_the_usual_one(tmp_path, monkeypatch):
    seen = []
    original = Trainer.__init__
    monkeypatch.setattr(
        Trainer, "__init__", lambda self, *a, **k: (original(self, *a, **k), seen.append(self.feed.order))[0]
    )
    plain = train(config(), PAIRS, tmp_path / "plain")
    easy = train(config(curriculum="easy_first"), PAIRS, tmp_path / "easy")
    rm = BradleyTerryRM.new(SMOKE.model, seed=0, device="cpu")
    assert [list(step) for step in seen[1]] == order(rm, config(curriculum="easy_first"))
    assert seen[0] != seen[1]
    assert any(not np.array_equal(plain[name].numpy(), easy[name].numpy()) for name in plain)


def test_a_state_of_another_order_is_refused(tmp_path):
    settings = config(curriculum="easy_first", resume_every_seconds=0)

    def stop(done, total, text):
        if done == 2:
            raise KeyboardInterrupt

    tracker = JsonlTracker(tmp_path / METRICS_FILE)
    with pytest.raises(KeyboardInterrupt):
        train_into(TrainSettings.of(settings), PAIRS, [], tmp_path, tracker, stop)
    tracker.close()
    rm = BradleyTerryRM.new(SMOKE.model, seed=0, device="cpu")
    tokens = rm.renderer.tokenize_pairs(PAIRS)
    with pytest.raises(ConfigError, match="other settings"):
        train_into(TrainSettings.of(config(curriculum="hard_first")), PAIRS, [], tmp_path, tracker, stop)
    assert tokens


def test_pairs_without_margins_need_predicted_ones(rm):
    bare = [type(pair)(pair.prompt, pair.chosen, pair.rejected) for pair in PAIRS]
    with pytest.raises(DataError, match="curriculum_margins=predicted"):
        order(rm, config(curriculum="easy_first"), bare)
    assert len(order(rm, config(curriculum="easy_first", curriculum_margins="predicted"), bare)) == 4


def test_the_code_of_the_curriculum_enters_the_keys_of_trainings_that_use_it():
    upstream = {"prepare": ArtifactRef("prepare", "0" * 64, "/nowhere", "0" * 64)}
    plain = stage_call("train", config(), upstream).inputs
    easy = stage_call("train", config(curriculum="easy_first"), upstream).inputs
    assert "rmcore.active.curriculum" not in plain["code"]
    assert plain["config"]["train"]["curriculum"] == "none"
    assert easy["config"]["train"]["curriculum"].startswith("easy_first ")
    assert not {"rmcore.stages.train_order", "rmcore.active.curriculum"} & easy["code"].keys()
