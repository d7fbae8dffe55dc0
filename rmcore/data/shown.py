"""Checks that a rendering shows a whole dialogue: each turn, each field of a message and each tool is in the text.

A chat template reads what its author thought of. What it does not know it leaves out, without an error: the turns
before the last, an assistant's calls, the list of tools. Rewards would then not depend on them. Whether a part is
shown is proven by rendering the dialogue without it, or with another in its place: the text has to change. Dialogues of
agents have hundreds of parts, so all are first looked for in one rendering in which each has a word of its own.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.pair import TOOLS, Message, as_json, is_blank

Turns = tuple[Message, ...]
REFERENCES = frozenset(("tool_call_id", "name"))
"""Fields of a tool's turn that say which call it answers: templates that go by the order leave them out."""
CONTENT = "content"
"""Name of a turn's text among its parts; no field has that name."""
_TOOL_ROLES = ("tool", "function", "ipython", "observation")
_MOST_ORDERS = 4096
"""Orders of roles that are remembered; dialogues of agents have many."""


class Shown:
    """Checks that what was rendered of a dialogue shows all of it.

    Args:
        render: gives the text of a dialogue; may raise DataError.
        by: who renders, for messages.
        ask_turns: whether turns have to be shown, not only tools and fields of messages. Of a function that a user
            wrote for their own data it is taken that they know which turns it reads.
    """

    def __init__(self, render: Callable[[Turns], str], by: str, *, ask_turns: bool = True) -> None:
        self._render = render
        self._by = by
        self._ask_turns = ask_turns
        self._unshown: dict[tuple[str, ...], frozenset[int]] = {}

    def check(self, turns: Turns, text: str, *, answered: bool = True) -> None:
        """Check that a text shows all turns; an `answered` last one without fields is looked for by the caller.

        Raises:
            DataError: something is left out; the message names it.
        """
        lost = next(self._lost(turns, text, answered=answered), None)
        if lost is not None:
            raise DataError(
                f"{self._by} does not show {lost}, so a reward would not depend on it; take a template that does, or "
                "leave it out of the data where it does not matter."
            )

    def _lost(self, turns: Turns, text: str, *, answered: bool) -> Iterator[str]:
        has_more = any(turn.fields or turn.role == TOOLS for turn in turns)
        has_tools = turns[0].role == TOOLS
        unshown = frozenset() if has_more or not self._ask_turns else self._without(turns)
        proven = self._proven(turns) if has_more else frozenset()
        for place, turn in enumerate(turns):
            if turn.role == TOOLS:
                for what, other in _without_a_tool(turn):
                    if (place, what) not in proven and self._is_same(turns, place, other, text):
                        yield what
                continue
            named = f"turn {place + 1 - has_tools} of {len(turns) - has_tools} ({turn.role})"
            # An answer that is a text is looked for in what was rendered anyway.
            is_answer = answered and place == len(turns) - 1 and not turn.fields
            if self._ask_turns and not is_answer and not is_blank(turn.content):
                in_doubt = has_more or place in unshown or turn.content.strip() not in text
                in_doubt = in_doubt and (place, CONTENT) not in proven
                if in_doubt and self._is_same(turns, place, turn._replace(content=f"{turn.content}0"), text):
                    yield named
            for what, other in _without_a_field(turn):
                if (place, what) not in proven and self._is_same(turns, place, other, text):
                    yield f"{what} of {named}"

    def _proven(self, turns: Turns) -> frozenset[tuple[int, str]]:
        """Which parts are shown by one rendering of the turns with a word in each: (place of the turn, what)."""
        words: dict[tuple[int, str], list[str]] = {}
        nonce, number = secrets.token_hex(4), count()  # no data hold such words

        def word(place: int, what: str) -> str:
            made = f"word{nonce}n{next(number)}end"
            words.setdefault((place, what), []).append(made)
            return made

        try:
            text = self._render(tuple(_with_words(turn, partial(word, place)) for place, turn in enumerate(turns)))
        except DataError:  # the template looks at what has a word now
            return frozenset()
        return frozenset(part for part, made in words.items() if all(one in text for one in made))

    def _is_same(self, turns: Turns, place: int, other: Message | None, text: str) -> bool:
        """Whether the text stays as it is with another turn at that place, or none."""
        try:
            return self._render((*turns[:place], *(() if other is None else (other,)), *turns[place + 1 :])) == text
        except DataError:  # the template looks at it
            return False

    def _without(self, turns: Turns) -> frozenset[int]:
        """Which turns of dialogues of this order are not shown."""
        order = tuple(turn.role for turn in turns)
        found = self._unshown.get(order)
        if found is None:
            words = [f"word{place}end" for place in range(len(turns))]
            try:
                text = self._render(tuple(map(Message, order, words)))
                found = frozenset(place for place, word in enumerate(words) if word not in text)
            except DataError:
                found = frozenset(range(len(turns)))
            if len(self._unshown) >= _MOST_ORDERS:
                self._unshown.clear()
            self._unshown[order] = found
        return found


def _with_words(turn: Message, word: Callable[[str], str]) -> Message:
    """The turn with a word in each part that is a text or holds one; `word` makes it of the part's name."""
    if turn.role == TOOLS:
        tools = json.loads(turn.content)
        for (what, _), tool in zip(_without_a_tool(turn), tools, strict=True):
            _add_word(tool.get("function", tool), ("description", "name"), partial(word, what))
        return turn._replace(content=as_json(tools))
    fields = turn.further()
    calls = fields.get("tool_calls")
    for name in fields:
        _add_word(fields, (name,), partial(word, name))
    for place, call in enumerate(calls if isinstance(calls, list) else (), start=1):
        function = call.get("function", call) if isinstance(call, dict) else None
        for what in ("tool_calls", f"tool_calls ({place})"):
            _add_word(function, ("name",), partial(word, what))
        of_arguments = partial(word, f"the arguments of tool_calls ({place})")
        _add_word(function, ("arguments",), of_arguments)
        arguments = function.get("arguments") if isinstance(function, dict) else None
        _add_word(arguments, tuple(arguments) if isinstance(arguments, dict) else (), of_arguments)
    content = turn.content if is_blank(turn.content) else turn.content + word(CONTENT)
    return _with(turn._replace(content=content), fields)


def _add_word(values: Any, names: tuple[str, ...], word: Callable[[], str]) -> None:
    """Add a word to the first of these values that is a text."""
    found = next((name for name in names if isinstance(values, dict) and isinstance(values.get(name), str)), None)
    if found is not None:
        values[found] += word()


def _without_a_tool(turn: Message) -> Iterator[tuple[str, Message | None]]:
    """The turn of the tools without each of them."""
    tools = json.loads(turn.content)
    for place, tool in enumerate(tools):
        rest = tools[:place] + tools[place + 1 :]
        named = tool.get("function", tool) if isinstance(tool, dict) else tool
        name = named.get("name") if isinstance(named, dict) else None
        yield f"tools ({name or place + 1})", turn._replace(content=as_json(rest)) if rest else None


def _without_a_field(turn: Message) -> Iterator[tuple[str, Message]]:
    """The turn without each of its fields, and without each call of a list of them and what is called with."""
    fields = turn.further()
    for name, value in fields.items():
        if turn.role in _TOOL_ROLES and name in REFERENCES:
            continue
        yield name, _with(turn, {key: other for key, other in fields.items() if key != name})
        if name != "tool_calls" or not isinstance(value, list):
            continue
        for place, call in enumerate(value):
            if len(value) > 1:
                yield f"tool_calls ({place + 1})", _with(turn, fields | {name: value[:place] + value[place + 1 :]})
            emptied = _without_arguments(call)
            if emptied != call:
                others = fields | {name: [*value[:place], emptied, *value[place + 1 :]]}
                yield f"the arguments of tool_calls ({place + 1})", _with(turn, others)


def _with(turn: Message, fields: dict[str, Any]) -> Message:
    return turn._replace(fields=as_json(fields) if fields else "")


def _without_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if arguments in (None, "", "{}", {}):
        return call
    emptied = function | {"arguments": "{}" if isinstance(arguments, str) else {}}
    return call | {"function": emptied} if "function" in call else emptied
