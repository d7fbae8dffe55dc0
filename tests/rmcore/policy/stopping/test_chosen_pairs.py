"""Chosen pairs: whatever is expected, the value of a group is right on average."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rmcore.policy.stopping.chosen_pairs import FEWEST_TO_FIT, PairChooser

LIMIT = 3.0
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 6))


def learned(slope, size, noise=0.1):
    """A chooser that has seen the judge follow the reward."""
    chooser, rng = PairChooser(LIMIT, size), np.random.default_rng(0)
    for proxy in rng.normal(size=4 * FEWEST_TO_FIT):
        chooser.learn(float(proxy), float(slope * proxy + noise * rng.normal()))
    return chooser


class Places:
    """A generator that draws the same place of every group."""

    def __init__(self, place):
        self.place = place

    def integers(self, high, size):
        return np.full(size, self.place)


@pytest.mark.slow
@given(
    SIZES.flatmap(
        lambda size: st.tuples(
            arrays(float, size, elements=st.floats(-5, 5)), arrays(float, size, elements=st.floats(-LIMIT, LIMIT))
        )
    ),
    st.floats(-2, 2),
)
def test_a_groups_value_is_its_mean_over_the_choices(drawn, slope):
    proxy, judged = drawn
    size = proxy.shape[1]
    chooser = learned(slope, size)
    values = np.zeros(proxy.shape)
    for place in range(size):
        chosen = chooser.choose(proxy, Places(place))
        values[:, place] = [chosen.value(group, float(one)) for group, one in enumerate(judged[:, place])]
    assert np.abs(values).max() <= chooser.bound + 1e-9
    np.testing.assert_allclose(values.mean(axis=1), judged.mean(axis=1), atol=1e-9)


def test_every_prompt_of_a_group_is_drawn_as_often():
    places = PairChooser(LIMIT, 4).choose(np.zeros((20_000, 4)), np.random.default_rng(0)).places
    np.testing.assert_allclose(np.bincount(places, minlength=4) / 20_000, 0.25, atol=0.015)


@pytest.mark.parametrize("follows", [0.0, 0.5, 0.9])
def test_a_reward_that_follows_the_judge_saves_labels_and_one_that_does_not_costs_little(follows):
    """The variance of a group's value beside that of a pair of one prompt falls as that of a regression does."""
    rng = np.random.default_rng(1)
    proxy = rng.normal(size=(4000, 8))
    judged = np.clip(follows * proxy + (1 - follows**2) ** 0.5 * rng.normal(size=proxy.shape), -LIMIT, LIMIT)
    chooser = PairChooser(LIMIT, 8)
    for number, (one, other) in enumerate(zip(proxy[:200, 0], judged[:200, 0], strict=True)):
        is_fitted = (chooser.choose(np.ones((3, 8)), np.random.default_rng(0)).expected != 0).any()
        assert is_fitted == (number >= FEWEST_TO_FIT)  # before, the reward says nothing
        chooser.learn(float(one), float(other))
    chosen = chooser.choose(proxy, rng)
    values = [chosen.value(group, judged[group, int(place)]) for group, place in enumerate(chosen.places)]
    share = np.var(values) / judged[:, 0].var()
    assert share == pytest.approx(1 - follows**2 * (1 - 1 / 8), abs=0.06)
    assert np.mean(values) == pytest.approx(judged.mean(), abs=0.05)


def test_the_bound_is_reached_and_known_before_anything_is_drawn():
    chooser = learned(9.0, 4)
    chosen = chooser.choose(np.array([[-9.0, 9.0, 9.0, 9.0]]), Places(0))
    assert chosen.value(0, LIMIT) == pytest.approx(chooser.bound)
