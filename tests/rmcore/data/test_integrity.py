"""Over-long pairs in training: by policy cut or dropped, always counted, and never two equal sides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import DroppedPair, Renderer, Rendering, TokenizedPair, TokenizedSide, count_cut
from rmcore.data.tokenized import open_tokenized, select_training_pairs, write_tokenized
from rmcore.data.tokenized_observations import Coding, open_observations_tokenized, write_observations_tokenized
from rmcore.models.loading import load_tokenizer, resolve_model

tokens = st.lists(st.integers(1, 3), min_size=1, max_size=8)


@st.composite
def cut_pairs(draw):
    """Pairs of (whole) token rows, cut from the right at a drawn limit as the renderer does to a completion."""
    limit = draw(st.integers(1, 8))
    rows = draw(st.lists(st.tuples(tokens, tokens), max_size=12))
    sides = [[TokenizedSide(ids[:limit], max(0, len(ids) - limit)) for ids in pair] for pair in rows]
    return limit, rows, [TokenizedPair(str(index), *pair) for index, pair in enumerate(sides)]


@given(cut_pairs(), st.sampled_from(["cut", "drop"]))
def test_every_pair_is_kept_or_recorded_and_for_its_reason(drawn, policy):
    limit, rows, pairs = drawn
    is_long = {pair.pair_id: max(map(len, row)) > limit for pair, row in zip(pairs, rows, strict=True)}
    is_tie = {pair.pair_id: row[0][:limit] == row[1][:limit] for pair, row in zip(pairs, rows, strict=True)}
    expected = {}
    for key, long in is_long.items():
        if long and policy == "drop":
            expected[key] = "a side is longer than max_seq_len"
        elif is_tie[key]:
            expected[key] = "sides equal after the cut" if long else "sides equal as tokens"
    counts = count_cut(pairs)
    assert counts["num_equal_after_cut"] == sum(is_long[key] and is_tie[key] for key in is_long)
    assert counts["num_cut_pairs"] == sum(is_long.values())
    if pairs and len(expected) == len(pairs):
        with pytest.raises(DataError) as refused:
            select_training_pairs(pairs, over_length=policy)
        assert ("raise max_seq_len" in str(refused.value)) == any(is_long.values())
        return
    kept, dropped = select_training_pairs(pairs, over_length=policy)
    assert {one.pair_id: one.reason for one in dropped} == expected
    assert kept == [pair for pair in pairs if pair.pair_id not in expected]
    for one in dropped:
        whole = rows[int(one.pair_id)]
        lost = {name: max(0, len(ids) - limit) for name, ids in zip(("chosen", "rejected"), whole, strict=True)}
        assert one.to_dict() == {"pair_id": one.pair_id, "reason": expected[one.pair_id], "meta": {"truncation": lost}}


@pytest.fixture(scope="module")
def lower_case():
    """A tokenizer that makes one of capitals and small letters."""
    return Renderer(load_tokenizer(resolve_model("minilm")), Rendering("plain", 64))


def test_sides_that_a_tokenizer_makes_equal_are_not_trained_on(lower_case, tmp_path):
    """Their margin is 0 whatever the weights; that no cut did it is said."""
    alike = PreferencePair("Where?", "Paris.", "PARIS.", pair_id="alike")
    good = PreferencePair("Where?", "Paris.", "Rome.", pair_id="good")
    tokenized = lower_case.tokenize_pairs([alike, good])
    dropped = DroppedPair("alike", "sides equal as tokens", {"chosen": 0, "rejected": 0})
    for policy in ("cut", "drop"):
        assert select_training_pairs(tokenized, over_length=policy) == ([tokenized[1]], [dropped])
    assert count_cut(tokenized)["num_equal_after_cut"] == 0
    write_tokenized(lower_case, [alike, good], tmp_path, over_length="cut")
    found = open_tokenized(tmp_path, 2)
    assert list(found.pairs) == [tokenized[1]]
    assert list(found.left_out()) == [{"row": 0, **dropped.to_dict()}]
    write_tokenized(lower_case, [alike], tmp_path, over_length="cut")
    with pytest.raises(DataError, match=r"\(sides equal as tokens: 1\): this model's tokenizer"):
        open_tokenized(tmp_path, 1)


def test_answers_that_a_tokenizer_makes_equal_are_no_observation(lower_case, tmp_path):
    alike, good = (Observation("Where?", ("Rome.", "Paris.", last), ranks=(1, 2, 3)) for last in ("PARIS.", "Bonn."))
    long = Observation("Where?", tuple("word " * 100 + last for last in "abc"), ranks=(1, 2, 3))
    write_observations_tokenized(lower_case, [alike, good, long], tmp_path, Coding(), over_length="cut")
    found = open_observations_tokenized(tmp_path, 3)
    assert [one.pair_id for one in found.observations] == [good.observation_id]
    assert [one["reason"] for one in found.left_out()] == [
        "two answers are the same tokens",
        "two answers are the same within max_seq_len",
    ]
