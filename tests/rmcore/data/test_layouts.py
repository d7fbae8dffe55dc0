"""Every public layout gives the pair that a reader of it would write down, and every bad row its reason."""

import json
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.data.observation import WEIGHT
from rmcore.data.pair import Message, PreferencePair, plain_prompt, tools_of
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.fields import Reason, RowRejected
from rmcore.data.readers.layouts import recognise
from rmcore.data.readers.row_pairs import strict_pairs
from rmcore.data.readers.sources import load_pairs
from source_sample import lines, pair_of, pairs_of

SYSTEM, HELLO, HI, ASK = (
    Message("system", "Be brief."),
    Message("user", "Hello"),
    Message("assistant", "Hi!"),
    Message("user", "Why?"),
)

TRANSCRIPT = "\n\nHuman: Hello\n\nAssistant: Hi!\n\nHuman: Why?\n\nAssistant:"


def turns(*messages):
    return [message._asdict() for message in messages]


def side(*context, text):
    return turns(*context, Message("assistant", text))


def both(*context, **prompt):
    """Sides that are lists of messages."""
    return {**prompt, "chosen": side(*context, text="a"), "rejected": side(*context, text="b")}


def shp(history, label=1):
    return {"history": history, "human_ref_A": "ba"[int(label)], "human_ref_B": "ab"[int(label)], "labels": label}


AB = {"chosen": "a", "rejected": "b"}
TALK, TOLD = (HELLO, HI, ASK), Message("user", TRANSCRIPT)
SAME = {
    "plain strings": ("Hello", {"prompt": "Hello", **AB}),
    "UltraFeedback": ("Hello", both(HELLO, prompt="Hello")),
    "TRL conversational": ("Hello", both(prompt=turns(HELLO))),
    "implicit prompt": ("Hello", both(HELLO)),
    "struct of lists": ("Hello", {name: {"role": ["user", "assistant"], "content": ["Hello", text]}
                                  for name, text in AB.items()}),
    "HH-RLHF": ("Hello", {name: f"\n\nHuman: Hello\n\nAssistant: {text}" for name, text in AB.items()}),
    "SHP, A preferred": ("Hello", shp("Hello")),
    "SHP, B preferred": ("Hello", shp("Hello", "0")),
    "ranks": ("Hello", {"prompt": "Hello", "responses": ["b", "a"], "ranks": [2, 1]}),
    "bytes": ("Hello", {"prompt": b"Hello", "chosen": b"a", "rejected": b"b"}),
    "HH-RLHF of turns": (TALK, {name: f"{TRANSCRIPT} {text}" for name, text in AB.items()}),
    "implicit prompt of turns": (TALK, both(*TALK)),
    "the prompt column is the first turn": (TALK, both(*TALK, prompt="Hello")),
    "a prompt list with plain completions": (TALK, {"prompt": turns(*TALK), **AB}),
    "a transcript": (TALK, {"prompt": TRANSCRIPT, **AB}),
    "a transcript as bytes": (TALK, {"prompt": TRANSCRIPT.encode(), **AB}),
    "a prompt list of a transcript": (TALK, {"prompt": turns(TOLD), **AB}),
    "the sides repeat a transcript": (TALK, both(*TALK, prompt=TRANSCRIPT)),
    "the sides' prompt is a transcript": (TALK, both(TOLD)),
    "ranked answers to a transcript": (TALK, {"prompt": TRANSCRIPT, "responses": ["b", "a"], "ranks": [2, 1]}),
    "best answer to a transcript": (TALK, {"prompt": TRANSCRIPT, "responses": ["b", "a"], "best_index": 1}),
    "a winner": ("Hello", {"prompt": "Hello", "response_a": "b", "response_b": "a", "winner": "b"}),
    "winner's transcript": (TALK, {"prompt": TRANSCRIPT, "response_a": "b", "response_b": "a", "winner": "b"}),
    "SHP's transcript": (TALK, shp(TRANSCRIPT)),
    "the sides repeat the last turn": ((SYSTEM, HELLO), both(HELLO, prompt=turns(SYSTEM, HELLO))),
    "the sides repeat the last turn and go on": ((SYSTEM, *TALK), both(*TALK, prompt=turns(SYSTEM, HELLO))),
    "a system turn before": ((SYSTEM, HELLO), both(SYSTEM, HELLO, prompt=turns(HELLO))),
    "a system turn before, and on": ((SYSTEM, *TALK), both(SYSTEM, *TALK, prompt=turns(HELLO))),
    "a transcript's last turn": (TALK, both(ASK, prompt=TRANSCRIPT)),
    "the sides go on behind a system turn": ((SYSTEM, HELLO), both(HELLO, prompt=turns(SYSTEM))),
    "the end of the sides' dialogue": (TALK, both(*TALK, prompt=turns(ASK))),
    "a transcript behind a system turn": ((SYSTEM, *TALK), both(prompt=turns(SYSTEM, TOLD))),
    "a transcript that the sides have, too": ((SYSTEM, *TALK), both(SYSTEM, TOLD, prompt=TRANSCRIPT)),
    "two users' turns in one prompt": ((HELLO, ASK), both(prompt=turns(HELLO, ASK))),
}  # fmt: skip


@pytest.mark.parametrize(("prompt", "record"), SAME.values(), ids=SAME)
def test_the_same_pair_in_every_layout(prompt, record):
    assert pairs_of(record) == [PreferencePair(prompt, "a", "b")]


ASKED = ("plain strings", "implicit prompt", "HH-RLHF", "SHP, A preferred", "ranks", "a winner")


@pytest.mark.parametrize("name", ASKED)
def test_a_system_column_is_a_system_turn_and_tools_are_kept_in_every_layout(tmp_path, name):
    _, row = SAME[name]
    with_nan = row | dict.fromkeys(("system", "tools", "images"), math.nan)  # as pandas writes that there are none
    assert load_pairs(lines([with_nan], tmp_path / "rows.jsonl")).pairs == [pair_of(row)]
    plain, framed = pair_of(row), pair_of(row | {"system": "Be brief.", "tools": json.dumps([{"name": "weather"}])})
    assert framed.prompt[1:] == (SYSTEM, HELLO)
    assert tools_of(framed.prompt) == [{"name": "weather"}]
    assert (framed.chosen, framed.rejected, framed.metadata) == (plain.chosen, plain.rejected, plain.metadata)
    assert len({plain.pair_id, framed.pair_id, pair_of(row | {"system": "Be brief."}).pair_id}) == 3
    assert pair_of(row | {"system": None, "tools": []}).pair_id == plain.pair_id


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_a_dialogue_in_two_overlapping_parts_is_whole_again(contents, first, second):
    """Turn by turn, the prompt up to one place and the sides from an earlier one; alike turns may be met there."""
    whole = tuple(Message("user" if i % 2 == 0 else "assistant", f"{i}{text}") for i, text in enumerate(contents))
    whole = whole if len(whole) % 2 else (*whole, ASK)
    prompt, context = whole[: max(1, first)], whole[min(second, max(1, first)) :]
    assert pairs_of(both(*context, prompt=turns(*prompt))) == [PreferencePair(plain_prompt(whole), "a", "b")]


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
    assert pair_of({"prompt": text, "chosen": "a", "rejected": "b"}).prompt == text


def test_a_dialogue_marker_inside_a_line_is_text():
    text = "\n\nHuman: he said\nAssistant: no\n\nAssistant: "
    pair = pair_of({"chosen": text + "a Human: b", "rejected": text + "b"})
    assert (pair.prompt, pair.chosen) == ("he said\nAssistant: no", "a Human: b")


BAD = [
    ({"prompt": " ", "chosen": "a", "rejected": "b"}, Reason.EMPTY_PROMPT),
    ({"prompt": [], "chosen": "a", "rejected": "b"}, Reason.EMPTY_PROMPT),
    ({"prompt": "\n\nHuman: \n\nAssistant:", "chosen": "a", "rejected": "b"}, Reason.EMPTY_PROMPT),
    (both(), Reason.EMPTY_PROMPT),
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
    (both(ASK, prompt="p"), Reason.PROMPTS_DIFFER),
    ({"chosen": side(HELLO, text="a"), "rejected": side(ASK, text="b")}, Reason.PROMPTS_DIFFER),
    (both(ASK, prompt=turns(HELLO)), Reason.PROMPTS_DIFFER),
    (both(SYSTEM, ASK, prompt=turns(HELLO)), Reason.PROMPTS_DIFFER),
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
    ({"prompt": turns(SYSTEM, HELLO), **AB, "system": "Be long."}, Reason.TWO_SYSTEM_TEXTS),
    *(({"prompt": "p", **AB, "tools": tools}, Reason.BAD_TOOLS) for tools in ("w", ["w"], [[]], 5)),
    ({"prompt": turns(HELLO, Message("tools", "[]")), **AB}, Reason.BAD_TOOLS),
    ({"prompt": turns(Message("tools", " ")), **AB}, Reason.BAD_TOOLS),
]


@pytest.mark.parametrize(("record", "reason"), BAD, ids=[f"{reason}-{i}" for i, (_, reason) in enumerate(BAD)])
def test_a_bad_row_is_refused_with_its_reason(record, reason):
    with pytest.raises(RowRejected) as caught:
        pairs_of(record)
    assert caught.value.reason is reason


def test_a_row_without_the_prompt_of_its_source_misses_a_value_and_is_not_taken_for_a_dialogue():
    layout = recognise({"prompt": "p", "chosen": "a", "rejected": "b"})
    with pytest.raises(RowRejected, match=Reason.MISSING_VALUE):
        layout.parse({"chosen": "\n\nHuman: x\n\nAssistant: a", "rejected": "\n\nHuman: x\n\nAssistant: b"})


def test_shp_strength_is_the_log_of_the_score_ratio():
    record = {"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 0, "score_ratio": 4.0, "domain": "ask"}
    pair = pair_of(record)
    assert pair.target_margin == pytest.approx(math.log(4))
    assert pair.metadata == {"score_ratio": 4.0, "domain": "ask"}


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5)), min_size=2, max_size=9), st.integers(1, 40))
def test_a_cap_keeps_some_of_a_rows_pairs_in_order_and_counts_the_rest(answers, most):
    texts, strength = zip(*answers, strict=True)
    places = range(len(answers))
    expected = [(i, j) for i in places for j in places if strength[i] > strength[j] and texts[i] != texts[j]]
    pairs, num_left_out = strict_pairs("p", texts, strength, most)
    assert len(pairs) == min(most, len(expected))
    assert num_left_out == len(expected) - len(pairs)
    rest = iter(expected)
    assert all(pair in rest for pair in pairs)  # each behind the one before
    assert strict_pairs("p", texts, strength, most) == (pairs, num_left_out)


def test_thousands_of_ranked_answers_cost_no_more_than_they_give():
    row = {"prompt": "p", "answers": [f"answer {i}" for i in range(3000)], "ranks": list(range(3000))}
    tracemalloc.start()
    found = recognise(row).parse(row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(found.pairs), found.num_over_cap) == (36, 3000 * 2999 // 2 - 36)
    assert peak < 4 * 2**20  # a byte for each two of them alone would take 9 MB


def test_named_columns_come_first_even_where_they_swap_the_usual_ones():
    record = {"q": "p", "chosen": "a", "rejected": "b", "gap": 3}
    columns = ColumnMap(prompt="q", chosen="rejected", rejected="chosen", margin="gap")
    assert pairs_of(record, columns) == [PreferencePair("p", "b", "a", 3.0)]
