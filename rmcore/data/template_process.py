"""The process in which chat templates are rendered, a program of its own that imports nothing of this package.

It gets (seconds, dialogues) and answers each dialogue with a JSON list of what came out, "text", "error" or "memory",
and the text. transformers renders, from its one module that does so: the package's own `__init__` takes four times as
long to import as all that a template needs.
"""

import importlib.util
import json
import pickle
import resource
import signal
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT_BYTES = 2**30
"""Limit of the memory that rendering takes; a rendered dialogue may have a sixteenth of it."""


def main(descriptor: int) -> None:
    """Render what the parent sends through `descriptor`.

    Raises:
        EOFError, ConnectionError: it is gone.
    """
    pipe = Connection(descriptor)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, within any operation
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    render = _renderer()
    if sys.platform == "linux":  # no other kernel holds a process to it
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + LIMIT_BYTES, has + LIMIT_BYTES))
    while True:
        seconds, dialogues = pickle.loads(pipe.recv_bytes())  # noqa: S301 - the parent's
        for template, messages, options in dialogues:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                [text], _ = render([messages], chat_template=template, **options)
                answer = json.dumps(["text", text] if len(text) <= LIMIT_BYTES // 16 else ["memory", ""])
            except MemoryError:
                answer = '["memory", ""]'
            except Exception as error:  # noqa: BLE001 - a template is a program, and fails as it likes
                answer = json.dumps(["error", str(error)])
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(answer.encode())


def _renderer() -> Callable[..., Any]:
    spec = importlib.util.find_spec("transformers")
    folder = Path(str(spec and spec.origin)).parent
    for name, place in {"transformers": folder, "transformers.utils": folder / "utils"}.items():
        package = types.ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


if __name__ == "__main__":
    with suppress(EOFError, ConnectionError):  # also while answers are under way
        main(int(sys.argv[1]))
