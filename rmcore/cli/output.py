"""Standard output that outlives its reader: `rm-opt train … | head` trains to its end."""

import io
import os
import stat
import sys
from typing import Any


def outlive_readers() -> None:
    """Let this process write on where the reader of a pipe has gone, from now on: its work is worth more than the text.

    What is written then is lost, which is said once on standard error.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        try:
            descriptor = stream.fileno()
            mode = os.fstat(descriptor).st_mode
        except (AttributeError, OSError):  # there is none, or it is no file
            continue
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            stream.flush()
            buffer = io.BufferedWriter(_Outliving(descriptor, "wb", closefd=False))
            kept = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            setattr(sys, name, io.TextIOWrapper(buffer, **kept))


class _Outliving(io.FileIO):
    """A pipe that becomes the null device when its reader has gone, for the processes that are started later, too."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            if self.fileno() == 1:
                print("note: standard output is not read any more; the command continues without it.", file=sys.stderr)
            return len(data)
