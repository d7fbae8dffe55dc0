"""The layout of packed rows: nothing is lost or moved, a shared prefix stands once, and groups are chosen well."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.models.batching import micro_batches, scoring_chunks
from rmcore.models.packing.layout import Packing, find_groups, group_prefix, group_tokens, pack_sides, shared_prefix

CAUSAL = Packing(causal=True, kernel="sdpa")
VARLEN = Packing(causal=True, kernel="varlen")
ENCODER = Packing(causal=False, kernel="sdpa", first_position=2)
# Few different tokens: common prefixes, equal sides and sides that are a prefix of another come by themselves.
SIDE = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@st.composite
def grouped_sides(draw):
    """Up to ten sides and a partition of them into groups, in any order."""
    sides = draw(st.lists(SIDE, min_size=1, max_size=10))
    order = draw(st.permutations(range(len(sides))))
    cuts = draw(st.lists(st.booleans(), min_size=len(sides), max_size=len(sides)))
    groups = []
    for index, cut in zip(order, cuts, strict=True):
        if cut or not groups:
            groups.append([])
        groups[-1].append(index)
    return sides, groups


def first_ones(sides, group):
    """The positions of a group without those of a side that equals an earlier one; of two sides both count."""
    if len(group) <= 2:
        return group
    return [index for place, index in enumerate(group) if sides[index] not in [sides[one] for one in group[:place]]]


def naive_prefix(a, b):
    same = 0
    while same < min(len(a), len(b)) - 1 and a[same] == b[same]:
        same += 1
    return same


def rebuilt(row, order):
    """Each side by its position in `order`: (tokens, positions, place of its first and of its last own token)."""
    tokens, positions = row.input_ids[0].tolist(), row.position_ids[0].tolist()
    found, place, members = {}, 0, iter(order)
    for prefix, *lengths in row.plan.groups:
        start, place = place, place + prefix
        for length in lengths:
            at = [*range(start, start + prefix), *range(place, place + length)]
            found[next(members)] = [tokens[i] for i in at], [positions[i] for i in at], at[0], at[-1]
            place += length
    assert place == row.num_tokens
    assert next(members, None) is None
    return found


@given(grouped_sides(), st.sampled_from([CAUSAL, VARLEN, ENCODER]))
def test_every_side_can_be_read_back_with_its_positions(drawn, packing):
    sides, groups = drawn
    row = pack_sides(sides, groups, packing)
    left = [first_ones(sides, group) for group in groups]
    found = rebuilt(row, itertools.chain.from_iterable(left))
    assert len(row.read_at) == len(sides)
    assert len(found) == sum(map(len, left))
    for group, firsts in zip(groups, left, strict=True):
        for index in group:  # an equal side is read where the first one is
            found.setdefault(index, found[next(one for one in firsts if sides[one] == sides[index])])
    for index, side in enumerate(sides):
        tokens, positions, first, last = found[index]
        assert tokens == side
        assert positions == list(range(packing.first_position, packing.first_position + len(side)))
        assert row.read_at[index] == (last if packing.causal else first)


@given(grouped_sides(), st.sampled_from([CAUSAL, ENCODER]))
def test_a_row_is_as_long_as_its_sides_less_the_prefixes_that_are_not_repeated(drawn, packing):
    sides, groups = drawn
    row = pack_sides(sides, groups, packing)
    assert row.num_real_tokens == sum(map(len, sides))
    assert row.num_tokens == sum(group_tokens([sides[index] for index in group], packing) for group in groups)
    saved = 0
    for group in groups:
        members = [sides[index] for index in first_ones(sides, group)]
        saved += sum(map(len, (sides[index] for index in group))) - sum(map(len, members))
        if packing.causal and len(members) > 1:
            prefix = min(naive_prefix(a, b) for a, b in itertools.combinations(members, 2))
            assert prefix == group_prefix(members)
            saved += prefix * (len(members) - 1)
    assert row.num_real_tokens - row.num_tokens == saved
    assert row.position_ids.dtype == row.input_ids.dtype == row.read_at.dtype == torch.int64


@given(SIDE, SIDE)
def test_the_shared_prefix_ends_before_the_first_difference_and_leaves_a_token_to_each(a, b):
    assert shared_prefix(a, b) == shared_prefix(b, a) == naive_prefix(a, b)


def saved_tokens(sides, groups):
    return sum(map(len, sides)) - sum(group_tokens([sides[index] for index in group], CAUSAL) for group in groups)


@pytest.mark.slow
@given(st.lists(SIDE, max_size=14), st.integers(1, 40))
def test_groups_hold_each_side_once_within_the_limit(sides, most):
    groups = find_groups(sides, most_tokens=most)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(sides)))
    for group in groups:
        assert len(group) == 1 or group_tokens([sides[index] for index in group], CAUSAL) <= most


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(SIDE, min_size=1, max_size=8, unique_by=tuple), st.integers(1, 40))
def test_no_other_cut_of_the_sorted_sides_saves_more(sides, most):
    order = sorted(range(len(sides)), key=lambda index: sides[index])
    best = 0
    for cuts in itertools.product([False, True], repeat=len(sides) - 1):
        edges = [0, *(at for at, cut in enumerate(cuts, 1) if cut), len(sides)]
        runs = [order[a:b] for a, b in itertools.pairwise(edges)]
        if all(len(run) == 1 or group_tokens([sides[i] for i in run], CAUSAL) <= most for run in runs):
            best = max(best, saved_tokens(sides, runs))
    assert saved_tokens(sides, find_groups(sides, most_tokens=most)) == best


@given(st.lists(SIDE, max_size=14), st.integers(9, 40), st.sampled_from([None, CAUSAL, ENCODER, VARLEN]))
def test_scoring_chunks_hold_each_side_once_within_the_budget(sides, budget, packing):
    chunks = scoring_chunks(sides, token_budget=budget, packing=packing)
    assert sorted(index for chunk in chunks for group in chunk for index in group) == list(range(len(sides)))
    for chunk in chunks:
        members = [index for group in chunk for index in group]
        if packing is None:
            assert len(members) * max(len(sides[index]) for index in members) <= budget
        else:
            assert pack_sides([sides[i] for i in members], _renumbered(chunk), packing).num_tokens <= budget


def _renumbered(groups):
    places = itertools.count()
    return [[next(places) for _ in group] for group in groups]


def tokenized(sides):
    return [TokenizedPair(str(i), TokenizedSide(c, 0), TokenizedSide(r, 0)) for i, (c, r) in enumerate(sides)]


PAIRS = st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=9)


@pytest.mark.slow
@given(PAIRS, st.integers(18, 60), st.integers(1, 3), st.sampled_from([CAUSAL, VARLEN, ENCODER]))
def test_processes_share_the_pairs_of_a_step_and_stay_in_step(sides, budget, world, packing):
    pairs = tokenized(sides)
    shares = [
        micro_batches(pairs, token_budget=budget, pad_id=0, packing=packing, rank=rank, world=world)
        for rank in range(world)
    ]
    assert len({len(share) for share in shares}) == 1
    batches = list(itertools.chain.from_iterable(shares))
    assert sorted(index for batch in batches if not batch.idle for index in batch.indices) == list(range(len(pairs)))
    assert sum(batch.num_pairs for batch in batches) == len(pairs)
    assert all(batch.rows.num_tokens <= budget for batch in batches)
    assert all(batch.indices for batch in batches)
    shortest = min(group_tokens(both, packing) for both in sides)
    assert all(batch.rows.num_tokens == shortest for batch in batches if batch.idle)
