"""Dialogues as a tokenizer's chat template writes them, with their tools and all fields of their messages.

A template is a program from a folder or the hub. transformers runs it in jinja's sandbox, which keeps it from files and
the network and does not limit its time or memory.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rmcore.core.errors import DataError
from rmcore.data.pair import Message, Prompt, dialogue_records, tools_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render messages by the tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        messages: mappings of role and content; what is None in them is left out.
        options: of `apply_chat_template`.

    Raises:
        TemplateError: whatever the template raises, with its words.
    """
    if not messages:
        raise TemplateError("a dialogue without messages has no text")
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(present, tokenize=False, **options))
    except Exception as error:  # a template is a program, and fails as it likes
        raise TemplateError(str(error)) from error


def chat_text(
    tokenizer: "PreTrainedTokenizerBase", prompt: Prompt, answer: Message | None, by: str = "the chat template"
) -> str:
    """Write a dialogue by the chat template, with its tools and all fields of its messages.

    Args:
        tokenizer: with a template.
        prompt: the turns before the answer.
        answer: the assistant's turn; None ends the text where the answer is to begin.
        by: how an error names the template.

    Raises:
        DataError: the template refuses the dialogue, or its tools are no list.
    """
    asked, tools = dialogue_records(prompt), tools_of(prompt)
    turns = asked if answer is None else [*asked, answer.record()]
    try:
        return render_chat(tokenizer, turns, tools=tools, add_generation_prompt=answer is None)
    except TemplateError as error:
        remedy = "drop such prompts" if answer is None else "train with use_chat_template=false, or drop such dialogues"
        named = f"{[message['role'] for message in asked]}{' and tools' if tools else ''}"
        raise DataError(f"{by} refuses a dialogue with the roles {named} ({error}); {remedy}.") from error
