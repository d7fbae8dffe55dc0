"""Pairs shared out over ranks and micro-batches of about equal cost."""

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError
from rmcore.models.batching import even_shares

COSTS = st.lists(st.integers(1, 60), max_size=25)


def loads(costs, shares):
    return [[sum(costs[index] for index in group) for group in share] for share in shares]


@given(COSTS, st.integers(60, 200), st.integers(1, 4), st.integers(1, 300))
def test_each_pair_once_within_the_budget_as_many_micro_batches_a_rank(costs, budget, ranks, aim):
    shares = even_shares(costs, budget, num_ranks=ranks, aim=aim)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    assert sorted(index for share in shares for group in share for index in group) == list(range(len(costs)))
    for rank in loads(costs, shares):
        assert max(rank, default=0) <= budget
        assert rank == sorted(rank, reverse=True)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(45, 90), st.integers(1, 2))
def test_the_largest_is_at_most_four_thirds_of_the_best_possible(costs, budget, ranks):
    shares = even_shares(costs, budget, num_ranks=ranks, aim=budget)
    count = sum(len(share) for share in shares)
    assume(count <= 4)
    best = min(
        max(sum(cost for cost, at in zip(costs, owners, strict=True) if at == number) for number in range(count))
        for owners in itertools.product(range(count), repeat=len(costs))
    )
    assert 3 * max(map(max, loads(costs, shares))) <= 4 * best


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 4))
def test_what_fits_one_micro_batch_a_rank_is_not_cut_further(costs, ranks):
    shares = even_shares(costs, sum(costs), num_ranks=ranks, aim=sum(costs))
    assert all(len(share) == 1 for share in shares)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(40, 80))
def test_an_aim_below_the_budget_cuts_into_as_many_as_it_says(costs, aim):
    (share,) = even_shares(costs, 10**6, num_ranks=1, aim=aim)
    assert len(share) == -(-sum(costs) // aim)


def test_more_processes_than_pairs_leave_some_empty():
    assert even_shares([5], 10, num_ranks=3, aim=10) == [[[0]], [[]], [[]]]


def test_a_pair_that_does_not_fit_is_refused_with_the_budget_it_needs():
    with pytest.raises(ConfigError, match=r"token_budget=100 cannot hold one pair of 101 tokens.*at least 101"):
        even_shares([3, 101], 100, num_ranks=1, aim=100)


def test_no_more_micro_batches_than_pairs_even_where_each_is_larger_than_the_aim():
    """Empty ones would be computed as idle ones."""
    for num_ranks, num_pairs in ((1, 16), (3, 6)):
        shares = even_shares([6000] * num_pairs, 12000, num_ranks=num_ranks, aim=4096)
        assert [len(share) for share in shares] == [math.ceil(num_pairs / num_ranks)] * num_ranks
        assert all(group for share in shares for group in share)
