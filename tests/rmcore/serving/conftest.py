"""The far side of the client's tests: a small HTTP server on loopback that speaks the wire types and can misbehave."""

import asyncio
import json
import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from rmcore.core.loop_thread import LoopThread
from rmcore.serving import client as client_module
from rmcore.serving.client import RewardClient

HANG, DROP_BEFORE, DROP_AFTER, DROP_HALFWAY = "hang", "drop before", "drop after", "drop halfway"
"""Never answer; end the connection before the work is done, after it, or within the answer."""


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    number: int
    path: str
    headers: dict[str, str]
    body: Any
    at_s: float

    @property
    def inputs(self) -> list[Any]:
        return self.body["inputs"]


class SmallServer:
    """Gives 1000 x version + the sum of an input's token ids, or of its characters' codes.

    `behave` says what goes wrong with a request: nothing (None), one of the words above, an event to wait for, or
    (status, body). `weights` says which (version, digest) answers it.
    """

    def __init__(self) -> None:
        self.token: str | None = None
        self.behave: Callable[[Seen], Any] = lambda seen: None
        self.weights: Callable[[Seen], tuple[int, str]] = lambda seen: (1, "d" * 64)
        self.seen: list[Seen] = []
        self.done: list[Seen] = []
        self.num_connections = self.num_open = self.peak = 0
        self.port = 0
        self._thread = LoopThread("small server")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @staticmethod
    def value(given: Any) -> float:
        if isinstance(given, dict):
            prompt = given["prompt"]
            parts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
            return SmallServer.value("".join(parts) + given["response"])
        return float(sum(map(ord, given)) if isinstance(given, str) else sum(given))

    def reward(self, given: Any, version: int = 1) -> float:
        return 1000.0 * version + self.value(given)

    def start(self) -> None:
        self._server = self._thread.run(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """As a killed server: the port is closed and every connection ends at once."""
        self._thread.run(self._end())

    def close(self) -> None:
        self._thread.close(self._end())

    async def _end(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client or the test ended it
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        seen = Seen(len(self.seen), path, headers, json.loads(body) if body else None, time.monotonic())
        self.seen.append(seen)
        self.num_open += 1
        self.peak = max(self.peak, self.num_open)
        try:
            return await self._answer(seen, self.behave(seen), writer)
        finally:
            self.num_open -= 1

    async def _answer(self, seen: Seen, behaviour: Any, writer: asyncio.StreamWriter) -> bool:
        if behaviour == HANG:
            await asyncio.Event().wait()
        if behaviour == DROP_BEFORE:
            return False
        if isinstance(behaviour, asyncio.Event):
            await behaviour.wait()
        status, body = behaviour if isinstance(behaviour, tuple) else self._right(seen)
        self.done.append(seen)
        if behaviour == DROP_AFTER:
            return False
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} Because\r\nContent-Length: {len(payload)}\r\n\r\n".encode())
        writer.write(payload[: len(payload) // 2] if behaviour == DROP_HALFWAY else payload)
        await writer.drain()
        return behaviour != DROP_HALFWAY

    def _right(self, seen: Seen) -> tuple[int, Any]:
        if self.token is not None and seen.headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"error": "unauthorized", "message": "the bearer token is missing or another one."}
        version, digest = self.weights(seen)
        served = {"weight_version": version, "checkpoint_digest": digest}
        if seen.path == "/health":
            return 200, self.health("ready")
        if seen.path == "/score":
            return 200, served | self._scores(seen, version)
        folders = {"checkpoint": "c", "weights_folder": "w", "layout_folder": "l"}
        return 200, served | folders | {"mode": "full", "dtype": "float32"}

    def _scores(self, seen: Seen, version: int) -> dict[str, Any]:
        rewards = [self.reward(given, version) for given in seen.inputs]
        if seen.body["normalize"]:
            rewards = [1 / (1 + math.exp(-reward / 1e4)) for reward in rewards]
        return {
            "rewards": rewards,
            "num_tokens": [len(given) for given in seen.inputs],
            "num_cut": [2 if seen.body["over_length"] == "cut" else 0 for _ in rewards],
            "normalized": seen.body["normalize"],
            "policy_version": seen.body["policy_version"],
        }

    @staticmethod
    def health(state: str, reason: str | None = None) -> dict[str, Any]:
        return {"ready": state == "ready", "state": state, "reason": reason, "weight_version": 1} | {
            "pooling": "last",
            "max_seq_len": 128,
            "format": "chat",
        }


@contextmanager
def _running():
    server = SmallServer()
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def running_server():
    """A context manager that gives a fresh server: for tests that draw examples."""
    return _running


@pytest.fixture
def server():
    with _running() as running:
        yield running


@pytest.fixture(scope="session")
def ask():
    """One call of a fresh client."""

    def call_once(address, call, **arguments):
        with RewardClient(address, **arguments) as client:
            return call(client)

    return call_once


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Between the tries of a client."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.001)
