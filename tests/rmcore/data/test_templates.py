"""What a chat template is given is the whole dialogue, and what it does not show of it is refused by name."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import DataError
from rmcore.data.pair import Message, PreferencePair, answer_turn, with_text_answers
from rmcore.data.rendering import DroppedPair, Renderer, Rendering
from rmcore.models.packing.layout import shared_prefix
from rmcore.models.tiny import tiny_tokenizer
from rmcore.policy.policy import TextReader
from source_sample import pair_of
from tests.support import chat_templates

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK = {"role": "user", "content": "Is it warm?"}


def call(city, *, as_text=False):
    arguments = {"city": city}
    function = {"name": "weather", "arguments": json.dumps(arguments) if as_text else arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call12345", "function": function}],
    }


RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "31 degrees"}


def agent(city="Oslo", *, tools=(TOOL,), **changes):
    """A row whose answer follows a call of a tool."""
    prompt = [ASK, call(city), RESULT]
    answers = {
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": [{"role": "assistant", "content": "No."}],
    }
    return {"prompt": prompt, **answers, "tools": list(tools), **changes}


def reader(template, format="chat", limit=4096):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    tokenizer.chat_template = template
    return Renderer(tokenizer, Rendering(format, limit))


def own_ids(tokenizer, row, side):
    """What transformers alone makes of the row."""
    messages = [*row["prompt"], *row[side]] if isinstance(row[side], list) else [*row["prompt"], answer(row[side])]
    messages = [one | {"content": one["content"] or ""} for one in messages]
    text = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def answer(text):
    return {"role": "assistant", "content": text}


DIALOGUES = {
    "a call in the context": agent(),
    "calls as the answers": {
        "prompt": [ASK], "chosen": [call("Rome") | {"content": None}], "rejected": [call("Paris") | {"content": None}],
        "tools": [TOOL],
    },
    "plain": {"prompt": [ASK, answer("Where?"), ASK], "chosen": "Yes.", "rejected": "No."},
    "a system turn": {
        "prompt": [{"role": "system", "content": "Be brief."}, ASK], "chosen": "Yes.", "rejected": "No.",
    },
}  # fmt: skip


@pytest.mark.parametrize("row", DIALOGUES.values(), ids=DIALOGUES)
@pytest.mark.parametrize("name", chat_templates.ALL)
def test_the_ids_of_both_sides_are_those_of_transformers_and_begin_alike(name, row):
    # Mistral's writes the system text before a last turn that is the user's alone
    if (name == "gemma" and "tools" in row) or (name == "mistral" and row["prompt"][0]["role"] == "system"):
        with pytest.raises(DataError, match=r"refuses|does not show"):
            reader(chat_templates.ALL[name]).tokenize_pairs([pair_of(row)])
        return
    renderer = reader(chat_templates.ALL[name])
    (pair,) = renderer.tokenize_pairs([pair_of(row)])
    both = pair.chosen.ids, pair.rejected.ids
    assert both == tuple(own_ids(renderer.tokenizer, row, side) for side in ("chosen", "rejected"))
    assert both[0] != both[1]
    prompt = renderer.tokenizer.apply_chat_template(row["prompt"], tools=row.get("tools"), tokenize=False)
    most = shared_prefix(*both)
    assert both[0][:most] == both[1][:most]
    if name != "mistral":  # it writes the tools before the last user turn, and the system text into it
        assert renderer.tokenizer.decode(both[0][:most]).startswith(
            prompt.removesuffix("<|return|>")[: len(prompt) // 2]
        )


@pytest.mark.parametrize("name", chat_templates.WITH_TOOLS)
@pytest.mark.parametrize(
    "other",
    [agent("Cairo"), agent(tools=[TOOL | {"function": TOOL["function"] | {"name": "forecast"}}])],
    ids=["another call", "another tool"],
)
def test_rows_that_differ_in_a_call_or_a_tool_alone_are_other_tokens(name, other):
    renderer = reader(chat_templates.WITH_TOOLS[name])
    first, second = renderer.tokenize_pairs([pair_of(agent()), pair_of(other)])
    assert first.chosen.ids != second.chosen.ids
    policy = TextReader(renderer.tokenizer)
    assert policy.prompt_ids(pair_of(agent()).prompt) != policy.prompt_ids(pair_of(other).prompt)


LOST = {
    "a call": (agent(tools=()), "tool_calls"),
    "tools": (agent(prompt=[ASK]), "tools"),
    "a thought": (
        agent(tools=(), prompt=[ASK, answer("No.") | {"reasoning_content": "Hm."}, ASK]),
        "reasoning_content",
    ),
    "a name": (agent(tools=(), prompt=[ASK | {"name": "Ada"}]), "name"),
    "a key that no one knows": (agent(tools=(), prompt=[ASK | {"mood": "cheerful"}]), "mood"),
    "calls of the answers": (DIALOGUES["calls as the answers"] | {"tools": None}, "tool_calls"),
}


@pytest.mark.parametrize(("row", "named"), LOST.values(), ids=LOST)
@pytest.mark.parametrize("format", ["chat", "plain"])
def test_what_a_rendering_does_not_show_is_set_aside_by_its_name(row, named, format):
    renderer = reader(chat_templates.NO_TOOLS, format)
    kept = PreferencePair("p", "a", "b")
    found = renderer.tokenize_readable([kept, pair_of(row)])
    assert found.pairs == [kept]
    (dropped,) = found.dropped
    assert f"does not show {named}" in dropped.reason
    if not answer_turn(pair_of(row).chosen).fields:
        renderer.tokenizer.chat_template = chat_templates.NO_TOOLS if format == "chat" else None
        with pytest.raises(DataError, match=f"does not show {named}"):
            TextReader(renderer.tokenizer).prompt_ids(pair_of(row).prompt)


def test_words_next_to_a_call_and_arguments_that_a_template_leaves_out_are_missed():
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    with pytest.raises(DataError, match="does not show the arguments of tool_calls"):
        reader(template).tokenize_pairs([pair_of(agent(tools=()))])
    row = DIALOGUES["calls as the answers"] | {"chosen": [call("Rome") | {"content": "Let me look."}]}
    reader(chat_templates.QWEN3).tokenize_pairs([pair_of(row)])
    with pytest.raises(DataError, match=r"does not show turn 2 of 2 \(assistant\)"):
        reader(chat_templates.LLAMA31).tokenize_pairs([pair_of(row)])


FAULTS = ("{{ messages.missing.deeper }}", "{{ 1 // 0 }}", "{{ raise_exception('no') }}", "{% for m in messages %}",
          "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__.__mro__ }}")  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_template_that_fails_in_any_way_refuses_its_own_dialogues_alone(fault):
    asks, rest = "{% if messages[0].content == 'q' %}", "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = f"{asks}{fault}{{% endif %}}{rest}" if not fault.endswith("messages %}") else fault
    one, other = PreferencePair("q", "a", "b"), PreferencePair("p", "a", "b")
    found = reader(template).try_pairs([one, other])
    assert isinstance(found[0], DroppedPair)
    assert "the chat template refuses a dialogue with the roles ['user']" in found[0].reason
    assert isinstance(found[1], DroppedPair) == (template == fault)


def dialogue(*contents):
    return tuple(Message("user" if place % 2 == 0 else "assistant", text) for place, text in enumerate(contents))


def test_a_template_of_one_turn_reads_one_turn_and_refuses_more():
    renderer = reader(chat_templates.ONE_TURN)
    one, many = PreferencePair("q", "a", "b"), PreferencePair(dialogue("q", "a", "b"), "c", "d")
    repeated = PreferencePair(dialogue("user", "a", "user"), "a", "b")  # each word is in what is rendered
    found = renderer.tokenize_readable([one, many, repeated])
    assert found.pairs == [one]
    assert ["does not show turn 2 of 4 (assistant)" in dropped.reason for dropped in found.dropped] == [True, True]


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["a", "user", "assistant", "1 < 2", "  b ", "<|im_end|>"]), min_size=1, max_size=5))
@pytest.mark.parametrize("template", [chat_templates.QWEN3, chat_templates.NO_TOOLS, chat_templates.HERMES])
def test_no_turn_is_missed_where_all_are_shown(template, contents):
    turns = dialogue(*contents)
    reader(template).tokenize_sides([(turns if len(turns) % 2 else turns[1:] or "a", "answer")])


def test_control_tokens_typed_into_a_call_stay_text():
    renderer = reader(chat_templates.QWEN3)
    (end,) = renderer.tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    typed, harmless = (renderer.tokenize_pairs([pair_of(agent(city))])[0] for city in ("<|im_end|>", "Oslo"))
    assert typed.chosen.ids.count(end) == harmless.chosen.ids.count(end)
    answers = [pair_of(DIALOGUES["calls as the answers"] | {"chosen": [call(city)]}) for city in ("<|im_end|>", "Rome")]
    typed, harmless = renderer.tokenize_pairs(answers)
    assert typed.chosen.ids.count(end) == harmless.chosen.ids.count(end)
    assert "<|im_end|>" in renderer.tokenizer.decode(typed.chosen.ids).split('"city": "')[1].split('"')[0]


def test_a_cut_call_is_said_and_keeps_its_closing():
    row = DIALOGUES["calls as the answers"] | {"chosen": [call("Rome " * 40)]}
    whole, cut = (reader(chat_templates.QWEN3, limit=limit).tokenize_pairs([pair_of(row)])[0] for limit in (4096, 120))
    assert whole.truncation == {"chosen": 0, "rejected": 0}
    assert cut.truncation["chosen"] == len(whole.chosen.ids) - 120
    assert cut.chosen.ids[-2:] == whole.chosen.ids[-2:]


def test_answers_that_are_calls_are_not_edited(capsys):
    calls, text = (pair_of(DIALOGUES[name]) for name in ("calls as the answers", "plain"))
    assert with_text_answers([calls, text], "edited") == [text]
    assert "answers of 1 of 2 pairs" in capsys.readouterr().err
    with pytest.raises(DataError, match="all 1 pairs"):
        with_text_answers([calls], "edited")
