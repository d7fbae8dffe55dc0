"""Counts what one reward server has done, for Prometheus: requests, rows, tokens, latency, versions, restarts."""

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from rmcore.serving.served import ServedModel

LATENCY_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, float("inf"))


class ServerMetrics:
    """Counts of what one server has done. Each has a registry of its own, so that several may live in one process."""

    def __init__(self, served: ServedModel) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("rm_requests", "Requests", ["path", "status"], registry=self._registry)
        self._seconds = Histogram(
            "rm_request_seconds", "Seconds of a request", ["path"], buckets=LATENCY_BOUNDS, registry=self._registry
        )
        self._rows = Counter("rm_rows", "Rows scored", registry=self._registry)
        self._tokens = Counter("rm_tokens", "Tokens read", registry=self._registry)
        for name, words, read in (
            ("rm_ready", "1 while requests are answered", lambda: float(served.is_ready)),
            ("rm_weight_version", "Version of the weights that are served", lambda: float(served.weights.version)),
            ("rm_engine_restarts", "Times that vLLM was started again", lambda: float(served.num_restarts)),
        ):
            Gauge(name, words, registry=self._registry).set_function(read)
        updates = Gauge("rm_weight_updates", "Updates of the weights by outcome", ["outcome"], registry=self._registry)
        for outcome in served.num_updates:
            updates.labels(outcome).set_function(partial(_count, served, outcome))

    def saw(self, path: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def scored(self, num_rows: int, num_tokens: int) -> None:
        """Count rows and tokens of one request."""
        self._rows.inc(num_rows)
        self._tokens.inc(num_tokens)

    def text(self) -> str:
        """All counters in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class Counting:
    """Counts answers of our routes. FastAPI's own form of a middleware would double what a small request costs."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request by `app`, and count it."""
        started = time.perf_counter()

        async def counted(event: Event) -> None:
            if event["type"] == "http.response.start" and "route" in scope:
                self.metrics.saw(scope["path"], event["status"], time.perf_counter() - started)
            await send(event)

        await self.app(scope, receive, counted)


def _count(served: ServedModel, outcome: str) -> float:
    return float(served.num_updates[outcome])
