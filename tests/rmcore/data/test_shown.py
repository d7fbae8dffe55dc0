"""What a rendering shows of a dialogue is found in few renderings, however many parts it has."""

from rmcore.data.pair import Message, as_json
from rmcore.data.shown import Shown


def test_a_dialogue_of_many_calls_is_rendered_a_few_times():
    calls = [as_json({"tool_calls": [{"function": {"name": "f", "arguments": {"a": str(n)}}}]}) for n in range(50)]
    turns = tuple(turn for call in calls for turn in (Message("assistant", "", call), Message("tool", "5")))
    rendered = []

    def render(given):
        rendered.append(given)
        return "".join(turn.text for turn in given)

    Shown(render, "it").check(turns, render(turns))
    assert len(rendered) == 2
