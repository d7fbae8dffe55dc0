"""A reward server from a checkpoint folder to an address: what `rm-opt serve` runs.

What serves is a copy of links in the weights folder, so the owner of the checkpoint may replace or delete it.
PyTorch first scores the sample that vLLM must then reproduce.
"""

import asyncio
import contextlib
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import uvicorn

from rmcore.core.errors import ServingError
from rmcore.core.files import try_exclusive
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.door import BoundedProtocol, file_limits
from rmcore.serving.engine import VllmEngine
from rmcore.serving.folders import drop_stale
from rmcore.serving.http_app import HttpSettings, RewardApp
from rmcore.serving.model_files import folder_digest
from rmcore.serving.parity import make_probe
from rmcore.serving.served import ServedModel, Weights
from rmcore.serving.staging import stage_checkpoint
from rmcore.serving.types import PoolingType, RewardModelTrainingMode
from rmcore.serving.vllm_process import EngineDtype, EngineSettings, find_vllm

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LOG_FILE = "vllm.log"
SERVER_LOCK = ".server"
"""Held in the weights folder by the one server that it belongs to. The kernel frees it when that dies."""
MERGED = ".merged"
"""Where adapters are merged for a moment, before the result is staged."""


@dataclass(frozen=True)
class ServeSettings:
    """How a checkpoint is served.

    checkpoint: a folder that `BradleyTerryRM.from_pretrained` reads, adapters included.
    host, port: where; port 0 takes a free one.
    vllm: the Python of an environment with vLLM, or a `vllm` executable; None looks for one (`find_vllm`).
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


async def serve(
    settings: ServeSettings, announce: Callable[[str], None], until: Callable[[], Awaitable[object]] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, or until `until()` returns; then end everything that was started.

    Args:
        settings: what and where.
        announce: called once with the address, when the first request may come.
        until: another reason to stop.

    Raises:
        ConfigError: no vLLM.
        ModelError: the checkpoint cannot be read.
        ServingError: the port is taken, the weights folder is another server's, vLLM did not start, or its rewards are
            not those of PyTorch.
    """
    program = find_vllm(settings.vllm)
    with contextlib.closing(_listen(settings.host, settings.port)) as listening, _weights_folder(settings) as folder:
        work = asyncio.ensure_future(_serve(settings, program, folder, listening, announce))
        reasons = [work, *([] if until is None else [asyncio.ensure_future(until())])]
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        for reason in reasons:
            reason.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


async def _serve(
    settings: ServeSettings, program: Path, folder: Path, listening: socket.socket, announce: Callable[[str], None]
) -> None:
    async with _open(settings, program, folder) as app:
        await _answer(app, listening, announce)


@contextlib.asynccontextmanager
async def _open(settings: ServeSettings, program: Path, place: Path) -> AsyncIterator[RewardApp]:
    """The HTTP app of a model that answers; inside the block it may die and come back."""
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
    app = _http_app(served, rm, http)
    del rm
    try:
        await served.start()
        yield app
    finally:
        await served.stop()


def _stage_first(rm: BradleyTerryRM, checkpoint: str, folder: Path) -> None:
    """The folder to begin with: links to a plain checkpoint, or what an adapter or another trainer's head becomes."""
    if rm.has_adapters or rm.is_rewritten or not Path(checkpoint).is_dir():
        merged = folder.with_name(MERGED)
        rm.save(merged)
        stage_checkpoint(merged, folder)
        shutil.rmtree(merged)
        return
    stage_checkpoint(Path(checkpoint), folder)


def _http_app(served: ServedModel, rm: BradleyTerryRM, settings: HttpSettings) -> RewardApp:
    plain = rm.model.get_base_model() if rm.has_adapters else rm.model
    pooling = PoolingType.LAST if hasattr(plain, "score") else PoolingType.CLS
    size = plain.config.vocab_size
    return RewardApp(served, rm.renderer, pooling=pooling, vocab_size=size, settings=settings)


def _names(host: str) -> tuple[str, ...]:
    """Hosts that the listening address makes this server's; beyond loopback the machine's names, and all addresses."""
    return () if host in LOOPBACK else ("0.0.0.0", host, socket.gethostname(), socket.getfqdn())  # noqa: S104 - a name


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, which also ends vLLM."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _answer(app: RewardApp, listening: socket.socket, announce: Callable[[str], None]) -> None:
    """Answer until cancelled, then let what is under way finish for some seconds."""
    limits = file_limits()
    server = _Server(
        uvicorn.Config(
            app.app(),
            http=BoundedProtocol,
            limit_concurrency=limits.connections,
            backlog=limits.backlog,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,  # longer than clients keep an idle connection; without login none is kept
            timeout_graceful_shutdown=5,
        )
    )
    answering = asyncio.ensure_future(server.serve(sockets=[listening]))
    host, port = listening.getsockname()[:2]
    listening.listen()  # a client that hears of the address may ask at once
    announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    try:
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
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ServingError(
            f"{host}:{port} cannot be used ({error.strerror}): another program has it, or this machine has no such "
            "address. Choose another with --port, or 0 for a free one."
        ) from error
    return listening


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
            drop_stale(place, keep=[])
            shutil.rmtree(place / MERGED, ignore_errors=True)
            yield place
        return
    with tempfile.TemporaryDirectory(prefix="rm-opt-weights-") as folder:
        yield Path(folder)
