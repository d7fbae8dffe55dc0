"""What `rm-opt data check` shows of three rows is all that was understood of them, and nothing a terminal acts on."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.data.examples import SHOWN_BEGINNING, SHOWN_END, examples, format_examples
from rmcore.data.observation import Observation
from rmcore.data.pair import Message, is_blank
from rmcore.data.readers.sources import load_pairs

TEXT = st.text(min_size=1).filter(lambda text: not is_blank(text))


@given(st.lists(TEXT, min_size=1, max_size=9), TEXT)
@settings(max_examples=100, deadline=None)
def test_first_middle_and_last_are_shown_whole_or_cut_where_said(texts, suffix):
    said = [Observation(f"{number}{text}", (text, text + suffix), (2, 1)) for number, text in enumerate(texts)]
    found = examples(said)
    assert [one["number"] for one in found] == sorted({1, len(said) // 2 + 1, len(said)})
    for one in found:
        (role, prompt), (first, rejected), (second, _) = one["lines"]
        assert (role, first, second) == ("user", "→ rejected", "→ chosen")
        whole = said[one["number"] - 1].answers[0]
        if len(whole) <= SHOWN_BEGINNING + SHOWN_END and whole.isprintable():
            assert rejected == whole
        assert prompt.startswith(str(one["number"] - 1))
    assert all(line.isprintable() for line in format_examples(found, len(said)).split("\n"))


def test_turns_calls_and_judgements_are_named(tmp_path):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    row = {
        "tools": tools,
        "prompt": [{"role": "sys\x1b[31mtem", "content": "Be brief."}, {"role": "user", "content": "Oslo?"}],
        "chosen": [call],
        "rejected": [{"role": "assistant", "content": "Sunny\x1b[2J."}],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [pair] = load_pairs(str(tmp_path / "rows.jsonl")).pairs
    [shown] = examples([Observation.of_pair(pair)])
    labels = [label for label, _ in shown["lines"]]
    assert labels == ["tools", "sys\\x1b[31mtem", "user", "→ chosen", "→ rejected"]
    by_label = dict(shown["lines"])
    assert "weather" in by_label["tools"]
    assert "weather" in by_label["→ chosen"]
    assert by_label["→ rejected"] == "Sunny\\x1b[2J."


def test_rankings_ties_and_grades_have_their_judgement():
    prompt = (Message("user", "q"),)
    kinds = [
        Observation(prompt, ("a", "b", "c"), (1, 3, 2)),
        Observation(prompt, ("a", "b"), (1, 1)),
        Observation(prompt, ("a", "b"), None, grades={"helpful": (4.0, None), "safe": (0.5, 1.0)}),
    ]
    assert [[label for label, _ in one["lines"][1:]] for one in examples(kinds)] == [
        ["→ rank 1", "→ rank 3", "→ rank 2"],
        ["→ tied", "→ tied"],
        ["→ helpful 4, safe 0.5", "→ safe 1"],
    ]
