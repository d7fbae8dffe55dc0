"""The pairs a curvature is averaged over: drawn, cut into micro-batches and into groups of whole prompts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.landscape.sample import CURVATURE_TOKEN_BUDGET, CurvatureSample, draw_positions, group_prompts


def draw_pairs(lengths):
    rng = np.random.default_rng(0)

    def side(length):
        return TokenizedSide(rng.integers(1, 8, length).tolist(), 0)

    return [TokenizedPair(f"p{index}", side(a), side(b)) for index, (a, b) in enumerate(lengths)]


@given(num_pairs=st.integers(1, 20), available=st.integers(1, 50), seed=st.integers(0, 9))
def test_the_draw_is_fixed_distinct_and_as_large_as_it_can_be(num_pairs, available, seed):
    drawn = draw_positions(available, num_pairs, seed)
    assert drawn == draw_positions(available, num_pairs, seed)
    assert len(set(drawn)) == len(drawn) == min(num_pairs, available)
    assert drawn == sorted(drawn)
    assert set(drawn) <= set(range(available))


def test_every_pair_is_equally_likely():
    counts = np.bincount([position for seed in range(2000) for position in draw_positions(10, 3, seed)], minlength=10)
    assert abs(counts - 600).max() < 5 * np.sqrt(600 * 0.7)  # five standard deviations


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 2500)), min_size=1, max_size=10))
def test_micro_batches_hold_every_pair_once_under_the_budget_with_its_prompt(lengths):
    sample = CurvatureSample(draw_pairs(lengths), [str(length) for length in lengths], 0)
    found = [
        pair
        for rows in sample.batches
        for pair in zip(*(mask.sum(1).tolist() for mask in rows.attention_mask.chunk(2)), strict=True)
    ]
    assert sorted(found) == sorted(lengths)
    assert [str(pair) for pair in found] == [sample.prompts[index] for group in sample.order for index in group]
    longest = max(max(pair) for pair in lengths)
    assert max(rows.num_tokens for rows in sample.batches) <= max(CURVATURE_TOKEN_BUDGET, 2 * longest)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=40), st.integers(1, 10))
def test_groups_hold_every_pair_once_and_never_cut_a_prompt(prompts, most):
    groups = group_prompts(prompts, most)
    assert sorted(position for group in groups for position in group) == list(range(len(prompts)))
    assert len(groups) == min(most, len(set(prompts)))
    assert all(groups)
    held = [{prompts[position] for position in group} for group in groups]
    assert sum(map(len, held)) == len(set(prompts))


def test_no_pair_is_refused():
    with pytest.raises(DataError, match="no pair"):
        CurvatureSample([], [], 0)
