"""A reward server from a checkpoint folder to an address: what `rm-opt serve` runs, and `RewardServer` for programs.

What serves is a copy of links in the weights folder, so the owner of the checkpoint may replace or delete it.
PyTorch first scores the sample that vLLM must then reproduce.

A `RewardServer` runs in a process of its own. The settings, a token among them, go down its standard input, where no
list of processes shows them. That pipe stays open for as long as the parent lives: its end tells it to stop, however
the parent ended.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch
import uvicorn
from pydantic import TypeAdapter

from rmcore.core import errors
from rmcore.core.errors import RmcoreError, ServingError
from rmcore.core.files import private_folder, try_exclusive
from rmcore.core.processes import tail
from rmcore.core.web import LOOPBACK
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.client import RewardClient
from rmcore.serving.door import BoundedProtocol, file_limits
from rmcore.serving.http_app import HttpSettings, RewardApp
from rmcore.serving.parity import make_probe
from rmcore.serving.served import ServedModel, Weights
from rmcore.serving.types import PoolingType, RewardModelTrainingMode
from rmcore.serving.updates import drop_left, stage_checkpoint
from rmcore.serving.vllm_process import EngineDtype, EngineSettings, VllmEngine, find_vllm
from rmcore.serving.weight_files import folder_digest

LOG_FILE = "vllm.log"
SERVER_LOCK = ".server"
"""Held in the weights folder by the one server that it belongs to. The kernel frees it when that dies."""
OWN_FOLDER = "rm-opt-weights"
STOPPING_SECONDS = 60.0
Keep = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class ServeSettings:
    """How a checkpoint is served.

    checkpoint: a folder that `BradleyTerryRM.from_pretrained` reads, adapters included.
    host, port: where; port 0 takes a free one.
    vllm: the Python of an environment with vLLM, or its `vllm`; None looks for one (`find_vllm`).
    dtype: what vLLM computes in.
    max_seq_len: tokens of an input; None: as recorded.
    render_fn: the rendering function of the checkpoint, as `module:function`, where it has one.
    weights_folder: where updates are published through, one server at a time, which drops what an earlier one left;
        None makes one that goes with the server.
    """

    checkpoint: str
    host: str = "127.0.0.1"
    port: int = 8100
    vllm: str | None = None
    dtype: EngineDtype = "float32"
    max_seq_len: int | None = None
    render_fn: str | None = None
    weights_folder: Path | None = None
    gpu_memory_share: float = 0.5
    start_timeout_s: float = 600.0
    http: HttpSettings = field(default_factory=HttpSettings)


SETTINGS: TypeAdapter[ServeSettings] = TypeAdapter(ServeSettings)


async def serve(
    settings: ServeSettings,
    announce: Callable[[str], None],
    until: Callable[[], Awaitable[object]] | None = None,
    keep: Keep = nullcontext,
) -> None:
    """Serve until SIGINT or SIGTERM, or until `until()` returns; then end everything that was started.

    Args:
        settings: what and where.
        announce: called once with the address, when the first request may come.
        until: another reason to stop.
        keep: is given the address once the server listens there, before `announce`, and is held until the end.

    Raises:
        ConfigError: no vLLM.
        ModelError: the checkpoint cannot be read.
        ServingError: the port is taken, the weights folder is another server's, vLLM did not start, or its rewards are
            not those of PyTorch.
    """
    program = find_vllm(settings.vllm)
    with contextlib.closing(_listen(settings.host, settings.port)) as listening, _weights_folder(settings) as folder:
        work = asyncio.ensure_future(_serve(settings, program, folder, listening, announce, keep))
        reasons = [work, *([] if until is None else [asyncio.ensure_future(until())])]
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        for reason in reasons:
            reason.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


async def _serve(
    settings: ServeSettings,
    program: Path,
    place: Path,
    listening: socket.socket,
    announce: Callable[[str], None],
    keep: Keep,
) -> None:
    rm = await asyncio.to_thread(
        BradleyTerryRM.from_pretrained,
        settings.checkpoint,
        device="cpu",  # vLLM takes the GPU
        max_seq_len=settings.max_seq_len,
        render_fn=settings.render_fn,
    )
    first = place / "served-000001"
    await asyncio.to_thread(_stage_first, rm, settings.checkpoint, first)
    engine = VllmEngine(
        EngineSettings(
            program,
            settings.dtype,
            rm.renderer.rendering.max_seq_len,
            settings.gpu_memory_share,
            eager=not torch.cuda.is_available(),
            start_timeout_s=settings.start_timeout_s,
        ),
        place / LOG_FILE,
    )
    probe = await asyncio.to_thread(make_probe, rm, bf16=settings.dtype == "bfloat16")
    digest = await asyncio.to_thread(folder_digest, first)
    weights = Weights(1, first, digest, RewardModelTrainingMode.FULL, probe, rm.beta)
    served = ServedModel(engine, weights, checkpoint=settings.checkpoint)
    http = replace(settings.http, names=(*settings.http.names, *_names(settings.host)))
    plain = rm.model.get_base_model() if rm.has_adapters else rm.model
    pooling = PoolingType.LAST if hasattr(plain, "score") else PoolingType.CLS
    app = RewardApp(served, rm.renderer, pooling=pooling, vocab_size=plain.config.vocab_size, settings=http)
    del rm, plain
    try:
        await served.start()
        await _answer(app, listening, announce, keep)
    finally:
        await served.stop()


def _stage_first(rm: BradleyTerryRM, checkpoint: str, folder: Path) -> None:
    """The folder to begin with: links to a plain checkpoint, or what an adapter or another trainer's head becomes."""
    if rm.has_adapters or rm.is_rewritten or not Path(checkpoint).is_dir():
        rm.save(folder)
    else:
        stage_checkpoint(Path(checkpoint), folder)


def _names(host: str) -> tuple[str, ...]:
    """Hosts that the listening address makes this server's; beyond loopback the machine's names, and all addresses."""
    return () if host in LOOPBACK else ("0.0.0.0", host, socket.gethostname(), socket.getfqdn())  # noqa: S104 - a name


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, which also ends vLLM."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _answer(
    app: RewardApp, listening: socket.socket, announce: Callable[[str], None], keep: Keep = nullcontext
) -> None:
    """Answer until cancelled, then let what is under way finish for some seconds."""
    connections, backlog = file_limits()
    server = _Server(
        uvicorn.Config(
            app.app(),
            http=BoundedProtocol,
            limit_concurrency=connections,
            backlog=backlog,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,  # longer than clients keep an idle connection; without login none is kept
            timeout_graceful_shutdown=5,
        )
    )
    address = _address(listening)
    with _as_taken(address):
        listening.listen()  # a client that hears of the address may ask at once
    answering = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        with keep(address):
            announce(address)
            await asyncio.shield(answering)
    finally:
        server.should_exit = True
        await answering


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, taken before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio switches Nagle's algorithm off only then, and it costs 40 ms an answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with _as_taken(f"{host}:{port}"):
            listening.bind((host, port))
    except ServingError:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def _as_taken(address: str) -> Iterator[None]:
    """Say that an address cannot be had: of ports that two have bound, the first that listens has it."""
    try:
        yield
    except OSError as error:
        raise ServingError(
            f"{address} cannot be used ({error.strerror}): another program has it, or this machine has no such "
            "address. Choose another with --port, or 0 for a free one."
        ) from error


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def _weights_folder(settings: ServeSettings) -> Iterator[Path]:
    """The folder that weights are published through, for this server alone; a named one without an earlier server's."""
    if settings.weights_folder is not None:
        place = settings.weights_folder.resolve()
        with try_exclusive(place / SERVER_LOCK) as is_ours:
            if not is_ours:
                raise ServingError(
                    f"another reward server publishes through {place} and would lose the weights that it serves: give "
                    "this one another folder with --weights-dir, or end that one."
                )
            drop_left(place)
            yield place
        return
    with private_folder(Path(tempfile.gettempdir()) / OWN_FOLDER) as place:
        yield place


class RewardServer:
    """A reward server as a context: it answers inside the block, and nothing of it is left after.

    Example:
        >>> with RewardServer(ServeSettings("checkpoints/best", port=0)) as server:  # doctest: +SKIP
        ...     server.client().score([{"prompt": "2 + 2?", "response": "4"}]).rewards

    Args:
        settings: what is served and where.
        log: file that the server's own messages, and what a rendering function prints, are appended to; None shows them
            on standard error.
    """

    def __init__(self, settings: ServeSettings, log: Path | None = None) -> None:
        self.settings = settings
        self.log = log
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it and wait until the first request may come.

        Raises:
            RmcoreError: as `serve`; a ServingError too where its process ended.
        """
        output = None if self.log is None else self.log.open("ab")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rmcore.serving.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
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
        said: dict[str, Any] = json.loads(line)
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
    def pid(self) -> int | None:
        """Process id of the HTTP app; vLLM runs below it. None where it does not run."""
        return None if self._process is None else self._process.pid

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
            process.kill()  # vLLM ends with it
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


async def _until_parent_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def main() -> int:
    """Serve with the settings from standard input until that is closed."""
    channel = _take_channel()  # a rendering function may print

    def say(**words: str) -> None:
        print(json.dumps(words), file=channel, flush=True)

    settings = SETTINGS.validate_json(sys.stdin.buffer.readline())
    try:
        asyncio.run(serve(settings, lambda address: say(address=address), until=_until_parent_ends))
    except RmcoreError as error:
        say(error=type(error).__name__, message=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
