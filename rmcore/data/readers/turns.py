"""Turns of dialogues: messages as trainers and HTTP clients write them, transcripts, tools, system texts.

Every way in (files, the reward server, calls from Python) comes through here, so that one dialogue is one prompt
wherever it came from. All of a message is kept: its text, and what else it has for the chat template.
"""

import re
from collections.abc import Mapping
from typing import Any

from rmcore.data.pair import TOOLS, Answer, Message, Prompt, as_answer, as_json, plain_prompt
from rmcore.data.readers.fields import Reason, RowRejected, is_empty, json_or_text, json_ready, list_value, text_value

SYSTEM = "system"
ABOUT_A_MESSAGE = frozenset(
    (
        *("id", "message_id", "parent_id", "turn_id", "turn_identifier", "index", "openai_id", "request_id", "source"),
        *("timestamp", "created_at", "language", "country", "state", "hashed_ip", "header", "model", "metadata"),
        *("tokens", "token_count", "num_tokens", "score", "rating", "weight", "loss", "loss_weight", "train", "mask"),
        *("toxic", "redacted", "moderation", "openai_moderation", "detoxify_moderation"),
    )
)
"""Keys of a message that say something about it: no model reads them, and they are no part of a prompt."""
_MEDIA = {"image": Reason.IMAGES, "audio": Reason.AUDIO, "video": Reason.VIDEO}
_MEDIA_COLUMNS = tuple(f"{medium}{ending}" for medium in _MEDIA for ending in ("", "s"))
OF_THE_PROMPT = (SYSTEM, TOOLS, *_MEDIA_COLUMNS)
"""Columns that say more of a row's prompt; see `framed`."""
_WITHOUT_CONTENT = frozenset(("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"))
"""Fields of a turn that says no word. Any other field may be a misspelled `content`."""
_PART_TEXTS = ("text", "input_text", "output_text")
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_TURN_ROLES = {"Human": "user", "Assistant": "assistant"}


def dialogue_turns(text: str) -> tuple[Message, ...]:
    r"""The turns of `\n\nHuman: ...\n\nAssistant: ...`, oldest first, the last one the assistant's."""
    text = text.lstrip()
    marks = list(_TURN.finditer(text))
    if not marks or marks[0].start() != 0:
        raise RowRejected(Reason.NOT_A_DIALOGUE)
    if marks[-1][1] != "Assistant":
        raise RowRejected(Reason.NO_FINAL_ASSISTANT_TURN)
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return tuple(
        Message(_TURN_ROLES[mark[1]], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)
    )


def is_transcript(prompt: tuple[Message, ...]) -> bool:
    r"""Whether a prompt is one text `\n\nHuman: ...\n\nAssistant:`, perhaps with tools and system turns before it."""
    *before, asked = prompt or (Message(SYSTEM, ""),)
    text = asked.content.strip()
    is_asked = asked.role == "user" and not asked.fields and all(turn.role in (SYSTEM, TOOLS) for turn in before)
    return is_asked and text.startswith("Human:") and text.endswith("\n\nAssistant:")


def asked_turns(prompt: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns of a prompt that is a transcript (`is_transcript`); of any other the prompt as it is.

    As one text, each turn of a dialogue would begin a conversation of its own, on both sides of a split.
    """
    return (*prompt[:-1], *dialogue_turns(prompt[-1].content)[:-1]) if is_transcript(prompt) else prompt


def asked_prompt(text: str) -> Prompt:
    """The prompt that one text is: its turns where it is a transcript, else the text."""
    alone = (Message("user", text),)
    return plain_prompt(asked_turns(alone)) if is_transcript(alone) else text


def continued(prompt: tuple[Message, ...], completion: str) -> str:
    """A completion as it follows a prompt: behind a transcript's `Assistant:` the white space around it is not its own.

    `dialogue_turns` reads the turns of whole dialogues so.
    """
    return completion.strip() if is_transcript(prompt) and not isinstance(completion, Answer) else completion


def exchange(prompt: Prompt, completion: str) -> tuple[Prompt, str]:
    """A prompt and its completion, where the prompt is a transcript as turns."""
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    if not is_transcript(turns):
        return prompt, completion
    return plain_prompt(asked_turns(turns)), continued(turns, completion)


def message_list(value: Any) -> tuple[Message, ...]:
    """A list of messages, or one alone; also {role: [...], content: [...]}, as `datasets` stores structs."""
    value = turn_list(value)
    if isinstance(value, dict):
        columns = {"role": list_value(value.get("role")), "content": list_value(value.get("content"))}
        columns |= {name: list_value(column) for name, column in value.items() if column is not None}
        if len({len(column) for column in columns.values()}) > 1:
            raise RowRejected(Reason.WRONG_TYPE)
        value = [dict(zip(columns, turn, strict=True)) for turn in zip(*columns.values(), strict=True)]
    turns = tuple(map(message_of, list_value(value)))
    if any(turn.role == TOOLS and (place or tools_turn(turn.content) is None) for place, turn in enumerate(turns)):
        raise RowRejected(Reason.BAD_TOOLS)
    return turns


def message_of(turn: Any) -> Message:
    """One message: its role, its text, and all else that it has for a chat template.

    Raises:
        RowRejected: it is no message, or a part of it is no text; the reason names an image as such.
    """
    if not isinstance(turn, Mapping):
        raise RowRejected(Reason.WRONG_TYPE)
    role = text_value(turn.get("role"), Reason.WRONG_TYPE)
    others = {name: turn[name] for name in turn if name not in ("role", "content") and name not in ABOUT_A_MESSAGE}
    carried = others.pop("fields", None)  # as our own tables have them
    held = json_or_text(carried) if isinstance(carried, str) else carried
    others |= held if isinstance(held, dict) else {"fields": carried}
    further = {str(name): without_nulls(json_ready(value)) for name, value in others.items()}
    further = {name: value for name, value in further.items() if value not in (None, "", [], {})}
    for name in further:
        refuse_media(name)
    fields = as_json(further) if further else ""
    may_lack = role == "assistant" and not _WITHOUT_CONTENT.isdisjoint(further)
    return Message(role, _content(turn.get("content"), may_lack=may_lack), fields)


def _content(value: Any, *, may_lack: bool) -> str:
    """A message's text: one text, or a list of parts that are texts, which follow each other without a gap."""
    if isinstance(value, list):
        return "".join(map(_part, value))
    if value is None and may_lack:  # a call of a tool, without a word
        return ""
    return text_value(value, None)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return text_value(part, None)
    if not isinstance(part, Mapping):
        raise RowRejected(Reason.WRONG_TYPE)
    kind = part.get("type")
    for name in (str(kind or ""), *(name for name, value in part.items() if value not in (None, "", [], {}))):
        refuse_media(name)
    if (kind is None or kind in _PART_TEXTS) and part.get("text") is not None:
        return text_value(part["text"], None)
    raise RowRejected(Reason.NO_TEXT_PART)


def refuse_media(name: str) -> None:
    """Refuse what is called as images, audio or videos are: `image`, `images`, `image_url`, `input_audio`.

    Raises:
        RowRejected: it is called so.
    """
    for medium, reason in _MEDIA.items():
        if any(word in (medium, f"{medium}s") for word in name.lower().split("_")):
            raise RowRejected(reason)


def turn_list(value: Any) -> Any:
    """A list of one for a single message, what `messages` holds for an object of nothing else."""
    if isinstance(value, dict) and value.keys() == {"messages"} and isinstance(value["messages"], list | dict):
        value = value["messages"]
    return [value] if isinstance(value, dict) and isinstance(value.get("role"), str) else value


def framed(turns: tuple[Message, ...], row: Mapping[str, Any]) -> tuple[Message, ...]:
    """A prompt with what other columns of its row say of it: `system` is a system turn, `tools` what may be called.

    Raises:
        RowRejected: the row holds images, audio or videos, its tools are no list, or it has two system texts or tools.
    """
    for name in _MEDIA_COLUMNS:
        if name in row and not is_empty(row[name]):
            refuse_media(name)
    system = row.get(SYSTEM)
    if system is not None and text_value(system, None).strip():
        turns = _in_front(Message(SYSTEM, text_value(system, None)), turns, Reason.TWO_SYSTEM_TEXTS)
    tools = tools_turn(row.get(TOOLS))
    return turns if tools is None else _in_front(tools, turns, Reason.TWO_LISTS_OF_TOOLS)


def _in_front(turn: Message, turns: tuple[Message, ...], twice: Reason) -> tuple[Message, ...]:
    """The turns behind `turn`, which is there once where they begin with it already."""
    behind = 1 if turns[:1] and turns[0].role == TOOLS and turn.role != TOOLS else 0
    if turns[behind : behind + 1] == (turn,):
        return turns
    if turns[behind : behind + 1] and turns[behind].role == turn.role:
        raise RowRejected(twice)
    return (*turns[:behind], turn, *turns[behind:])


def tools_turn(value: Any) -> Message | None:
    """The turn of a list of tools, which may be JSON text; None where there are none.

    Raises:
        RowRejected: it is no list of objects.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    value = json_or_text(value) if isinstance(value, str) else value
    tools = without_nulls(json_ready([value] if isinstance(value, dict) and value else value))
    if tools is None or tools in ([], {}):
        return None
    if not isinstance(tools, list):
        raise RowRejected(Reason.BAD_TOOLS)
    tools = [json_or_text(tool) if isinstance(tool, str) else tool for tool in tools]
    if not all(isinstance(tool, dict) and tool for tool in tools):
        raise RowRejected(Reason.BAD_TOOLS)
    return Message(TOOLS, as_json(tools))


def without_nulls(value: Any) -> Any:
    """A JSON value without keys whose value is null.

    Arrow and Parquet store the keys of all rows in each, so null there means that a key is not given.
    """
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def answer_of(text: str, fields: Any) -> str:
    """A completion whose further fields stand in a column of their own, as our own tables have them."""
    held = json_or_text(fields) if isinstance(fields, str) and fields else None
    return as_answer(message_of({"role": "assistant", "content": text, "fields": fields})) if held else text
