"""Random prompts, pairs and further fields of messages, for round trips of anything that holds turns."""

from hypothesis import strategies as st

from rmcore.data.pair import TOOLS, Message, PreferencePair, as_json, is_blank

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
FIELDS = st.just("") | st.fixed_dictionaries(
    {"tool_calls": st.just([{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}])},
    optional={"name": st.text("abé\U0001f600", min_size=1), "tool_call_id": st.just("c1")},
).map(as_json)
"""As `Message.fields`: most messages have none."""
TOOLS_TURN = Message(TOOLS, as_json([TOOL]))
TEXTS = st.text(min_size=1).filter(lambda text: not is_blank(text))
PROMPTS = TEXTS | st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant"]), TEXTS, FIELDS), min_size=2, max_size=4
).map(tuple)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_NAMES = st.sampled_from(["subset", "prompt_id", "margin", "role", "label", "metadata"]) | st.text()
METADATA = st.dictionaries(_NAMES, _JSON, max_size=3)
PAIRS = st.builds(
    lambda prompt, sides, margin, metadata, pair_id: PreferencePair(prompt, *sides, margin, metadata, pair_id),
    PROMPTS,
    st.tuples(TEXTS, TEXTS).filter(lambda two: two[0] != two[1]),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
    METADATA,
    st.text(),
)
"""Pairs of any text, of one turn or several, with what names of columns may be in their metadata."""
