"""Clients of a reward server: `AsyncRewardClient`, and the same for code without an event loop.

with RewardClient("http://127.0.0.1:8000", token=token) as client:
    client.wait_ready(timeout_s=60)
    answer = client.score([{"prompt": "2 + 2?", "response": "4"}])
    answer.rewards, answer.weight_version
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Self, TypeVar

from rmcore.core.errors import ServingError
from rmcore.serving.async_client import AsyncRewardClient, OverLength
from rmcore.serving.types import Health, ScoringResponse, VersionInfo, WeightUpdate

Result = TypeVar("Result")


class RewardClient:
    """`AsyncRewardClient` for code without an event loop: same arguments, methods and errors; a context manager.

    It owns an event loop in a thread of its own, so it may be called from several threads at once, and also from a
    notebook, where a loop runs already. A process that it was forked into needs a client of its own.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        max_concurrency: int = 8,
        batch_size: int = 32,
        attempts: int = 5,
        backoff_s: float = 0.1,
    ) -> None:
        self._client = AsyncRewardClient(
            address,
            token=token,
            timeout_s=timeout_s,
            max_concurrency=max_concurrency,
            batch_size=batch_size,
            attempts=attempts,
            backoff_s=backoff_s,
        )
        self._loop = asyncio.new_event_loop()
        # A daemon, so that a program which forgets to close its client can still end.
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-client", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return repr(self._client).removeprefix("Async")

    def score(
        self,
        inputs: Iterable[Any],
        *,
        normalize: bool = False,
        over_length: OverLength = "refuse",
        policy_version: int | None = None,
    ) -> ScoringResponse:
        """See `AsyncRewardClient.score`."""
        return self._run(
            self._client.score(inputs, normalize=normalize, over_length=over_length, policy_version=policy_version)
        )

    def health(self) -> Health:
        """See `AsyncRewardClient.health`."""
        return self._run(self._client.health())

    def version(self) -> VersionInfo:
        """See `AsyncRewardClient.version`."""
        return self._run(self._client.version())

    def wait_ready(self, timeout_s: float) -> Health:
        """See `AsyncRewardClient.wait_ready`."""
        return self._run(self._client.wait_ready(timeout_s))

    def publish(self, update: WeightUpdate, timeout_s: float = 600.0) -> VersionInfo:
        """See `AsyncRewardClient.publish`."""
        return self._run(self._client.publish(update, timeout_s))

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        if self._loop.is_closed():
            coroutine.close()
            raise ServingError(f"{self} was closed and sends nothing any more; make a new one.")
        task: asyncio.Task[Any] | None = None
        interrupted = False

        async def call() -> Result:
            nonlocal task
            task = asyncio.current_task()
            if interrupted:
                coroutine.close()
                raise CancelledError
            return await coroutine

        def cancel() -> None:
            if task is not None:
                task.cancel()

        try:
            # All of it inside: the loop's thread may be at work, and Ctrl-C arrive, before the future has a name here.
            return asyncio.run_coroutine_threadsafe(call(), self._loop).result()
        except CancelledError:
            raise ServingError(
                f"{self} was closed while a call waited for its answer; close it after the last."
            ) from None
        except BaseException:  # Ctrl-C too: nothing continues behind a call that has ended
            interrupted = True
            self._loop.call_soon_threadsafe(cancel)
            raise

    def close(self) -> None:
        """Close all connections and end the thread; calls that other threads wait for fail."""
        if self._loop.is_closed():
            return
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
