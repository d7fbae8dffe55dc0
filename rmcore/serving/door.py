"""The door of a reward server: who may ask, before anything of a request is understood.

headers   whole within HEADER_SECONDS, or the connection is closed (`BoundedProtocol`)
Host      an address of this server by a name that it has; Origin: none, or that same address (`Door`)
login     before a byte of the body is read (`rmcore.serving.http_app`)

What a refused client still sends is thrown away by uvicorn, so that the client reads why.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Collection
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rmcore.core.errors import RmcoreError
from rmcore.core.web import misaddressed
from rmcore.serving.types import Refusal

JSON = "application/json"
STATUSES = {
    "invalid": 422,
    "unauthorized": 401,
    "foreign": 403,
    "misdirected": 421,
    "slow": 408,
    "too_large": 413,
    "busy": 429,
    "not_ready": 503,
    "conflict": 409,
    "failed": 500,
}
RETRY_SECONDS = "1"
HEADER_SECONDS = 10.0
"""From the first byte of a request, or from the connection, to the end of its headers."""


class Refused(RmcoreError):
    """A request that ends with a refusal."""

    def __init__(self, error: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.refusal = Refusal(error=error, message=message, field=field)


def refusal_response(refusal: Refusal) -> Response:
    """The HTTP answer that a refusal is."""
    headers = {"Retry-After": RETRY_SECONDS} if refusal.error in ("busy", "not_ready") else {}
    if refusal.error == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return Response(refusal.model_dump_json(), STATUSES[refusal.error], headers, media_type=JSON)


class Door:
    """An ASGI application in front of `app`, for requests to this server by no web page of another address.

    Args:
        app: what answers the others.
        names: hosts that the server has besides localhost and loopback's addresses, without a port. One that is an
            address, such as 0.0.0.0, stands for all addresses: no name that was made to point here is one.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = ()) -> None:
        self.app = app
        self._names = frozenset(name.lower() for name in names)
        self._shown = " or ".join(sorted({"localhost", *self._names}))
        self._has_addresses = any(_address(name) is not None for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        denial = misaddressed(scope["headers"], self._is_ours, self._shown) if scope["type"] == "http" else None
        if denial is None:
            await self.app(scope, receive, send)
            return
        kind, advice = _DENIALS[denial.status]
        await refusal_response(Refusal(error=kind, message=f"{denial.reason} {advice}"))(scope, receive, send)

    def _is_ours(self, authority: str) -> bool:
        """Whether the host of a `Host` is this server's. Its port is the client's matter: it may be forwarded."""
        host = authority.lower()
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if host.removeprefix(name).removeprefix(":").strip("0123456789"):
            return False
        address = _address(name.strip("[]"))
        if address is not None:
            return address.is_loopback or self._has_addresses
        return name == "localhost" or name in self._names


_DENIALS = {
    421: ("misdirected", "Use that name, or start the server with --name for another one."),
    403: ("foreign", "Ask from a program, without an Origin."),
}


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with an end to the wait for headers, and silent about clients that break their own request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take bytes in; those of a new request's headers have to be whole in time."""
        before = self.cycle
        if before is None or before.response_complete:
            self._wait()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP. An answer that is on its way is cut off: two cannot be sent, and it would try to."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if answering and self.cycle.response_started:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
