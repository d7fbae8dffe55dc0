"""The check by full fine-tuning: a new model in each round, on pairs that random choice and its rival share."""

import numpy as np
import pytest

from experiments.presets import PRESETS
from rmcore.active.analysis import analyse_check
from rmcore.active.fine_tuning import FullRetrainer, check_record
from rmcore.active.labellers import HiddenLabels
from rmcore.config.active import ActiveConfig, CheckConfig
from rmcore.config.data import GoldConfig
from rmcore.core.errors import ConfigError
from rmcore.data.gold.world import generate_pairs

PAIRS = generate_pairs(GoldConfig(num_prompts=60, pairs_per_prompt=2), 0).pairs
STUDY = ActiveConfig(
    seed_pairs=8, validation_pairs=6, check=CheckConfig(labels=(8, 16, 24), pool_pairs=40, test_pairs=20, num_seeds=2)
)
CONFIG = PRESETS["smoke"].model_copy(
    update={"train": PRESETS["smoke"].train.model_copy(update={"steps": 2, "pairs_per_step": 4})}
)


def retrainer(seed):
    return FullRetrainer(CONFIG.model, CONFIG.train, device=CONFIG.device, seed=seed)


def record(acquisition, seed=0):
    return check_record(PAIRS, HiddenLabels(PAIRS), retrainer(seed), STUDY, acquisition=acquisition)


@pytest.mark.slow
def test_each_choice_starts_alike_and_trains_at_every_label_count():
    random, optimal = record("random"), record("d-optimal")
    assert random["num_labels"] == optimal["num_labels"] == [8, 16, 24]
    assert random["accuracy"][0] == optimal["accuracy"][0]
    assert random["num_test_pairs"] == 20
    assert record("random") == random
    found = analyse_check({"random": [random, record("random", 1)], "d-optimal": [optimal, record("d-optimal", 1)]})
    assert found["difference"]["d-optimal"][0]["value"] == 0
    assert found["accuracy"]["random"][2]["value"] == pytest.approx(
        np.mean([random["accuracy"][2], record("random", 1)["accuracy"][2]])
    )


@pytest.mark.slow
def test_a_model_of_the_check_is_trained_to_its_end_whatever_ends_the_training_beside_it():
    train = CONFIG.train.model_copy(update={"stop_step": 1, "save_every": 1, "keep_top_k": 2})
    cut = FullRetrainer(CONFIG.model, train, device=CONFIG.device, seed=0)
    fitted = [one.fit(PAIRS[:8], seed=0, before=None, with_members=False) for one in (cut, retrainer(0))]
    np.testing.assert_array_equal(*(one.margins(PAIRS[:4]) for one in fitted))


def test_what_needs_members_or_has_no_room_is_refused():
    with pytest.raises(ConfigError, match="gives one member"):
        retrainer(0).fit(PAIRS[:4], seed=0, before=None, with_members=True)
    with pytest.raises(ValueError, match="does not rise"):
        CheckConfig(labels=(10, 5))
    with pytest.raises(ValueError, match="name random first"):
        CheckConfig(acquisitions=("entropy", "random"))
    with pytest.raises(ValueError, match="are chosen of pool_pairs"):
        CheckConfig(labels=(10, 5000))
    large = STUDY.model_copy(update={"check": CheckConfig(labels=(8, 500), pool_pairs=900)})
    with pytest.raises(ConfigError, match=r"active\.check\.labels ends with 500"):
        check_record(PAIRS, HiddenLabels(PAIRS), retrainer(0), large, acquisition="random")
