"""What is behind the HTTP app where vLLM is not what a test is about: the same rewards, by PyTorch, in this process."""

import asyncio
import threading
from contextlib import contextmanager
from pathlib import Path

from rmcore.data.rendering import TokenizedSide
from rmcore.serving.http_app import HttpSettings, RewardApp
from rmcore.serving.parity import make_probe
from rmcore.serving.served import ServedModel, Weights
from rmcore.serving.server import _answer, _listen
from rmcore.serving.types import PoolingType, RewardModelTrainingMode
from rmcore.serving.vllm_process import EngineSettings


class TorchEngine:
    """Rewards of a reward model; it has no process that could end."""

    settings = EngineSettings(Path("none"), "float32", 128)

    def __init__(self, rm) -> None:
        self.rm = rm

    async def start(self, folder) -> None: ...

    async def stop(self) -> None: ...

    async def exited(self) -> int:
        return await asyncio.Event().wait()

    async def is_healthy(self) -> bool:
        return True

    async def scores(self, token_ids) -> list[float]:
        return self.rm.score_sides([TokenizedSide(list(ids), 0) for ids in token_ids]).tolist()


@contextmanager
def answering(make):
    """A real server on a real port for the app that `await make()` gives; the app, with its port as `port`."""
    loop, ready, listening = asyncio.new_event_loop(), threading.Event(), _listen("127.0.0.1", 0)
    made = {}

    async def run():
        app = await make()
        try:
            made["app"] = app
            app.port = listening.getsockname()[1]
            await _answer(app, listening, lambda address: ready.set())
        finally:
            await app.served.stop()

    task = loop.create_task(run())

    def work():
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            ready.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield made["app"]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def answering_with(rm, folder, **settings):
    """A server of `rm`, with the HTTP settings."""

    async def make():
        weights = Weights(1, folder, "0" * 64, RewardModelTrainingMode.FULL, make_probe(rm, bf16=False), rm.beta)
        served = ServedModel(TorchEngine(rm), weights, "out/best")
        await served.start()
        limits = HttpSettings(**settings)
        return RewardApp(served, rm.renderer, pooling=PoolingType.LAST, vocab_size=1024, settings=limits)

    return answering(make)
