"""One reader of messages for all ways in: nothing of a message is lost, and one dialogue is one prompt."""

import pytest

from rmcore.data.pair import Answer, Message, answer_turn
from rmcore.data.parts import SourceInParts
from rmcore.data.readers.fields import Reason, RowRejected
from rmcore.data.readers.sources import load_pairs
from rmcore.data.readers.turns import message_list, message_of
from rmcore.ensembles.score import score_pairs_table, score_readable_responses
from source_sample import lines, pair_of

TRANSCRIPT = "\n\nHuman: hello\n\nAssistant: hi\n\nHuman: name a fruit\n\nAssistant:"
TURNS = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "name a fruit"},
]
PARTS = [{"type": "text", "text": "name "}, {"type": "text", "text": "a fruit"}]
SAYS = {"role": "assistant", "content": "Apple"}
WAYS = {
    "a transcript": {"prompt": TRANSCRIPT, "response": " Apple"},
    "turns": {"prompt": TURNS, "response": "Apple"},
    "turns and a message": {"prompt": TURNS, "response": [SAYS]},
    "parts": {"prompt": [*TURNS[:2], TURNS[2] | {"content": PARTS}], "response": "Apple"},
}  # fmt: skip


@pytest.mark.parametrize("turn", [{"conten": "Apple"}, {"name": "Eve"}, {"content": None, "weight": 1}])
def test_a_turn_without_content_is_an_answer_only_if_it_calls_or_reasons(turn):
    with pytest.raises(RowRejected):
        message_of({"role": "assistant", **turn})
    assert message_of({"role": "assistant", "reasoning_content": "Hm.", **turn}).further()["reasoning_content"] == "Hm."


@pytest.mark.parametrize("row", WAYS.values(), ids=WAYS)
def test_one_dialogue_is_one_prompt_and_one_reward_in_pairs_rows_and_calls(tmp_path, rm, row):
    pairs = load_pairs(
        lines([{"prompt": row["prompt"], "chosen": row["response"], "rejected": "Stone"}], tmp_path / "pairs.jsonl")
    ).pairs
    [part] = SourceInParts(lines([row], tmp_path / "rows.jsonl"), 10)
    expected = [(tuple(Message(**turn) for turn in TURNS), "Apple")]
    assert part.responses == [(pairs[0].prompt, pairs[0].chosen)] == expected
    rewards, _ = score_pairs_table(rm, pairs)
    (reward,) = rewards["reward_chosen"]
    table, _ = score_readable_responses(rm, part.responses)
    assert table["reward"].tolist() == [pytest.approx(reward, abs=1e-6)]
    if isinstance(row["prompt"], str):
        assert rm.renderer.tokenize_sides([(row["prompt"], row["response"])]) == rm.renderer.tokenize_sides(
            part.responses
        )


ROW = {"prompt": "p", "chosen": "a", "rejected": "b"}
MEDIA = {
    "an image part": ([{"type": "image", "image": "x.png"}], Reason.IMAGES),
    "an image by its address": ([{"type": "image_url", "image_url": {"url": "x"}}], Reason.IMAGES),
    "an image without a type": ([{"image": "x.png"}, {"text": "q"}], Reason.IMAGES),
    "audio": ([{"type": "input_audio", "input_audio": {"data": "x"}}], Reason.AUDIO),
    "a video": ([{"type": "video", "video": "x"}], Reason.VIDEO),
    "a file": ([{"type": "file", "file": {"file_id": "x"}}], Reason.NO_TEXT_PART),
}


@pytest.mark.parametrize(("parts", "reason"), MEDIA.values(), ids=MEDIA)
def test_a_part_that_is_no_text_is_refused_for_what_it_is_in_pairs_and_in_rows_to_score(tmp_path, parts, reason):
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}]
    with pytest.raises(RowRejected) as caught:
        pair_of(ROW | {"prompt": prompt})
    assert caught.value.reason is reason
    rows = [{"prompt": prompt, "response": "a"}, WAYS["turns"]]
    source = SourceInParts(lines(rows, tmp_path / "rows.jsonl"), size=8)
    assert sum(len(part) for part in source) == source.num_unusable == 1
    assert any(str(reason) in sentence for sentence in source.notices)


@pytest.mark.parametrize("name", ["image", "images", "audio", "videos"])
def test_a_column_of_media_is_refused_where_it_holds_some(name):
    for none in ([], "", " ", "[]", "null", False, 0):  # CSV has nothing but text, and a flag is no picture
        assert pair_of(ROW | {name: none}).pair_id == pair_of(ROW).pair_id
    with pytest.raises(RowRejected, match="holds"):
        pair_of(ROW | {name: ["x.png"]})


def test_a_side_a_row_keeps_system_and_tools(tmp_path):
    rows = [
        {"pair_id": "1", "role": role, "prompt": "p", "response": role, "system": "Be brief.", "tools": [{"name": "w"}]}
        for role in ("chosen", "rejected")
    ]
    (pair,) = load_pairs(lines(rows, tmp_path / "sides.jsonl")).pairs
    assert [turn.role for turn in pair.prompt] == ["tools", "system", "user"]
    rows[1]["system"] = "Be long."
    rows += [row | {"pair_id": "2", "system": None} for row in rows]
    loaded = load_pairs(lines(rows, tmp_path / "differ.jsonl"))
    assert [pair.pair_id for pair in loaded.pairs] == ["2"]
    assert {row.reason for row in loaded.rejected} == {Reason.PROMPTS_DIFFER}


def test_null_and_empty_fields_say_nothing_as_arrow_stores_them():
    turn = {"role": "user", "content": "p"}
    bare = turn | {"tool_calls": None, "tool_call_id": "", "name": None, "reasoning_content": None, "timestamp": 5}
    assert message_of(bare) == Message("user", "p")
    assert pair_of(ROW | {"prompt": [bare]}) == pair_of(ROW)
    columns = {"role": ["user"], "content": ["p"], "tool_calls": [None]}
    assert message_list(columns) == (Message("user", "p"),)
    held = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    assert message_of(SAYS | {"tool_calls": [held]}).further() == {
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]
    }


def test_sides_that_differ_in_their_calls_alone_are_a_pair_and_equal_ones_are_none():
    def says(city):
        return [
            SAYS | {"content": None, "tool_calls": [{"function": {"name": "weather", "arguments": {"city": city}}}]}
        ]

    pair = pair_of({"prompt": "p", "chosen": says("Rome"), "rejected": says("Paris")})
    assert isinstance(pair.chosen, Answer)
    assert answer_turn(pair.chosen).further()["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    with pytest.raises(RowRejected) as caught:
        pair_of({"prompt": "p", "chosen": says("Rome"), "rejected": says("Rome")})
    assert caught.value.reason is Reason.IDENTICAL_SIDES
