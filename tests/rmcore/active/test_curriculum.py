"""The curriculum: what comes when, and that nothing is lost or comes twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.active.curriculum import BUCKETS, CurriculumSampler, weights_at
from rmcore.core.errors import ConfigError, DataError

bounded = st.lists(st.floats(0, 1) | st.sampled_from([0.1, 0.5, 0.9]), min_size=1, max_size=40)
anything = st.lists(st.floats(-30, 30), min_size=1, max_size=40)


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(bounded | anything, st.integers(0, 9), st.integers(0, 4), st.data())
def test_an_epoch_holds_every_pair_once_and_part_of_it_is_its_beginning(margins, seed, epoch, data):
    sampler = CurriculumSampler(margins, seed=seed)
    whole = sampler.sample(len(margins), epoch, 5)
    assert sorted(whole) == list(range(len(margins)))
    n = data.draw(st.integers(0, len(margins)))
    assert CurriculumSampler(margins, seed=seed).sample(n, epoch, 5) == whole[:n]


@settings(deadline=None, max_examples=60)
@given(bounded)
def test_bounded_margins_are_cut_at_the_thresholds(margins):
    buckets = CurriculumSampler(margins).buckets
    assert sorted(index for name in BUCKETS for index in buckets[name]) == list(range(len(margins)))
    assert all(margins[index] > 0.7 for index in buckets["easy"])
    assert all(0.2 <= margins[index] <= 0.7 for index in buckets["medium"])
    assert all(margins[index] < 0.2 for index in buckets["hard"])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(2, 30), min_size=1, max_size=40), st.floats(0.5, 5), st.floats(-3, 3))
def test_other_margins_are_cut_at_quantiles_whatever_their_unit(margins, scale, shift):
    buckets = CurriculumSampler(margins).buckets
    ranks = [np.mean([other < one for other in margins]) for one in margins]
    assert all(ranks[index] > 0.35 for index in buckets["easy"])
    assert len(set(margins)) < len(margins) or len(buckets["hard"]) <= 0.2 * len(margins) + 1
    for name in BUCKETS:
        values = {margins[index] for index in buckets[name]}
        assert not values & {margins[index] for other in BUCKETS if other != name for index in buckets[other]}
    moved = np.unique(np.asarray(margins), return_inverse=True)[1] * scale + shift - 100
    assert CurriculumSampler(moved).buckets == buckets


@pytest.mark.parametrize(
    ("progress", "expected"),
    [(0.0, (0.5, 0.4, 0.1)), (0.29, (0.5, 0.4, 0.1)), (0.3, (0.2, 0.6, 0.2)), (0.69, (0.2, 0.6, 0.2)),
     (0.7, (0.1, 0.5, 0.4)), (1.0, (0.1, 0.5, 0.4)), (None, (0.2, 0.6, 0.2))],
)  # fmt: skip
def test_the_weights_are_the_specifications(progress, expected):
    assert tuple(weights_at(progress)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, 9])
def test_the_shares_are_the_weights_while_every_bucket_lasts(epoch):
    margins = np.linspace(0, 1, 20_000)
    sampler = CurriculumSampler(margins, seed=1)
    place = {index: name for name in BUCKETS for index in sampler.buckets[name]}
    drawn = [place[index] for index in sampler.sample(3000, epoch, 10)]
    assert [drawn.count(name) / 3000 for name in BUCKETS] == pytest.approx(list(weights_at(epoch / 10)), abs=0.035)


def test_other_seeds_and_epochs_give_other_orders():
    margins = np.linspace(0, 1, 60)
    orders = {tuple(CurriculumSampler(margins, seed=seed).sample(60, epoch, 3)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_bad_input_is_refused():
    with pytest.raises(DataError, match="1 values not finite"):
        CurriculumSampler([0.5, np.nan])
    with pytest.raises(DataError, match="shape"):
        CurriculumSampler([])
    with pytest.raises(ConfigError, match="2 pairs of 1"):
        CurriculumSampler([0.5]).sample(2)
    for epoch in (3, None):
        with pytest.raises(ConfigError, match="none of 3 epochs"):
            CurriculumSampler([0.5]).sample(1, epoch=epoch, total_epochs=3)
