"""A reward server in a process of its own: `RewardServer` for programs, `python -m rmcore.serving.process` below it.

The settings, a token among them, go down the child's standard input, where no list of processes shows them. That pipe
stays open for as long as the parent lives: its end tells the child to stop, however the parent ended.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from pydantic import TypeAdapter

from rmcore.core import errors
from rmcore.core.errors import RmcoreError, ServingError
from rmcore.core.processes import tail
from rmcore.serving.client import RewardClient
from rmcore.serving.server import ServeSettings, serve

SETTINGS: TypeAdapter[ServeSettings] = TypeAdapter(ServeSettings)
DELIBERATE_ERROR = 3
STOPPING_SECONDS = 60.0


class RewardServer:
    """A reward server as a context: it answers inside the block, and nothing of it is left after.

    Example:
        >>> with RewardServer(ServeSettings("checkpoints/best", port=0)) as server:  # doctest: +SKIP
        ...     server.client().score([{"prompt": "2 + 2?", "response": "4"}]).rewards

    Args:
        settings: what is served and where.
        log: file that the server's own messages, and what a rendering function prints, are appended to; None shows them
            on standard error.
        environment: variables that it has in addition to this process's own.
    """

    def __init__(
        self, settings: ServeSettings, log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.settings = settings
        self.log = log
        self._environment = dict(environment or {})
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until the first request may come.

        Raises:
            RmcoreError: as `rmcore.serving.server.serve`.
            ServingError: its process ended, or said something else than its address.
        """
        output = None if self.log is None else self.log.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rmcore.serving.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl-C is for the parent, which then closes the pipe
            )
        finally:
            if output is not None:
                output.close()
        try:
            self.address = self._begin(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def _begin(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdin is not None  # noqa: S101 - requested above
        assert process.stdout is not None  # noqa: S101 - requested above
        process.stdin.write(SETTINGS.dump_json(self.settings) + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            shown = "" if self.log is None else f" {tail(self.log)}"
            raise ServingError(f"the reward server ended before it was ready.{shown}")
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise ServingError(
                f"the reward server's process began with {line[:200].decode(errors='replace')!r} in place of its "
                "address: something prints before any code of ours runs, such as a sitecustomize module. Keep it quiet."
            ) from error
        if "error" in said:
            raise getattr(errors, said["error"], ServingError)(said["message"])
        return str(said["address"])

    def client(self, **settings: Any) -> RewardClient:
        """A client with this server's address and token; see RewardClient for the settings."""
        return RewardClient(self.address, token=self.token, **settings)

    @property
    def token(self) -> str:
        """The bearer token of its clients."""
        return self.settings.http.token

    @property
    def pid(self) -> int:
        """Process id of the HTTP app; vLLM runs below it."""
        if self._process is None:
            raise ServingError("the reward server is not running.")
        return self._process.pid

    def stop(self) -> None:
        """End it; nothing where it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None  # noqa: S101 - requested above
        process.stdin.close()
        try:
            process.wait(STOPPING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its supervisor ends vLLM
            process.wait()
        assert process.stdout is not None  # noqa: S101 - requested above
        process.stdout.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _take_channel() -> TextIO:
    """Give the one way to the parent, by a number that nobody else knows; whatever is printed from now on is logged."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # for what is printed by C code
    sys.stdout = sys.stderr  # at once, and not when a block of it is full
    return channel


def _say(channel: TextIO, **words: str) -> None:
    print(json.dumps(words), file=channel, flush=True)


async def _until_parent_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def main() -> int:
    """Serve with the settings from standard input until that is closed."""
    channel = _take_channel()  # a rendering function may print
    settings = SETTINGS.validate_json(sys.stdin.buffer.readline())
    try:
        asyncio.run(serve(settings, lambda address: _say(channel, address=address), until=_until_parent_ends))
    except RmcoreError as error:
        _say(channel, error=type(error).__name__, message=str(error))
        return DELIBERATE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
