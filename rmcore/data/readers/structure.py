"""Values of a row in one form, whichever format and program they come from.

- Text that holds messages as JSON is parsed; CSV has nothing else, and other formats often hold it, too.
- Turns `{from, value}` (ShareGPT) become `{role, content}`.
- Roles are in small letters: a chat template knows no `User`.
- NaN is no value of a column that a row may lack: pandas has it for a missing text, and JSON of its rows keeps it.
"""

import re
from typing import Any

from rmcore.data.readers.columns import ALPACA_COLUMNS, LIST_COLUMNS, spelling
from rmcore.data.readers.fields import UnreadText, is_missing, json_or_unread
from rmcore.data.readers.turns import OF_THE_PROMPT

_MAY_LACK = frozenset((*OF_THE_PROMPT, *ALPACA_COLUMNS))
_LIST_SPELLINGS = frozenset(map(spelling, LIST_COLUMNS))
_LIST = re.compile(r"\s*\[")
_MESSAGES = re.compile(r"\s*(\[\s*)?\{")
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool", "function")}
_ROLES |= {"human": "user", "gpt": "assistant", "observation": "tool"}

_SPEAKS = re.compile(r"""[{,]\s*['"](role|from)['"]\s*:\s*['"]""")
_SAYS = re.compile(r"""[{,]\s*['"](content|value|tool_calls|function_call)['"]\s*:""")
_KNOWN_SPEAKS = re.compile(rf"""{_SPEAKS.pattern}({"|".join(_ROLES)})['"]""", re.IGNORECASE)
"""A message says something, or has a role that is known: an answer of code may be `[{'from': 'A', 'to': 'B'}]`."""


def structured(name: str, value: Any) -> Any:
    """The value of a column.

    Text of another kind stays text even where it would parse: an answer may well be `[1, 2]`. Messages that are not
    JSON (Python's own notation, say) are an `UnreadText`, which no layout takes for an answer.

    Raises:
        RepeatedKeyError: an object in the text names a key twice.
    """
    if name in _MAY_LACK and isinstance(value, float) and is_missing(value):
        return None
    if spelling(name) in _LIST_SPELLINGS:
        if isinstance(value, str) and _LIST.match(value):
            value = json_or_unread(value)
        return [_turns(_messages(item)) for item in value] if isinstance(value, list) else value
    if isinstance(value, str) and not _MESSAGES.match(value):
        return value
    return _turns(_messages(value))


def _messages(value: Any) -> Any:
    if not isinstance(value, str) or not _MESSAGES.match(value):
        return value
    if not _SPEAKS.search(value) or not (_SAYS.search(value) or _KNOWN_SPEAKS.search(value)):
        return value
    parsed = json_or_unread(value)
    if isinstance(parsed, UnreadText):
        return parsed
    if isinstance(parsed, dict):  # an object that has a role among other things is as likely an answer
        return parsed if set(parsed) in ({"role", "content"}, {"from", "value"}) else value
    is_turn = [isinstance(turn, dict) and ("role" in turn or {"from", "value"} <= turn.keys()) for turn in parsed]
    return parsed if all(is_turn) else value


def _turns(value: Any) -> Any:
    """A message, or a list of them, with the usual keys and roles; anything else as it is."""
    if isinstance(value, list):
        return [_turns(turn) for turn in value] if value and isinstance(value[0], dict | list) else value
    if not isinstance(value, dict):
        return value
    if value.keys() == {"messages"}:
        return {"messages": _turns(value["messages"])}
    if {"from", "value"} <= value.keys():
        role = _role(value["from"])
        if not isinstance(role, list) and role not in _ROLES.values():
            return value  # no turn, or one of an unknown speaker, which no layout takes for a message
        others = {name: item for name, item in value.items() if name not in ("from", "value")}
        return {"role": role, "content": value["value"], **others}
    return {**value, "role": _role(value["role"])} if "role" in value else value


def _role(role: Any) -> Any:
    """A role by the name that chat templates know it by; `datasets` may store those of all turns as one list."""
    if isinstance(role, list):
        return [_role(one) for one in role]
    return _ROLES.get(role.strip().lower(), role) if isinstance(role, str) else role
