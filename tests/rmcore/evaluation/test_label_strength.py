"""Ratings of a prompt's answers from pairs: what they recover, and what they may not make up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logged_sample import connected_pairs
from rmcore.evaluation.label_strength import rate_answers


def rate(pairs, differences=None, size=None):
    """Ratings from (better, worse) pairs, each with a difference of one unless told."""
    better, worse = np.array(pairs, dtype=np.int64).T
    given = np.ones(len(pairs)) if differences is None else np.array(differences, dtype=float)
    return rate_answers(better, worse, given, size or int(max(better.max(), worse.max())) + 1)


@given(seed=st.integers(0, 10_000), size=st.integers(2, 12), extra=st.integers(0, 6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_margins_of_one_score_are_given_back_whichever_pairs_were_annotated(seed, size, extra):
    rng = np.random.default_rng(seed)
    score = rng.normal(size=size)
    pairs = [(a, b) if score[a] >= score[b] else (b, a) for a, b in connected_pairs(rng, size, extra)]
    found = rate(pairs, [score[a] - score[b] for a, b in pairs], size)
    assert found.answers.tolist() == list(range(size))
    assert found.strength == pytest.approx(score - score.mean(), abs=1e-9)
    assert (found.num_pairs, found.num_agreeing) == (len(pairs), len(pairs))
    assert found.num_loops == extra


def test_outcomes_of_everyone_with_everyone_are_wins_less_losses():
    pairs = [(a, b) for a in range(5) for b in range(a + 1, 5)]
    assert rate(pairs).strength == pytest.approx(np.array([4, 2, 0, -2, -4]) / 5)


def test_noisy_outcomes_of_an_incomplete_design_recover_the_order():
    rng = np.random.default_rng(0)
    score = np.linspace(-2, 2, 12)
    drawn = [rng.choice(12, 2, replace=False) for _ in range(300)]
    wins = [(a, b) if rng.random() < 1 / (1 + np.exp(score[b] - score[a])) else (b, a) for a, b in drawn]
    found = rate(wins, size=12)
    assert np.corrcoef(found.strength, score)[0, 1] > 0.95
    assert found.num_agreeing < found.num_pairs


def test_noisy_margins_are_averaged_as_least_squares_does():
    rng = np.random.default_rng(1)
    pairs = [(0, 1), (1, 2), (0, 2), (3, 0), (3, 2)]
    differences = rng.normal(1, 0.3, len(pairs))
    design = np.zeros((len(pairs), 4))
    for row, (high, low) in enumerate(pairs):
        design[row, high], design[row, low] = 1, -1
    expected = np.linalg.lstsq(design, differences, rcond=None)[0]  # of least norm, so of mean 0
    assert rate(pairs, differences).strength == pytest.approx(expected, abs=1e-12)


def test_of_parts_that_no_pair_connects_the_largest_counts():
    found = rate([(0, 1), (5, 3), (3, 2), (2, 6)], size=8)
    assert found.answers.tolist() == [2, 3, 5, 6]
    assert found.num_pairs == 3
    assert found.strength == pytest.approx([-0.5, 0.5, 1.5, -1.5])
    assert rate([(3, 2), (0, 1)]).answers.tolist() == [0, 1]  # of parts of one size the first


def test_answers_that_no_pair_tells_apart_are_exactly_equal():
    """Rounding must not order what was not compared."""
    for size in range(4, 30):
        strength = rate([(0, other) for other in range(1, size)]).strength
        assert len(np.unique(strength[1:])) == 1
        assert strength[0] > strength[1]


@pytest.mark.parametrize("pairs", [[(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]])
def test_labels_that_contradict_each_other_altogether_rate_no_answer_higher(pairs):
    found = rate(pairs)
    assert np.ptp(found.strength) == 0
    assert found.num_agreeing == 0


def test_a_repeated_pair_counts_twice_and_a_doubted_one_half():
    doubted = rate([(0, 1), (0, 1), (1, 0)]).strength
    assert doubted[0] - doubted[1] == pytest.approx(1 / 3)
