"""AUROC and accuracies against counting by hand, and their intervals against what they promise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.detection import accuracies, accuracy_by_score, auroc


def ids(count, size=2):
    return [str(number // size) for number in range(count)]


def counted(inside, outside):
    """Every pair of responses compared, ties half."""
    wins = [1.0 if b > a else 0.5 if b == a else 0.0 for a in inside for b in outside]
    return sum(wins) / len(wins)


values = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(inside=values, outside=values)
def test_it_is_the_share_of_won_comparisons(inside, outside):
    found = auroc(inside, outside, ids(len(inside)), ids(len(outside)), num_resamples=2)
    assert found.value == pytest.approx(counted(inside, outside))
    turned = auroc(outside, inside, ids(len(outside)), ids(len(inside)), num_resamples=2)
    assert turned.value == pytest.approx(1 - found.value)
    assert found.num == len(inside) + len(outside)


def test_the_interval_covers_the_truth():
    """Of two normal groups one standard deviation apart it is Phi(1 / sqrt 2) = 0.760; prompts share an offset."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        groups = [
            (mean + np.sqrt(0.5) * (np.repeat(rng.standard_normal(40), 4) + rng.standard_normal(160)))
            for mean in (0.0, 1.0)
        ]
        found = auroc(*groups, ids(160, 4), ids(160, 4), num_resamples=200)
        covered += found.ci_low <= 0.7602 <= found.ci_high
    assert covered >= 52


def test_a_perfect_detector_has_no_interval_of_width_zero():
    found = auroc([0, 1], [2, 3], ["a", "b"], ["c", "d"])
    assert found.value == found.ci_high == 1
    assert found.ci_low < 0.5  # two prompts a group prove little


def test_accuracy_counts_ties_half_and_intervals_are_over_prompts():
    margins = np.array([[1, -1, 0, 2, 3, 1], [0, 0, 0, 0, 0, 0]])
    right, tied = accuracies(margins, ids(6))
    assert right.value == pytest.approx(4.5 / 6)
    assert right.num == tied.num == 6
    assert tied.value == 0.5
    rng = np.random.default_rng(0)
    wide, narrow = (accuracies(np.repeat(rng.choice([-1.0, 1.0], 50), 8)[None], ids(400, size))[0] for size in (8, 1))
    assert wide.ci_high - wide.ci_low > 2 * (narrow.ci_high - narrow.ci_low)


def test_bins_hold_every_pair_once_from_low_to_high():
    rng = np.random.default_rng(0)
    scores, margins = rng.random(103), rng.standard_normal(103)
    bins = accuracy_by_score(margins, scores, ids(103), num_bins=10, num_resamples=20)
    middles = [middle for middle, _ in bins]
    assert middles == sorted(middles)
    assert sum(value.num for _, value in bins) == 103
    assert sum(value.value * value.num for _, value in bins) == pytest.approx((margins > 0).sum())
    assert len(accuracy_by_score(margins[:3], scores[:3], ids(3), num_resamples=20)) == 3


def test_nothing_to_compare_is_refused():
    with pytest.raises(DataError, match="outside of shape"):
        auroc([1.0], [], ["a"], [])
    with pytest.raises(DataError, match="1 values not finite"):
        auroc([np.nan, 1.0], [1.0], ["a", "b"], ["a"])
    with pytest.raises(DataError, match="2 prompt ids"):
        auroc([1.0], [1.0], ["a", "b"], ["a"])
    with pytest.raises(ConfigError, match="num_bins=0"):
        accuracy_by_score([1.0], [1.0], ["a"], num_bins=0)
