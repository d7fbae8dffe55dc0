"""Chat templates as what they are: programs from a folder or the hub, which may compute for so long and no longer.

Their sandbox keeps them from files and the network, and does not keep them from looping or from filling the memory. So
they are rendered in a process of their own, forked for each tokenizer, which the kernel holds to `LIMIT_SECONDS` of
processor time for a dialogue (of its own, so that a busy machine or a suspended one ends no template) and to
`LIMIT_BYTES` of memory, whatever the template does. It costs some milliseconds once, and a tenth of one per request.
A fork keeps all memory as it was, a second copy of whatever the parent changes later, weights in training included: so
it ends when it has had no work for `IDLE_SECONDS`, and the next dialogue has a new one.

Only Linux limits memory so, and only there may a process that has loaded such libraries continue after a fork. On macOS
dialogues are rendered in this process: a thread watches the threads that render, and raises an exception in one that
has used its time. Python delivers it between two of its instructions, so loops are ended, and a single operation that
takes for ever or all memory is not.
"""

import ctypes
import gc
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError

from rmcore.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_SECONDS = 10.0
"""Limit of the processor time for one dialogue; a long one takes milliseconds."""
LIMIT_BYTES = 2**30
"""Limit of the memory that rendering takes; a rendered dialogue may have a sixteenth of it."""
WALL_SECONDS = 600.0
"""Limit of the time for one dialogue on the clock, for a process that does not compute and does not answer."""
IDLE_SECONDS = 1.0
LOOK_SECONDS = 0.25
IN_PROCESS = sys.platform != "linux"
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
    given = [(list(map(dict, messages)), dict(options)) for messages, options in dialogues]
    name = tokenizer.name_or_path
    try:
        if IN_PROCESS:
            return [_rendered(tokenizer, *dialogue, limit=_watched) for dialogue in given]
        while True:
            texts = _child_of(tokenizer).render(given)
            if texts is not None:
                return texts
    except (_OverTimeError, MemoryError, OSError) as error:
        what = {
            _OverTimeError: f"has rendered one dialogue for {LIMIT_SECONDS:g} s of processor time and was not done: it "
            "probably loops for ever, or computes with numbers that have no end",
            MemoryError: f"has taken more than {LIMIT_BYTES:,} bytes of memory to render one dialogue",
        }.get(type(error), f"could not be rendered in a process of its own ({error})")
        raise ModelError(f"the chat template of {name} {what}. {ADVICE}") from None


def _rendered(tokenizer: Any, messages: Any, options: Any, limit: Callable[[], Any]) -> str | TemplateError:
    with limit():
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
            if len(text) > LIMIT_BYTES // 16:
                raise MemoryError
            return text
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program, and fails as it likes
            return TemplateError(str(error))


class _OverTimeError(BaseException):
    """A template has used its time; no handler in a template's machinery takes it for an error of the template."""


class _Child:
    """A process that renders by one tokenizer, as that is now."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.state = _state_of(tokenizer)
        self.owner = os.getpid()
        self.busy = threading.Lock()
        self._has_answered = False
        self._ended_by = 0
        self._pipe, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the other threads are not there, and nothing waits
            self._pid = os.fork()
        if self._pid == 0:
            _answer(tokenizer, theirs)
        theirs.close()

    def render(self, dialogues: Sequence[Any]) -> list[str | TemplateError] | None:
        """Render dialogues; None where the process is gone: after an exception, or ended while it had no work."""
        with self.busy:
            if self.is_gone:  # a dialogue of another thread has ended it
                return None
            try:
                self._pipe.send_bytes(pickle.dumps((LIMIT_SECONDS, dialogues)))
                texts = [self._next() for _ in dialogues]
                self._has_answered = True
                return texts
            except ConnectionError:
                ended_by = self._status()
                self.end()
                if self._has_answered or ended_by == 0:
                    return None
                raise OSError(f"it ended with status {ended_by}") from None
            except BaseException:
                self.end()
                raise

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._pipe.closed

    def _next(self) -> str | TemplateError:
        if not self._pipe.poll(WALL_SECONDS):
            raise OSError(f"it has not answered for {WALL_SECONDS:g} s")
        try:
            outcome, text = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            ended_by = self._status()
            if ended_by == 0:  # it had no work, and ended while this was sent
                raise ConnectionError from None
            if ended_by == -signal.SIGPROF:
                raise _OverTimeError from None
            raise OSError(f"it ended with status {ended_by}") from None
        if outcome == "memory":
            raise MemoryError
        return str(text) if outcome == "text" else TemplateError(text)

    def _status(self) -> int:
        """Wait for the process, which has closed its end of the pipe."""
        if self._pid:
            self._ended_by = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._pid = 0
        return self._ended_by

    def end(self) -> None:
        """End the process; in a fork of its owner, forget it."""
        self._pipe.close()
        if self._pid and self.owner == os.getpid():
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = 0


def _answer(tokenizer: "PreTrainedTokenizerBase", pipe: Connection) -> NoReturn:
    """Render what the parent sends until it is gone, within the limits."""
    try:
        gc.freeze()  # what the parent has is not collected here
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):  # both may go to the whole job, and the parent ends in its time
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, within any operation
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in {0, 1, 2} - {pipe.fileno()}:  # which is one of them where the parent had it closed
            os.dup2(nothing, descriptor)
        for name in os.listdir("/proc/self/fd"):  # locks and sockets of the parent, which would live as long as this
            if int(name) > 2 and int(name) != pipe.fileno():
                with suppress(OSError):  # the folder itself, which is closed by now
                    os.close(int(name))
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + LIMIT_BYTES, has + LIMIT_BYTES))
        while pipe.poll(IDLE_SECONDS):
            seconds, dialogues = pickle.loads(pipe.recv_bytes())  # noqa: S301 - the parent's
            for messages, options in dialogues:
                try:
                    text = _rendered(tokenizer, messages, options, limit=partial(_timed, seconds))
                    answer = json.dumps(["text", text] if isinstance(text, str) else ["error", str(text)]).encode()
                except MemoryError:
                    answer = b'["memory", ""]'
                pipe.send_bytes(answer)
        os._exit(0)
    except BaseException:  # noqa: S110, BLE001 - the parent has closed its end
        pass
    finally:
        os._exit(1)


@contextmanager
def _timed(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


_children: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, _Child]" = weakref.WeakKeyDictionary()
_forking = threading.Lock()


def _child_of(tokenizer: "PreTrainedTokenizerBase") -> _Child:
    with _forking:
        child = _children.get(tokenizer)
        if child is not None and child.state != _state_of(tokenizer):
            with child.busy:  # another thread waits for its answers: no descriptor that is waited for may be closed
                child.end()
        if child is None or child.is_gone:
            child = _children[tokenizer] = _Child(tokenizer)
            weakref.finalize(tokenizer, child.end)
        return child


def _state_of(tokenizer: "PreTrainedTokenizerBase") -> tuple[Any, ...]:
    """The properties of a tokenizer that a rendered dialogue depends on."""
    return tokenizer.chat_template, tokenizer.special_tokens_map


@contextmanager
def _watched() -> Iterator[None]:
    thread = threading.get_ident()
    try:
        try:
            _watch.begin(thread)
            yield
        finally:
            _watch.end(thread)
    except _OverTimeError:
        _watch.end(thread)  # where the exception came while it ended
        raise


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


def _renew() -> None:
    global _watch, _forking  # in a fork the other threads are gone, and locks may be held by them
    _watch, _forking = _Watch(), threading.Lock()
    for child in list(_children.values()):
        child.end()


_watch = _Watch()
os.register_at_fork(after_in_child=_renew)
