"""Chat templates as what they are: programs from a folder or the hub, which may compute for so long and no longer.

Their sandbox keeps them from files and the network, and does not keep them from looping. So one thread of the process
watches the threads that render, and raises an exception in one that has used `LIMIT_SECONDS` of processor time: of its
own, so that a busy machine or a suspended one ends no template. Python delivers such an exception between two of its
instructions, in any thread, where a signal would reach the main one alone. It cannot end a single operation that takes
for ever. The one such operation that needs little memory is a power, which no chat template needs: it is refused.
"""

import ctypes
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateSyntaxError

from rmcore.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_SECONDS = 10.0
"""Limit of the processor time for one dialogue; a long one takes milliseconds."""
LOOK_SECONDS = 0.25
ADVICE = "Restore the template from where the model was published, or train with use_chat_template=false."


def render_chat(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render messages by the tokenizer's chat template.

    Args:
        tokenizer: with a chat template.
        messages: mappings of role and content.
        options: of `apply_chat_template`.

    Raises:
        ModelError: the template computed for longer than `LIMIT_SECONDS`, or takes powers.
        Exception: whatever the template raises.
    """
    for template in _texts(tokenizer.chat_template):
        _refuse_powers(template)
    thread = threading.get_ident()
    try:
        try:
            _watch.begin(thread)
            return str(tokenizer.apply_chat_template(list(map(dict, messages)), tokenize=False, **options))
        finally:
            _watch.end(thread)
    except _OverTimeError:
        _watch.end(thread)  # where the exception came while it ended
        raise ModelError(
            f"the chat template of {tokenizer.name_or_path} has rendered one dialogue for {LIMIT_SECONDS:g} s of "
            f"processor time and was not done: it probably loops for ever. {ADVICE}"
        ) from None


def _texts(template: Any) -> list[str]:
    return [template] if isinstance(template, str) else list(template.values()) if isinstance(template, dict) else []


@lru_cache(maxsize=64)
def _refuse_powers(template: str) -> None:
    before = ""
    try:
        for _, kind, text in Environment(autoescape=True).lex(template):
            if (kind, text) == ("operator", "**") and before not in ("(", ","):  # there it hands arguments on
                raise ModelError(f"a chat template takes a power ({text}), which may compute for ever. {ADVICE}")
            if kind != "whitespace":
                before = text
    except TemplateSyntaxError:  # which rendering says better
        return


class _OverTimeError(BaseException):
    """Raised in a thread by the watch; no handler in a template's machinery takes it for an error of the template."""


class _Watch:
    """The threads that render, with their clocks; a thread of its own looks at them while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rendering: dict[int, tuple[int, float]] = {}  # thread: its clock, and that clock's time at the end
        self._raised: set[int] = set()
        self._is_watched = False

    def begin(self, thread: int) -> None:
        clock = time.pthread_getcpuclockid(thread) if hasattr(time, "pthread_getcpuclockid") else time.CLOCK_MONOTONIC
        with self._changed:
            self._rendering[thread] = clock, time.clock_gettime(clock) + LIMIT_SECONDS
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._look, name="chat-template-limit", daemon=True).start()
            elif len(self._rendering) == 1:
                self._changed.notify()

    def end(self, thread: int) -> None:
        with self._changed:
            # Only then: clearing none leaves Python 3.11's flag of one set, which slows it, and hangs a profiler.
            if self._rendering.pop(thread, None) is not None and thread in self._raised:
                self._raised.discard(thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)  # one that is still under way

    def _look(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rendering)
                for thread, (clock, end) in self._rendering.items():
                    if time.clock_gettime(clock) > end:
                        self._raised.add(thread)
                        error = ctypes.py_object(_OverTimeError)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
            time.sleep(LOOK_SECONDS)


def _renew_watch() -> None:
    global _watch  # noqa: PLW0603 - in a fork the thread is gone, and the lock may be held by it
    _watch = _Watch()


_watch = _Watch()
os.register_at_fork(after_in_child=_renew_watch)
