"""Credit normalised within groups: mean 0 and mean square 1, for any floats, or exactly zero."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import credit_sample as world
from rmcore.policy.grpo.credit import GroupNormalizedCredit

B, rollouts = world.B, world.rollouts
MODERATE = st.floats(-1e6, 1e6)
ANY = st.floats(allow_nan=False, allow_infinity=False)
METAS = st.lists(st.fixed_dictionaries({"b": MODERATE, "prompt_id": st.sampled_from("xyz")}), max_size=8)


def normalised(numbers):
    return GroupNormalizedCredit(B, "prompt_id").assign(rollouts([{"b": one, "prompt_id": "g"} for one in numbers]))


@given(st.lists(ANY, min_size=1, max_size=8))
def test_any_group_has_mean_0_and_mean_square_1_or_is_all_zero(numbers):
    """Of all floats, huge ones and denormals too."""
    credits = np.array(normalised(numbers))
    if len(set(numbers)) == 1:
        assert credits.tolist() == [0.0] * len(numbers)
    else:
        assert credits.mean() == pytest.approx(0, abs=1e-9)
        assert np.square(credits).mean() == pytest.approx(1, abs=1e-9)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8))
def test_normalised_credits_are_those_of_the_formula(numbers):
    std = np.std(numbers)
    expected = (np.array(numbers) - np.mean(numbers)) / std if std else np.zeros(len(numbers))
    assert normalised(numbers) == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize(
    "numbers",
    [
        [1e300, -1e300],
        [1.7e308, -1.7e308],
        [5e-324, 0.0],
        [5e-324, -5e-324],
        [0.1 + 0.2, 0.3],  # apart by rounding
        [1e16 + 2, 1e16],
        [1e300, math.nextafter(1e300, 0)],
        [1e300, 5e-324],
    ],
)
def test_two_values_that_differ_are_one_deviation_apart_from_their_mean(numbers):
    assert normalised(numbers) == [1.0, -1.0]
    assert normalised(numbers[::-1]) == [-1.0, 1.0]


@pytest.mark.parametrize("number", [0.0, 0.1, -1 / 3, 1e300, 1.7e308, 5e-324])
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_equal_values_get_exactly_zero(number, size):
    """0.1 three times has a mean that rounds to another number; a division by what is left would give +-1."""
    credits = normalised([number] * size)
    assert credits == [0.0] * size
    assert all(math.copysign(1, credit) == 1 for credit in credits)


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=8), st.integers(-(10**6), 10**6), st.integers(-40, 40))
def test_neither_level_nor_scale_changes_a_normalised_credit(numbers, shift, exponent):
    credits = normalised(numbers)
    assert normalised([number + shift for number in numbers]) == credits
    assert normalised([math.ldexp(number, exponent) for number in numbers]) == credits
    assert normalised([-number for number in numbers]) == [-credit for credit in credits]


@given(st.lists(MODERATE, min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_a_scale_that_rounds_changes_no_more_than_rounding(numbers, scale):
    spread = float(np.std(numbers))
    if spread > 1e-3 * max(map(abs, numbers)):
        assert normalised([scale * number for number in numbers]) == pytest.approx(normalised(numbers), abs=1e-9)


@given(st.lists(ANY, min_size=2, max_size=8))
def test_normalising_keeps_the_order_of_a_group(numbers):
    credits = normalised(numbers)
    by_number = [credit for _, credit in sorted(zip(numbers, credits, strict=True))]
    assert by_number == sorted(credits)


@given(METAS)
def test_groups_do_not_see_each_other(metas):
    together = GroupNormalizedCredit(B, "prompt_id").assign(rollouts(metas))
    for group in "xyz":
        places = [index for index, meta in enumerate(metas) if meta["prompt_id"] == group]
        alone = normalised([metas[index]["b"] for index in places])
        assert [together[index] for index in places] == alone


@given(METAS)
def test_normalising_twice_is_normalising_once(metas):
    once = GroupNormalizedCredit(B, "prompt_id")
    twice = GroupNormalizedCredit(once, "prompt_id")
    assert twice.assign(rollouts(metas)) == pytest.approx(once.assign(rollouts(metas)), abs=1e-9)


def test_groups_may_be_named_by_integers_of_any_kind():
    named = rollouts([{"b": 1.0, "g": 7}, {"b": 3.0, "g": np.int64(7)}, {"b": 9.0, "g": "7"}])
    assert GroupNormalizedCredit(B, "g").assign(named) == [-1.0, 1.0, 0.0]
