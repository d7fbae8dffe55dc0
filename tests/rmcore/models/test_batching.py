import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.models.batching import StepOrder, collate, even_shares, micro_batches, pack_pairs, plain_groups

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def padded_cost(groups, lengths, overhead):
    return sum(2 * len(group) * max(lengths[index] for index in group) + overhead for group in groups)


@given(LENGTHS, st.integers(120, 400), st.integers(0, 200))
def test_every_pair_is_packed_once_within_the_budget(lengths, budget, overhead):
    groups = pack_pairs(lengths, budget, overhead_tokens=overhead)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    assert all(2 * len(group) * max(lengths[index] for index in group) <= budget for group in groups)


@given(LENGTHS, st.integers(120, 400))
def test_plain_groups_keep_the_order_within_the_budget_and_none_ends_early(lengths, budget):
    def cost(group):
        return 2 * len(group) * max(lengths[index] for index in group)

    groups = plain_groups(lengths, budget)
    assert list(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    assert all(group and cost(group) <= budget for group in groups)
    assert all(cost([*group, after[0]]) > budget for group, after in itertools.pairwise(groups))


def set_partitions(items):
    if not items:
        yield []
        return
    head, *rest = items
    for partition in set_partitions(rest):
        yield [[head], *partition]
        for position, group in enumerate(partition):
            yield [*partition[:position], [head, *group], *partition[position + 1 :]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(40, 120), st.integers(0, 60))
def test_no_grouping_of_any_kind_is_cheaper(lengths, budget, overhead):
    found = padded_cost(pack_pairs(lengths, budget, overhead_tokens=overhead), lengths, overhead)
    allowed = (
        partition
        for partition in set_partitions(list(range(len(lengths))))
        if all(2 * len(group) * max(lengths[index] for index in group) <= budget for group in partition)
    )
    assert found == min(padded_cost(partition, lengths, overhead) for partition in allowed)


def test_a_pair_that_does_not_fit_is_refused_with_the_budget_it_needs():
    with pytest.raises(ConfigError, match=r"token_budget=100 cannot hold one pair of 2 x 51 tokens.*at least 102"):
        pack_pairs([3, 51], 100)


ROWS = st.lists(st.integers(1, 500), min_size=1, max_size=12)


@given(st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=8))
def test_micro_batches_hold_whole_pairs_chosen_rows_first(sides):
    pairs = [TokenizedPair(str(i), TokenizedSide(c, 0), TokenizedSide(r, 0)) for i, (c, r) in enumerate(sides)]
    seen = []
    for batch in micro_batches(pairs, token_budget=64, pad_id=0):
        assert (
            batch.rows.input_ids.shape
            == batch.rows.attention_mask.shape
            == (2 * batch.num_pairs, batch.rows.input_ids.shape[1])
        )
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch.rows.input_ids, batch.rows.attention_mask, strict=True)
        ]
        assert rows[: batch.num_pairs] == [pairs[index].chosen.ids for index in batch.indices]
        assert rows[batch.num_pairs :] == [pairs[index].rejected.ids for index in batch.indices]
        seen += batch.indices
    assert sorted(seen) == list(range(len(pairs)))


def test_the_mask_and_not_the_pad_id_says_what_is_real():
    pair = TokenizedPair("a", TokenizedSide([5, 0, 0], 0), TokenizedSide([0], 0))
    batch = collate([pair], [0], pad_id=0)
    assert torch.equal(batch.rows.attention_mask, torch.tensor([[1, 1, 1], [1, 0, 0]]))


@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 25), st.integers(0, 5))
def test_an_epoch_visits_each_pair_once_and_the_order_can_be_replayed(num_pairs, per_step, num_steps, seed):
    steps = list(StepOrder(num_pairs, per_step, num_steps, seed=seed))
    assert len(steps) == num_steps
    assert steps == list(StepOrder(num_pairs, per_step, num_steps + 3, seed=seed))[:num_steps]
    per_epoch = -(-num_pairs // per_step)
    for start in range(0, num_steps - per_epoch + 1, per_epoch):
        epoch = list(itertools.chain.from_iterable(steps[start : start + per_epoch]))
        assert sorted(epoch) == list(range(num_pairs))


def test_no_epoch_repeats_the_order_of_another():
    epochs = [tuple(step) for step in StepOrder(20, 20, 10, seed=0)]
    assert len(set(epochs)) == 10


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


@pytest.mark.slow
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


def test_no_more_micro_batches_than_pairs_even_where_each_is_larger_than_the_aim():
    """Empty ones would be computed as idle ones."""
    for num_ranks, num_pairs in ((1, 16), (3, 6)):
        shares = even_shares([6000] * num_pairs, 12000, num_ranks=num_ranks, aim=4096)
        assert [len(share) for share in shares] == [math.ceil(num_pairs / num_ranks)] * num_ranks
        assert all(group for share in shares for group in share)
