"""The loop: what it asks, that a cut changes nothing, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.active.acquisition import ACQUISITIONS, AcquisitionFunction, View
from rmcore.active.differences import CachedDifferences
from rmcore.active.labellers import GoldLabels, HiddenLabels, NoisyLabels, blind, swapped
from rmcore.active.learner import ActiveLearner
from rmcore.active.retraining import HeadRetrainer
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError, ModelError, StoreError
from rmcore.data.gold.world import generate_pairs, gold_reward
from rmcore.models.reward_model import BradleyTerryRM

PAIRS = generate_pairs(GoldConfig(num_prompts=60, pairs_per_prompt=2), 0).pairs
SEED_SET, POOL = PAIRS[:20], PAIRS[20:]
FEATURES = np.random.default_rng(0).normal(size=(len(PAIRS), 8))


def retrainer(**settings):
    return HeadRetrainer(CachedDifferences.of(PAIRS, FEATURES), num_members=3, **settings)


def learner(acquisition="d-optimal", **settings):
    return ActiveLearner(retrainer(), acquisition, SEED_SET, k=7, **settings)


def outcome(rounds):
    return [([pair.pair_id for pair in one.asked], [pair.chosen for pair in one.asked]) for one in rounds]


@pytest.mark.parametrize("name", sorted(ACQUISITIONS))
def test_each_round_labels_k_new_pairs_and_trains_on_all_labels(name):
    rounds = learner(name).run_active_loop(POOL, HiddenLabels(PAIRS), 3)
    assert [one.num_labelled for one in rounds] == [20, 27, 34, 41]
    ids = [pair.pair_id for one in rounds for pair in one.asked]
    assert len(set(ids)) == len(ids) == 41
    whole = retrainer().fit([pair for one in rounds for pair in one.asked], seed=0, before=None, with_members=False)
    assert rounds[-1].model.margins(POOL) == pytest.approx(whole.margins(POOL), abs=1e-5)


@pytest.mark.parametrize("name", ["bald", "random"])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_loop_that_was_cut_off_ends_in_the_same_result(name, cut, tmp_path):
    whole = learner(name).run_active_loop(POOL, HiddenLabels(PAIRS), 4, folder=tmp_path / "whole")
    answers = HiddenLabels(PAIRS)
    asked = []

    def dies(pairs):
        if len(asked) == cut:
            raise KeyboardInterrupt
        asked.append(len(pairs))
        return answers(pairs)

    with pytest.raises(KeyboardInterrupt):
        learner(name).run_active_loop(POOL, dies, 4, folder=tmp_path / "cut")
    more = []
    again = learner(name).run_active_loop(
        POOL, lambda pairs: more.append(len(pairs)) or answers(pairs), 4, folder=tmp_path / "cut"
    )
    assert outcome(again) == outcome(whole)
    assert len(more) == 4 - cut  # nobody is asked twice
    assert np.array_equal(again[-1].model.margins(POOL), whole[-1].model.margins(POOL))


def test_warm_and_fresh_heads_are_the_same_up_to_rounding():
    first = retrainer().fit(PAIRS[:20], seed=0, before=None, with_members=True)
    warm, fresh = (retrainer().fit(PAIRS[:40], seed=1, before=one, with_members=True) for one in (first, None))
    assert warm.margins(POOL) == pytest.approx(fresh.margins(POOL), abs=1e-5)
    assert warm.view(POOL).margins == pytest.approx(fresh.view(POOL).margins, abs=1e-5)


@pytest.mark.parametrize("name", sorted(ACQUISITIONS))
def test_which_side_the_pool_calls_chosen_changes_nothing(name):
    rounds = learner(name).run_active_loop(POOL, HiddenLabels(PAIRS), 2)
    hidden = learner(name).run_active_loop(blind(POOL, seed=3), HiddenLabels(PAIRS), 2)
    assert outcome(hidden) == outcome(rounds)


def test_blinding_depends_on_the_texts_and_not_on_the_label():
    turned = [swapped(pair) for pair in POOL]
    assert [pair.chosen for pair in blind(turned, seed=1)] == [pair.chosen for pair in blind(POOL, seed=1)]
    assert 0.3 < np.mean([a.chosen == b.chosen for a, b in zip(blind(POOL, seed=1), POOL, strict=True)]) < 0.7


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(12)), st.integers(0, 5))
def test_a_label_does_not_depend_on_when_or_with_which_others_it_is_asked(order, seed):
    labeller = NoisyLabels(GoldLabels(seed=seed), 0.25, seed=seed)
    alone = {pair.pair_id: labeller([pair])[0].chosen for pair in POOL[:12]}
    asked = [swapped(POOL[index]) for index in order]
    assert {pair.pair_id: pair.chosen for pair in labeller(asked)} == alone


def test_gold_labels_follow_bradley_terry_and_noise_turns_its_share():
    pairs = generate_pairs(GoldConfig(num_prompts=500, pairs_per_prompt=2), 1).pairs
    drawn = GoldLabels(seed=0)(pairs)
    agree = np.mean([gold_reward(p.prompt, p.chosen) >= gold_reward(p.prompt, p.rejected) for p in drawn])
    expected = np.mean([p.metadata["gold_win_probability"] for p in pairs])
    assert agree == pytest.approx(expected, abs=0.05)
    noisy = NoisyLabels(GoldLabels(seed=0), 0.25, seed=4)(pairs)
    turned = np.mean([a.chosen != b.chosen for a, b in zip(drawn, noisy, strict=True)])
    assert turned == pytest.approx(0.25, abs=0.05)


def test_validation_pairs_choose_the_penalty():
    true = FEATURES @ np.random.default_rng(1).normal(size=8)
    pairs = [pair if margin > 0 else swapped(pair) for pair, margin in zip(PAIRS, true, strict=True)]
    cache = CachedDifferences.of(PAIRS, FEATURES)
    chosen = HeadRetrainer(cache, validation=pairs[60:]).fit(pairs[:60], seed=0, before=None, with_members=False)
    default = HeadRetrainer(cache).fit(pairs[:60], seed=0, before=None, with_members=False)
    assert chosen.l2 < default.l2  # labels without noise want a large head
    loss = [np.logaddexp(0, -one.margins(pairs[60:])).mean() for one in (chosen, default)]
    assert loss[0] < loss[1]


def test_a_reward_model_stands_for_heads_on_its_backbone():
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device="cpu")
    passes = []
    forward = rm.score_chunk
    rm.score_chunk = lambda sides, chunk: passes.append(1) or forward(sides, chunk)
    loop = ActiveLearner(rm, "variance", SEED_SET, k=4)
    loop.run_active_loop(POOL[:20], HiddenLabels(PAIRS), 1)
    once = len(passes)
    loop.run_active_loop(POOL[:20], HiddenLabels(PAIRS), 1)
    assert len(passes) == once  # every pair has passed through the backbone already
    assert len(loop.labelled) == 28


def test_bad_input_is_refused():
    with pytest.raises(DataError, match="seed set is empty"):
        ActiveLearner(retrainer(), "random", [])
    with pytest.raises(ConfigError, match="no acquisition function 'best'"):
        learner("best")
    with pytest.raises(ConfigError, match="at least two"):
        HeadRetrainer(CachedDifferences.of(PAIRS, FEATURES), num_members=1)
    with pytest.raises(DataError, match="pool is empty"):
        learner().run_active_loop([], HiddenLabels(PAIRS), 1)
    with pytest.raises(DataError, match="all of them are labelled"):
        learner().select(SEED_SET, 1)
    with pytest.raises(ConfigError, match="100 unlabelled"):
        learner().run_active_loop(POOL, HiddenLabels(PAIRS), 15)
    with pytest.raises(ConfigError, match="101 pairs are asked for"):
        learner().select(POOL, 101)
    with pytest.raises(DataError, match="no stored features"):
        CachedDifferences.of(PAIRS[:3], FEATURES[:3])(PAIRS[:4])
    with pytest.raises(ModelError, match="not finite"):
        CachedDifferences.of(PAIRS[:3], np.full((3, 2), np.nan))
    with pytest.raises(DataError, match="have no hidden label"):
        learner().run_active_loop(POOL, HiddenLabels(PAIRS[:30]), 1)


class Broken(AcquisitionFunction):
    def score_view(self, view: View):
        return np.full(view.margins.shape[1], np.nan)


def test_scores_that_are_not_numbers_choose_nothing():
    with pytest.raises(ModelError, match="not a number"):
        learner(Broken()).select(POOL, 3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pairs: pairs[1:], "1 are missing"),
        (lambda pairs: [*pairs[1:], PAIRS[0]], "1 were not asked for"),
        (lambda pairs: [*pairs, pairs[0]], "1 came twice"),
        (lambda pairs: [type(p)(p.prompt, p.chosen, "another", pair_id=p.pair_id) for p in pairs], "other texts"),
    ],
)
def test_labels_of_other_pairs_than_asked_are_refused(spoil, message):
    with pytest.raises(DataError, match=message):
        learner().run_active_loop(POOL, spoil, 1)


def test_a_folder_of_another_loop_or_a_damaged_round_is_refused(tmp_path):
    learner().run_active_loop(POOL, HiddenLabels(PAIRS), 2, folder=tmp_path)
    with pytest.raises(ConfigError, match="acquisition differ"):
        learner("random").run_active_loop(POOL, HiddenLabels(PAIRS), 2, folder=tmp_path)
    assert len(learner().run_active_loop(POOL, HiddenLabels(PAIRS), 3, folder=tmp_path)) == 4  # more rounds may follow
    (tmp_path / "round_0002.npz").write_bytes(b"half")
    with pytest.raises(StoreError, match=r"round_0002.npz is damaged"):
        learner().run_active_loop(POOL, HiddenLabels(PAIRS), 2, folder=tmp_path)
