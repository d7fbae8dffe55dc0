"""Every public layout gives the pair that a reader of it would write down, and every bad row its reason."""

import math
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.data.observation import WEIGHT
from rmcore.data.pair import Message, PreferencePair, plain_prompt
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.fields import Reason, RowRejected
from rmcore.data.readers.layouts import recognise

SYSTEM, HELLO, HI, ASK = (
    Message("system", "Be brief."),
    Message("user", "Hello"),
    Message("assistant", "Hi!"),
    Message("user", "Why?"),
)

TRANSCRIPT = "\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: Why?\n\nAssistant:"


def parse_record(row, columns=None):
    """The pairs of one record, in the layout that its own columns decide."""
    columns = columns or ColumnMap()
    return recognise(row, columns).parse(columns.rename(row)).pairs


def turns(*messages):
    return [message._asdict() for message in messages]


def side(*context, text):
    return turns(*context, Message("assistant", text))


EQUAL_MEANING = {
    "plain strings": {"prompt": "Hello", "chosen": "a", "rejected": "b"},
    "UltraFeedback": {"prompt": "Hello", "chosen": side(HELLO, text="a"), "rejected": side(HELLO, text="b")},
    "TRL conversational": {"prompt": turns(HELLO), "chosen": side(text="a"), "rejected": side(text="b")},
    "implicit prompt": {"chosen": side(HELLO, text="a"), "rejected": side(HELLO, text="b")},
    "struct of lists": {
        "chosen": {"role": ["user", "assistant"], "content": ["Hello", "a"]},
        "rejected": {"role": ["user", "assistant"], "content": ["Hello", "b"]},
    },
    "HH-RLHF": {"chosen": "\n\nHuman: Hello\n\nAssistant: a", "rejected": "\n\nHuman: Hello\n\nAssistant: b"},
    "SHP, A preferred": {"history": "Hello", "human_ref_A": "a", "human_ref_B": "b", "labels": 1},
    "SHP, B preferred": {"history": "Hello", "human_ref_A": "b", "human_ref_B": "a", "labels": "0"},
    "ranks": {"prompt": "Hello", "responses": ["b", "a"], "ranks": [2, 1]},
    "bytes": {"prompt": b"Hello", "chosen": b"a", "rejected": b"b"},
}


@pytest.mark.parametrize("record", EQUAL_MEANING.values(), ids=EQUAL_MEANING.keys())
def test_the_same_pair_in_every_layout(record):
    assert parse_record(record) == [PreferencePair("Hello", "a", "b")]


MULTI_TURN = {
    "HH-RLHF": {
        "chosen": "\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: Why?\n\nAssistant: a",
        "rejected": "\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: Why?\n\nAssistant: b",
    },
    "implicit prompt": {"chosen": side(HELLO, HI, ASK, text="a"), "rejected": side(HELLO, HI, ASK, text="b")},
    "prompt column is the first turn": {
        "prompt": "Hello",
        "chosen": side(HELLO, HI, ASK, text="a"),
        "rejected": side(HELLO, HI, ASK, text="b"),
    },
    "prompt list repeated by the sides": {
        "prompt": turns(HELLO, HI, ASK),
        "chosen": side(HELLO, HI, ASK, text="a"),
        "rejected": side(HELLO, HI, ASK, text="b"),
    },
    "prompt list that continues in the sides": {
        "prompt": turns(HELLO),
        "chosen": side(HI, ASK, text="a"),
        "rejected": side(HI, ASK, text="b"),
    },
    "prompt list with plain completions": {"prompt": turns(HELLO, HI, ASK), "chosen": "a", "rejected": "b"},
    "prompt is a transcript": {"prompt": TRANSCRIPT, "chosen": "a", "rejected": "b"},
    "prompt is a transcript as bytes": {"prompt": TRANSCRIPT.encode(), "chosen": "a", "rejected": "b"},
    "prompt list of a transcript": {"prompt": turns(Message("user", TRANSCRIPT)), "chosen": "a", "rejected": "b"},
    "the sides repeat a transcript": {
        "prompt": TRANSCRIPT,
        "chosen": side(HELLO, HI, ASK, text="a"),
        "rejected": side(HELLO, HI, ASK, text="b"),
    },
    "the sides' prompt is a transcript": {
        "chosen": side(Message("user", TRANSCRIPT), text="a"),
        "rejected": side(Message("user", TRANSCRIPT), text="b"),
    },
    "ranked answers to a transcript": {"prompt": TRANSCRIPT, "responses": ["b", "a"], "ranks": [2, 1]},
    "best answer to a transcript": {"prompt": TRANSCRIPT, "responses": ["b", "a"], "best_index": 1},
    "winner's transcript": {"prompt": TRANSCRIPT, "response_a": "b", "response_b": "a", "winner": "b"},
    "SHP": {"history": TRANSCRIPT, "human_ref_A": "a", "human_ref_B": "b", "labels": 1},
}


@pytest.mark.parametrize("record", MULTI_TURN.values(), ids=MULTI_TURN.keys())
def test_the_same_dialogue_in_every_layout(record):
    assert parse_record(record) == [PreferencePair((HELLO, HI, ASK), "a", "b")]


JOINED = {
    "the sides repeat the last turn": ([SYSTEM, HELLO], [HELLO], (SYSTEM, HELLO)),
    "the sides repeat the last turns": ([HELLO, HI, ASK], [HI, ASK], (HELLO, HI, ASK)),
    "the sides repeat the last turn and go on": ([SYSTEM, HELLO], [HELLO, HI, ASK], (SYSTEM, HELLO, HI, ASK)),
    "the sides put a system turn before": ([HELLO], [SYSTEM, HELLO], (SYSTEM, HELLO)),
    "the sides put a system turn before and go on": ([HELLO], [SYSTEM, HELLO, HI, ASK], (SYSTEM, HELLO, HI, ASK)),
    "a transcript's last turn": (TRANSCRIPT, [ASK], (HELLO, HI, ASK)),
    "the sides go on behind a system turn": ([SYSTEM], [HELLO], (SYSTEM, HELLO)),
    "the sides go on behind the assistant": ([HELLO, HI], [ASK], (HELLO, HI, ASK)),
    "the end of the sides' dialogue": ([ASK], [HELLO, HI, ASK], (HELLO, HI, ASK)),
    "a transcript behind a system turn": ([SYSTEM, Message("user", TRANSCRIPT)], [], (SYSTEM, HELLO, HI, ASK)),
    "a transcript that the sides have behind a system turn": (
        TRANSCRIPT,
        [SYSTEM, Message("user", TRANSCRIPT)],
        (SYSTEM, HELLO, HI, ASK),
    ),
    "two users' turns in one prompt": ([HELLO, ASK], [], (HELLO, ASK)),
}


@pytest.mark.parametrize(("prompt", "context", "expected"), JOINED.values(), ids=JOINED.keys())
def test_turns_of_the_prompt_that_the_sides_repeat_stand_once(prompt, context, expected):
    prompt = prompt if isinstance(prompt, str) else turns(*prompt)
    record = {"prompt": prompt, "chosen": side(*context, text="a"), "rejected": side(*context, text="b")}
    assert parse_record(record) == [PreferencePair(expected, "a", "b")]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_a_dialogue_in_two_overlapping_parts_is_whole_again(contents, first, second):
    """Turn by turn, the prompt up to one place and the sides from an earlier one; alike turns may be met there."""
    whole = tuple(Message("user" if i % 2 == 0 else "assistant", f"{i}{text}") for i, text in enumerate(contents))
    whole = whole if len(whole) % 2 else (*whole, ASK)
    prompt, context = whole[: max(1, first)], whole[min(second, max(1, first)) :]
    record = {"prompt": turns(*prompt), "chosen": side(*context, text="a"), "rejected": side(*context, text="b")}
    assert parse_record(record) == [PreferencePair(plain_prompt(whole), "a", "b")]


@pytest.mark.parametrize(
    "text",
    [
        "Human: Hello",
        "Hello\n\nAssistant:",
        "Human: Hello\nAssistant:",
        "Human: Hello\n\nAssistant: Hi!",
        "Say 'Human: a\n\nAssistant:'",
    ],
)
def test_a_prompt_that_is_no_transcript_up_to_the_assistant_stays_text(text):
    assert parse_record({"prompt": text, "chosen": "a", "rejected": "b"})[0].prompt == text


def test_a_dialogue_marker_inside_a_line_is_text():
    text = "\n\nHuman: he said\nAssistant: no\n\nAssistant: "
    (pair,) = parse_record({"chosen": text + "a Human: b", "rejected": text + "b"})
    assert (pair.prompt, pair.chosen) == ("he said\nAssistant: no", "a Human: b")


BAD = [
    ({"prompt": " ", "chosen": "a", "rejected": "b"}, Reason.EMPTY_PROMPT),
    ({"prompt": [], "chosen": "a", "rejected": "b"}, Reason.EMPTY_PROMPT),
    ({"prompt": "\n\nHuman: \n\nAssistant:", "chosen": "a", "rejected": "b"}, Reason.EMPTY_PROMPT),
    ({"prompt": turns(Message("user", "")), "chosen": "a", "rejected": "b"}, Reason.EMPTY_PROMPT),
    ({"chosen": side(text="a"), "rejected": side(text="b")}, Reason.EMPTY_PROMPT),
    ({"prompt": "p", "chosen": "\n", "rejected": "b"}, Reason.EMPTY_CHOSEN),
    ({"prompt": "p", "chosen": [], "rejected": "b"}, Reason.EMPTY_CHOSEN),
    ({"prompt": "p", "chosen": "a", "rejected": ""}, Reason.EMPTY_REJECTED),
    ({"prompt": None, "chosen": "a", "rejected": "b"}, Reason.MISSING_VALUE),
    ({"prompt": "p", "chosen": None, "rejected": "b"}, Reason.MISSING_CHOSEN),
    ({"prompt": "p", "chosen": "a", "rejected": math.nan}, Reason.MISSING_REJECTED),
    ({"prompt": "p", "chosen": "a", "rejected": 3}, Reason.WRONG_TYPE),
    ({"prompt": "p", "chosen": ["a"], "rejected": "b"}, Reason.WRONG_TYPE),
    ({"prompt": "p", "chosen": {"text": "a"}, "rejected": "b"}, Reason.MISSING_VALUE),
    ({"prompt": "p", "chosen": [{"role": "assistant", "content": [1]}], "rejected": "b"}, Reason.WRONG_TYPE),
    ({"prompt": "p", "chosen": "a", "rejected": "a"}, Reason.IDENTICAL_SIDES),
    ({"prompt": "p", "chosen": "\udcff", "rejected": "a"}, Reason.INVALID_UTF8),
    ({"prompt": b"\xff", "chosen": "b", "rejected": "a"}, Reason.INVALID_UTF8),
    ({"prompt": "p", "chosen": "b", "rejected": "a", "note": "\udcff"}, Reason.INVALID_UTF8),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "strong"}, Reason.BAD_MARGIN),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": math.inf}, Reason.BAD_MARGIN),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 10**400}, Reason.BAD_MARGIN),
    ({"prompt": "p", "chosen": side(ASK, text="a"), "rejected": side(ASK, text="b")}, Reason.PROMPTS_DIFFER),
    ({"chosen": side(HELLO, text="a"), "rejected": side(ASK, text="b")}, Reason.PROMPTS_DIFFER),
    ({"prompt": turns(HELLO), "chosen": side(ASK, text="a"), "rejected": side(ASK, text="b")}, Reason.PROMPTS_DIFFER),
    (
        {"prompt": turns(HELLO), "chosen": side(SYSTEM, ASK, text="a"), "rejected": side(SYSTEM, ASK, text="b")},
        Reason.PROMPTS_DIFFER,
    ),
    ({"chosen": turns(HELLO), "rejected": turns(HELLO)}, Reason.NO_FINAL_ASSISTANT_TURN),
    ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"}, Reason.PROMPTS_DIFFER),
    ({"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a"}, Reason.NO_FINAL_ASSISTANT_TURN),
    ({"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: b"}, Reason.EMPTY_CHOSEN),
    ({"chosen": "just text", "rejected": "other text"}, Reason.NOT_A_DIALOGUE),
    ({"chosen": "Assistant: a", "rejected": "Assistant: b"}, Reason.EMPTY_PROMPT),
    ({"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 2}, Reason.WRONG_TYPE),
    ({"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": None}, Reason.MISSING_VALUE),
    ({"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_ratio": 0}, Reason.BAD_MARGIN),
    ({"prompt": "p", "responses": ["a", "b"], "ranks": [1]}, Reason.LENGTHS_DIFFER),
    ({"prompt": "p", "responses": ["a"], "ranks": [1]}, Reason.FEWER_THAN_TWO_ANSWERS),
    ({"prompt": "p", "responses": ["a", "a"], "ranks": [1, 1]}, Reason.IDENTICAL_SIDES),
    ({"prompt": " ", "responses": ["a", "b"], "ranks": [1, 1]}, Reason.EMPTY_PROMPT),
    ({"prompt": "p", "chosen": "a", "rejected": "b", WEIGHT: 0}, Reason.BAD_WEIGHT),
    ({"prompt": "p", "responses": ["a", "b"], "ranks": [1, 1], WEIGHT: "much"}, Reason.BAD_WEIGHT),
    ({"prompt": "p", "responses": ["a", "a"], "ranks": [1, 2]}, Reason.IDENTICAL_SIDES),
    ({"prompt": "p", "responses": ["a", ""], "ranks": [1, 2]}, Reason.EMPTY_ANSWER),
    ({"prompt": "p", "responses": ["a", "b"], "scores": [1, None]}, Reason.MISSING_VALUE),
    ({"prompt": "p", "responses": ["a", "b"], "scores": None}, Reason.MISSING_VALUE),
    ({"prompt": "p", "responses": "ab", "scores": [1, 2]}, Reason.WRONG_TYPE),
    ({"prompt": "p", "responses": ["a", "b"], "scores": [1e308, -1e308]}, Reason.BAD_MARGIN),
    ({"prompt": "p", "responses": ["a", "b"], "ranks": [1, 2], "scores": [1, 2]}, Reason.RANKS_CONTRADICT_SCORES),
]


@pytest.mark.parametrize(("record", "reason"), BAD, ids=[f"{reason}-{i}" for i, (_, reason) in enumerate(BAD)])
def test_a_bad_row_is_refused_with_its_reason(record, reason):
    with pytest.raises(RowRejected) as caught:
        parse_record(record)
    assert caught.value.reason is reason


def test_a_row_without_the_prompt_of_its_source_misses_a_value_and_is_not_taken_for_a_dialogue():
    layout = recognise({"prompt": "p", "chosen": "a", "rejected": "b"})
    with pytest.raises(RowRejected, match=Reason.MISSING_VALUE):
        layout.parse({"chosen": "\n\nHuman: x\n\nAssistant: a", "rejected": "\n\nHuman: x\n\nAssistant: b"})


def test_shp_strength_is_the_log_of_the_score_ratio():
    record = {"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 0, "score_ratio": 4.0, "domain": "ask"}
    (pair,) = parse_record(record)
    assert pair.target_margin == pytest.approx(math.log(4))
    assert pair.metadata == {"score_ratio": 4.0, "domain": "ask"}


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5)), min_size=2, max_size=9), st.integers(1, 40))
def test_a_cap_keeps_some_of_a_rows_pairs_in_order_and_counts_the_rest(answers, most):
    row = {"prompt": "p", "answers": [text for text, _ in answers], "ranks": [rank for _, rank in answers]}
    expected = [
        (chosen, rejected)
        for chosen, better in answers
        for rejected, worse in answers
        if better < worse and chosen != rejected
    ]
    try:
        found = recognise(row, most=most).parse(row)
    except RowRejected:
        assert not expected
        return
    pairs = [(pair.chosen, pair.rejected) for pair in found.pairs]
    assert len(pairs) == min(most, len(expected))
    assert found.num_over_cap == len(expected) - len(pairs)
    rest = iter(expected)
    assert all(pair in rest for pair in pairs)  # each behind the one before
    assert recognise(row, most=most).parse({**row, "subset": "another column"}).pairs == [
        replace(pair, metadata={"subset": "another column"}) for pair in found.pairs
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=6))
def test_ranks_contradict_scores_where_a_better_answer_has_the_lower_one(both):
    row = {"prompt": "p", "answers": [str(i) for i in range(len(both))]}
    row |= {"ranks": [rank for rank, _ in both], "scores": [score for _, score in both]}
    contradict = any(rank < other and score < less for rank, score in both for other, less in both)
    if not contradict:
        assert bool(parse_record(row)) == (len(set(row["ranks"])) > 1)
    else:
        with pytest.raises(RowRejected, match=Reason.RANKS_CONTRADICT_SCORES):
            parse_record(row)


@pytest.mark.slow
def test_every_pair_of_a_row_is_as_likely_to_be_kept():
    """2 of 8 pairs, two answers tied and two alike, from each of 3,000 rows: 750 times each, standard error 24."""
    row = {"answers": ["a", "b", "c", "a", "d"], "ranks": [1, 2, 2, 3, 4]}
    counts = Counter()
    for number in range(3000):
        found = recognise({"prompt": "", **row}, most=2).parse({"prompt": f"prompt {number}", **row})
        counts.update((pair.chosen, pair.rejected) for pair in found.pairs)
    expected = {"ab": 1, "ac": 1, "ad": 2, "ba": 1, "bd": 1, "ca": 1, "cd": 1}
    assert {chosen + rejected for chosen, rejected in counts} == expected.keys()
    for (chosen, rejected), count in counts.items():
        assert abs(count / expected[chosen + rejected] - 750) < 4 * 24


def test_thousands_of_ranked_answers_cost_no_more_than_they_give():
    row = {"prompt": "p", "answers": [f"answer {i}" for i in range(3000)], "ranks": list(range(3000))}
    tracemalloc.start()
    found = recognise(row).parse(row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(found.pairs), found.num_over_cap) == (36, 3000 * 2999 // 2 - 36)
    assert peak < 4 * 2**20  # all pairs of indices alone would take 400 MB


def test_what_else_a_record_carries_is_metadata_and_json_ready():
    record = {
        "prompt": "p",
        "chosen": "a",
        "rejected": "b",
        "margin": "2.5",
        "subset": "math",
        "x": (1, math.nan),
        "n": None,
    }
    (pair,) = parse_record(record)
    assert pair.target_margin == 2.5
    assert pair.metadata == {"subset": "math", "x": [1, None]}
    assert pair.to_dict()["metadata"] == pair.metadata


def test_named_columns_come_first_even_where_they_swap_the_usual_ones():
    record = {"q": "p", "chosen": "a", "rejected": "b", "gap": 3}
    columns = ColumnMap(prompt="q", chosen="rejected", rejected="chosen", margin="gap")
    assert parse_record(record, columns) == [PreferencePair("p", "b", "a", 3.0)]
