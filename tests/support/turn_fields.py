"""Further fields of messages, for round trips of anything that holds turns."""

from hypothesis import strategies as st

from rmcore.data.pair import TOOLS, Message, as_json

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
FIELDS = st.just("") | st.fixed_dictionaries(
    {"tool_calls": st.just([{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}])},
    optional={"name": st.text("abé\U0001f600", min_size=1), "tool_call_id": st.just("c1")},
).map(as_json)
"""As `Message.fields`: most messages have none."""
TOOLS_TURN = Message(TOOLS, as_json([TOOL]))
