"""The loop: what it asks and learns, and what it refuses."""

from functools import cache

import numpy as np
import pytest
import torch

from rmcore.active.acquisition import AcquisitionFunction, View
from rmcore.active.learner import ActiveLearner, swapped
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.gold.world import generate_pairs
from rmcore.models.reward_model import BradleyTerryRM

PAIRS = generate_pairs(GoldConfig(num_prompts=60, pairs_per_prompt=2), 0).pairs
SEED_SET, POOL = PAIRS[:20], PAIRS[20:]


@cache
def reward_model():
    return BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device="cpu")


def revealed(pairs):
    known = {pair.pair_id: pair for pair in PAIRS}
    return [known[pair.pair_id] for pair in pairs]


def learner(acquisition="entropy", labelled=SEED_SET, **settings):
    return ActiveLearner(reward_model(), acquisition, labelled, k=7, **settings)


def outcome(rounds):
    return [([pair.pair_id for pair in one.asked], [pair.chosen for pair in one.asked]) for one in rounds]


@pytest.mark.slow
def test_each_round_labels_k_new_pairs_and_trains_on_all_labels():
    rounds = learner().run_active_loop(POOL, revealed, 3)
    assert [one.num_labelled for one in rounds] == [20, 27, 34, 41]
    labelled = [pair for one in rounds for pair in one.asked]
    assert len({pair.pair_id for pair in labelled}) == len(labelled) == 41
    assert rounds[-1].head == pytest.approx(learner(labelled=labelled).head(), abs=1e-5)


@pytest.mark.slow
def test_which_side_the_pool_calls_chosen_changes_nothing():
    rounds = learner("variance").run_active_loop(POOL, revealed, 2)
    turned = [swapped(pair) if number % 3 else pair for number, pair in enumerate(POOL)]
    assert outcome(learner("variance").run_active_loop(turned, revealed, 2)) == outcome(rounds)


def test_a_pair_passes_through_the_backbone_once():
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device="cpu")
    passes = []
    forward = rm.score_chunk
    rm.score_chunk = lambda *given, **more: passes.append(1) or forward(*given, **more)
    loop = ActiveLearner(rm, "variance", SEED_SET, k=4)
    loop.run_active_loop(POOL[:20], revealed, 1)
    once = len(passes)
    loop.run_active_loop(POOL[:20], revealed, 1)
    assert len(passes) == once
    assert len(loop.labelled) == 28


@pytest.mark.slow
def test_bad_input_is_refused():
    with pytest.raises(DataError, match="seed set is empty"):
        learner(labelled=[])
    with pytest.raises(ConfigError, match="no acquisition function 'best'"):
        learner("best")
    with pytest.raises(ConfigError, match="k=0"):
        ActiveLearner(reward_model(), "random", SEED_SET, k=0)
    with pytest.raises(DataError, match="share an id"):
        learner().run_active_loop([POOL[0], POOL[0]], revealed, 1)
    with pytest.raises(DataError, match="all of them are labelled"):
        learner().select(SEED_SET, 1)
    with pytest.raises(ConfigError, match="100 unlabelled"):
        learner().run_active_loop(POOL, revealed, 15)
    with pytest.raises(ConfigError, match="101 pairs are requested"):
        learner().select(POOL, 101)
    broken = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device="cpu")
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        ActiveLearner(broken, "entropy", SEED_SET).head()


class Broken(AcquisitionFunction):
    def score_view(self, view: View):
        return np.full(view.margins.shape[1], np.nan)


@pytest.mark.slow
def test_scores_that_are_not_numbers_choose_nothing():
    with pytest.raises(ModelError, match="not a number"):
        learner(Broken()).select(POOL, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pairs: pairs[1:], "1 are missing"),
        (lambda pairs: [*pairs[1:], PAIRS[0]], "1 were not requested"),
        (lambda pairs: [*pairs, pairs[0]], "1 came twice"),
        (lambda pairs: [type(p)(p.prompt, p.chosen, "another", pair_id=p.pair_id) for p in pairs], "other texts"),
    ],
)
def test_labels_of_other_pairs_than_asked_are_refused(spoil, message):
    with pytest.raises(DataError, match=message):
        learner().run_active_loop(POOL, spoil, 1)
