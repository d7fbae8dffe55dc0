"""The loop: what it asks and learns, and what it refuses."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rmcore.active.learner import ActiveLearner, swapped
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.ensemble import RewardModelEnsemble
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
    [head], [fitted] = rounds[-1].heads, learner(labelled=labelled).heads()
    assert head == pytest.approx(fitted, abs=1e-5)


def test_only_what_has_no_label_is_asked_about():
    assert sorted(learner(labelled=POOL[:-5]).select(POOL, 5), key=POOL.index) == POOL[-5:]


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


def test_without_labels_the_models_own_heads_choose_among_items_of_any_form():
    """Least sure first for one model, most disagreement first for several; an item comes back as it was given."""
    others = [BradleyTerryRM("tiny", max_seq_len=64, seed=seed, device="cpu") for seed in (1, 2)]
    items = [{"prompt": p.prompt, "response_a": p.rejected, "response_b": p.chosen} for p in POOL[:12]]
    margins = np.stack([rm.score_pairs(POOL[:12]) @ [1.0, -1.0] for rm in others])
    for model, best in ((others[0], np.argsort(np.abs(margins[0]))), (others, np.argsort(-margins.var(axis=0)))):
        asker = ActiveLearner(model if model is others[0] else RewardModelEnsemble(model))
        assert asker.select(items, 3) == [items[index] for index in best[:3]]
        assert asker.select([SimpleNamespace(**item) for item in items], 1)[0].prompt == items[best[0]]["prompt"]
        assert asker.select(POOL[:12], 3) == [POOL[index] for index in best[:3]]


def test_the_members_of_an_ensemble_are_fitted_each_on_its_own_backbone():
    members = [BradleyTerryRM("tiny", max_seq_len=64, seed=seed, device="cpu") for seed in (1, 2)]
    items = [{"prompt": p.prompt, "response_a": p.chosen, "response_b": p.rejected} for p in PAIRS[:20]]
    asker = ActiveLearner(RewardModelEnsemble(members), k=4)
    rounds = asker.run_active_loop(
        items, lambda asked: [PreferencePair(i["prompt"], i["response_b"], i["response_a"]) for i in asked], 2
    )
    assert [one.num_labelled for one in rounds] == [0, 4, 8]
    assert {pair.chosen for pair in asker.labelled} <= {pair.rejected for pair in PAIRS[:20]}
    alone = [ActiveLearner(rm, labelled=asker.labelled).heads()[0] for rm in members]
    assert np.stack(rounds[-1].heads) == pytest.approx(np.stack(alone), abs=1e-5)
    with pytest.raises(ConfigError, match="members disagree"):
        ActiveLearner(members[0], "variance").select(items, 1)


@pytest.mark.slow
def test_bad_input_is_refused():
    with pytest.raises(DataError, match="lacks one of prompt, response_a, response_b"):
        learner().select([{"prompt": "2 + 2?", "response_a": "4"}], 1)
    with pytest.raises(ConfigError, match="no acquisition function 'best'"):
        learner("best")
    with pytest.raises(ConfigError, match="k=0"):
        ActiveLearner(reward_model(), "random", SEED_SET, k=0)
    with pytest.raises(DataError, match="same texts"):
        learner().run_active_loop([POOL[0], POOL[0]], revealed, 1)
    with pytest.raises(DataError, match="all of them are labelled"):
        learner().select(SEED_SET, 1)
    with pytest.raises(ConfigError, match="100 unlabelled"):
        learner().run_active_loop(POOL, revealed, 15)
    broken = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device="cpu")
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        ActiveLearner(broken, "entropy", SEED_SET).heads()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pairs: pairs[1:], "1 are missing"),
        (lambda pairs: [*pairs[1:], PAIRS[0]], "1 were not requested or have other texts"),
        (lambda pairs: [*pairs, pairs[0]], "1 came twice"),
        (
            lambda pairs: [PreferencePair(p.prompt, p.chosen, "another") for p in pairs],
            "7 were not requested or have other",
        ),
    ],
)
def test_labels_of_other_pairs_than_asked_are_refused(spoil, message):
    with pytest.raises(DataError, match=message):
        learner().run_active_loop(POOL, spoil, 1)
