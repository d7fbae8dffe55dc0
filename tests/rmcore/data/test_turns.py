"""One reader of messages for all ways in: nothing of a message is lost, and one dialogue is one prompt."""

import json
import math

import pytest

from rmcore.data.pair import Answer, Message, PreferencePair, answer_turn, tools_of
from rmcore.data.parts import SourceInParts
from rmcore.data.readers.fields import Reason, RowRejected
from rmcore.data.readers.layouts import recognise
from rmcore.data.readers.sources import load_pairs
from rmcore.data.readers.turns import message_list, message_of
from rmcore.data.rendering import Renderer, Rendering
from rmcore.ensembles.score import score_pairs_table, score_readable_responses
from rmcore.models.tiny import tiny_tokenizer

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


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair_of(row):
    layout = recognise(row)
    (pair,) = layout.parse(layout.columns.rename(row)).pairs
    return pair


@pytest.mark.parametrize("turn", [{"conten": "Apple"}, {"name": "Eve"}, {"content": None, "weight": 1}])
def test_a_turn_without_content_is_an_answer_only_if_it_calls_or_reasons(turn):
    with pytest.raises(RowRejected):
        message_of({"role": "assistant", **turn})
    assert message_of({"role": "assistant", "reasoning_content": "Hm.", **turn}).further()["reasoning_content"] == "Hm."


@pytest.mark.parametrize("row", WAYS.values(), ids=WAYS)
def test_one_dialogue_is_one_prompt_and_one_reward_in_pairs_rows_and_calls(tmp_path, rm, row):
    pairs = load_pairs(
        written(tmp_path / "pairs.jsonl", {"prompt": row["prompt"], "chosen": row["response"], "rejected": "Stone"})
    ).pairs
    [part] = SourceInParts(str(written(tmp_path / "rows.jsonl", row)), 10)
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
SAID = {"role": "system", "content": "Be brief."}
MEDIA = {
    "an image part": ([{"type": "image", "image": "x.png"}], Reason.IMAGES),
    "an image by its address": ([{"type": "image_url", "image_url": {"url": "x"}}], Reason.IMAGES),
    "an image without a type": ([{"image": "x.png"}, {"text": "q"}], Reason.IMAGES),
    "audio": ([{"type": "input_audio", "input_audio": {"data": "x"}}], Reason.AUDIO),
    "a video": ([{"type": "video", "video": "x"}], Reason.VIDEO),
    "a file": ([{"type": "file", "file": {"file_id": "x"}}], Reason.NO_TEXT_PART),
}
REFUSED = {
    **{name: ({"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "q"}]}]}, reason)
       for name, (parts, reason) in MEDIA.items()},
    "two system texts": ({"prompt": [SAID, {"role": "user", "content": "p"}], "system": "Be long."},
                         Reason.TWO_SYSTEM_TEXTS),
    **{f"tools, {at}": ({"tools": tools}, Reason.BAD_TOOLS) for at, tools in enumerate(("w", ["w"], [[]], 5))},
    "tools behind a turn": ({"prompt": [TURNS[0], {"role": "tools", "content": "[]"}]}, Reason.BAD_TOOLS),
    "a turn of no tools": ({"prompt": [{"role": "tools", "content": " "}]}, Reason.BAD_TOOLS),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_a_prompt_cannot_be_is_refused_with_its_reason(tmp_path, changes, reason):
    with pytest.raises(RowRejected) as caught:
        pair_of(ROW | changes)
    assert caught.value.reason is reason
    if reason in {of for _, of in MEDIA.values()}:  # where responses are scored, too
        row = {"prompt": changes["prompt"], "response": "a"}
        source = SourceInParts(written(tmp_path / "rows.jsonl", row, WAYS["turns"]), size=8)
        assert sum(len(part) for part in source) == source.num_unusable == 1
        assert any(str(reason) in sentence for sentence in source.notices)


@pytest.mark.parametrize("name", ["image", "images", "audio", "videos"])
def test_a_column_of_media_is_refused_where_it_holds_some(name):
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    for none in ([], "", " ", "[]", "null", False, 0):  # CSV has nothing but text, and a flag is no picture
        assert pair_of(row | {name: none}).pair_id == pair_of(row).pair_id
    with pytest.raises(RowRejected, match="holds"):
        pair_of(row | {name: ["x.png"]})


SIDES = ("chosen", "rejected")
LAYOUTS = {
    "pairs": ROW,
    "message lists": {name: [{"role": "user", "content": "p"}, SAYS | {"content": ROW[name]}] for name in SIDES},
    "dialogues": {name: f"\n\nHuman: p\n\nAssistant: {ROW[name]}" for name in SIDES},
    "SHP": {"history": "p", "human_ref_A": "a", "human_ref_B": "b", "labels": 1},
    "ranked": {"prompt": "p", "responses": ["a", "b"], "ranks": [1, 2]},
    "a winner": {"prompt": "p", "response_a": "a", "response_b": "b", "winner": "a"},
}  # fmt: skip


@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS)
def test_a_system_column_is_a_system_turn_and_tools_are_kept_in_every_layout(tmp_path, row):
    with_nan = row | dict.fromkeys(("system", "tools", "images"), math.nan)  # as pandas writes that there are none
    assert load_pairs(written(tmp_path / "rows.jsonl", with_nan)).pairs == [pair_of(row)]
    plain, framed = pair_of(row), pair_of(row | {"system": "Be brief.", "tools": json.dumps([{"name": "weather"}])})
    assert plain.prompt == "p"
    assert framed.prompt[1:] == (Message("system", "Be brief."), Message("user", "p"))
    assert tools_of(framed.prompt) == [{"name": "weather"}]
    assert (framed.chosen, framed.rejected, framed.metadata) == (plain.chosen, plain.rejected, plain.metadata)
    assert len({plain.pair_id, framed.pair_id, pair_of(row | {"system": "Be brief."}).pair_id}) == 3
    assert pair_of(row | {"system": None, "tools": []}).pair_id == plain.pair_id


def test_a_side_a_row_keeps_system_and_tools(tmp_path):
    rows = [
        {"pair_id": "1", "role": role, "prompt": "p", "response": role, "system": "Be brief.", "tools": [{"name": "w"}]}
        for role in ("chosen", "rejected")
    ]
    (pair,) = load_pairs(written(tmp_path / "sides.jsonl", *rows)).pairs
    assert [turn.role for turn in pair.prompt] == ["tools", "system", "user"]
    rows[1]["system"] = "Be long."
    rows += [row | {"pair_id": "2", "system": None} for row in rows]
    loaded = load_pairs(written(tmp_path / "differ.jsonl", *rows))
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


def test_what_has_no_fields_has_the_ids_and_tokens_that_it_always_had():
    pair = PreferencePair((Message("system", "s"), Message("user", "p"), Message("assistant", "a")), "c", "d")
    assert (pair.pair_id, pair.prompt_id) == ("7acafedca65e40df", "148de9c5a7a44d19")
    (side,) = Renderer(tiny_tokenizer(), Rendering("plain", 64)).tokenize_sides([("p", "c")])
    assert tiny_tokenizer().decode(side.ids).startswith("Prompt: p\n\nResponse: c")
