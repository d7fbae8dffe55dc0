"""Chat templates as what they are: programs from a folder or the hub, which may compute for so long and no longer.

Their sandbox keeps them from files and the network, and does not keep them from looping or from filling the memory. So
a process of its own renders them (`template_process`), one for each process that has templates. The kernel holds it to
`LIMIT_SECONDS` of processor time for a dialogue (of its own, so that a busy machine or a suspended one ends no
template) and, on Linux, to `LIMIT_BYTES` of memory, whatever the template does. It takes a quarter of a second to start
and a tenth of a millisecond a request. It is no fork: a fork keeps a second copy of whatever its parent changes later,
weights in training included, and may not continue where libraries have threads.
"""

import fcntl
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rmcore.core.errors import DataError, ModelError
from rmcore.data import template_process
from rmcore.data.pair import Message, Prompt, dialogue_records, plain_prompt, tools_of
from rmcore.data.shown import Turns
from rmcore.data.template_process import LIMIT_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_SECONDS = 10.0
"""Limit of the processor time for one dialogue; a long one takes milliseconds."""
WALL_SECONDS = 600.0
"""Limit of the time for one dialogue on the clock, for a process that does not compute and does not answer."""
ADVICE = "Restore the template from where the model was published, or train with use_chat_template=false."

Dialogue = tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""Messages as mappings of role and content, and options of `apply_chat_template`."""


def render_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render messages by the tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        messages: mappings of role and content.
        options: of `apply_chat_template`.

    Raises:
        ModelError: the template took more time or memory than it may.
        TemplateError: whatever the template raises, with its words.
    """
    [text] = render_chats(tokenizer, [(messages, options)])
    if isinstance(text, TemplateError):
        raise text
    return text


def render_chats(tokenizer: "PreTrainedTokenizerBase", dialogues: Iterable[Dialogue]) -> list[str | TemplateError]:
    """Render many dialogues, with what the template raises in the place of one that it refuses.

    Raises:
        ModelError: as `render_chat`.
    """
    given = [_program(tokenizer, list(messages), dict(options)) for messages, options in dialogues]
    try:
        texts = iter(_process.render([program for program in given if not isinstance(program, TemplateError)]))
        return [program if isinstance(program, TemplateError) else next(texts) for program in given]
    except (_OverTimeError, MemoryError, OSError) as error:
        what = {
            _OverTimeError: f"has rendered one dialogue for {LIMIT_SECONDS:g} s of processor time and was not done: it "
            "probably loops for ever, or computes with numbers that have no end",
            MemoryError: f"has taken more than {LIMIT_BYTES:,} bytes of memory to render one dialogue",
        }.get(type(error), f"could not be rendered in a process of its own ({error})")
        raise ModelError(f"the chat template of {tokenizer.name_or_path} {what}. {ADVICE}") from None


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
        ModelError: the template did not end; see `render_chat`.
    """
    [text] = _chat_texts(tokenizer, [(prompt, answer)], by)
    if isinstance(text, DataError):
        raise text
    return text


def chat_texts(tokenizer: "PreTrainedTokenizerBase", dialogues: Iterable[Turns]) -> list[str | DataError]:
    """Write dialogues that end with the answer as `chat_text` does, with the error in the place of a refused one."""
    given = [(plain_prompt(turns[:-1]), turns[-1]) for turns in dialogues]
    return _chat_texts(tokenizer, given, "the chat template")


def _chat_texts(
    tokenizer: "PreTrainedTokenizerBase", dialogues: Sequence[tuple[Prompt, Message | None]], by: str
) -> list[str | DataError]:
    found: dict[int, str | DataError] = {}
    asked: dict[int, Dialogue] = {}
    for place, (prompt, answer) in enumerate(dialogues):
        try:
            messages, tools = dialogue_records(prompt), tools_of(prompt)
        except DataError as error:
            found[place] = error
            continue
        turns = messages if answer is None else [*messages, answer.record()]
        asked[place] = turns, {"tools": tools, "add_generation_prompt": answer is None}
    for place, text in zip(asked, render_chats(tokenizer, asked.values()), strict=True):
        if isinstance(text, str):
            found[place] = text
            continue
        rendered, options = asked[place]
        ends_open = options["add_generation_prompt"]
        remedy = "drop such prompts" if ends_open else "train with use_chat_template=false, or drop such dialogues"
        roles = [message["role"] for message in rendered][: len(rendered) - (not ends_open)]
        named = f"{roles}{' and tools' if options['tools'] else ''}"
        found[place] = DataError(f"{by} refuses a dialogue with the roles {named} ({text}); {remedy}.")
    return [found[place] for place in range(len(dialogues))]


def _program(tokenizer: Any, messages: list[Mapping[str, Any]], options: dict[str, Any]) -> Any:
    """Return the template, the messages without what is None, and all other names, as `apply_chat_template` does."""
    if not messages:
        return TemplateError("a dialogue without messages has no text")
    try:
        template = tokenizer.get_chat_template(options.pop("chat_template", None), options.get("tools"))
    except ValueError as error:
        return TemplateError(str(error))
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return template, present, tokenizer.special_tokens_map | options


class _OverTimeError(Exception):
    """A template has used its time."""


class _Process:
    """A process that renders, one request after the other."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have none, as a fork, which starts its own: another thread may hold the lock of its parent's."""
        self._busy = threading.Lock()
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None

    def render(self, dialogues: Sequence[Any]) -> list[str | TemplateError]:
        """Render dialogues; a process that has ended meanwhile, or by the request before, is started again."""
        if not dialogues:
            return []
        with self._busy:
            if self._child is None or self._child[0].poll() is not None:
                self._child = self._started()
            child, pipe = self._child
            try:
                pipe.send_bytes(pickle.dumps((LIMIT_SECONDS, dialogues)))
                return [self._next(child, pipe) for _ in dialogues]
            except BaseException:  # answers that are under way belong to no other request
                pipe.close()
                child.kill()
                child.wait()
                raise

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        # Above the standard streams, which the parent may have closed. Signals to a whole job are for the parent, which
        # ends in its time: the child has them blocked from its first instruction on.
        descriptor = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        theirs.close()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", str(template_process.__file__), str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(descriptor)
        return child, Connection(ours.detach())

    def _next(self, child: subprocess.Popen[bytes], pipe: Connection) -> str | TemplateError:
        if not pipe.poll(WALL_SECONDS):
            raise OSError(f"it has not answered for {WALL_SECONDS:g} s")
        try:
            outcome, text = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            ended_by = child.wait()
            if ended_by == -signal.SIGPROF:
                raise _OverTimeError from None
            raise OSError(f"it ended with status {ended_by}") from None
        if outcome == "memory":
            raise MemoryError
        return str(text) if outcome == "text" else TemplateError(text)


_process = _Process()
os.register_at_fork(after_in_child=_process.forget)
