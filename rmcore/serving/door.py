"""The door of a reward server: who may ask, and for how long, before anything of a request is understood.

files     connections take a third of those that the process may open; for one more, the oldest that has not logged in
          is closed (`BoundedProtocol`, `file_limits`)
headers   whole within HEADER_SECONDS, or the connection is closed (`BoundedProtocol`)
Host      an address of this server by a name that it has; Origin: none, or that same address (`Door`)
login     before a byte of the body is read (`rmcore.serving.http_app`); an answer without one ends its connection

What a refused client still sends is thrown away, by uvicorn or for LINGER_SECONDS, so that the client reads why.
"""

import asyncio
import contextlib
import ipaddress
import resource
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event
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
LINGER_SECONDS = 2.0
"""How long what a stranger still sends is thrown away: closed at once, it would lose the answer unread."""
LOGGED_IN = "logged_in"
"""Set in the state of a request whose token is right."""
MOST_FILES = 10_240
"""Open files that a server allows itself where it may choose; macOS accepts no larger limit."""
WARNING_SECONDS = 60.0
"""At most so often the log says that connections are closed to make room."""


def file_limits() -> tuple[int, int]:
    """Raise the process's limit of open files as far as it may itself (to MOST_FILES), and share it out.

    Returns:
        Connections, each of which may have a request under way with a connection to vLLM, too; and of them those that
        are accepted at once, before the first can be closed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few, most = (MOST_FILES if one == resource.RLIM_INFINITY else one for one in (soft, hard))
    limit = max(few, min(most, MOST_FILES))
    if limit > few:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit // 3, min(2048, limit // 8)


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
        """Answer one request, and end the connection of one without login."""

        async def answer(event: Event) -> None:
            if _is_logged_in(scope):
                await send(event)
            elif event["type"] == "http.response.start":
                await send({**event, "headers": [*event["headers"], (b"connection", b"close")]})
            elif event.get("more_body", False):
                await send(event)
            else:
                await send({**event, "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_SECONDS):
                        while (await receive()).get("more_body", False):
                            pass
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        denial = misaddressed(scope["headers"], self._is_ours, self._shown) if scope["type"] == "http" else None
        if denial is None:
            await self.app(scope, receive, answer)
            return
        kind, advice = _DENIALS[denial.status]
        await refusal_response(Refusal(error=kind, message=f"{denial.reason} {advice}"))(scope, receive, answer)

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


def _is_logged_in(scope: Mapping[str, Any]) -> bool:
    return LOGGED_IN in scope.get("state", {})


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with an end to the wait for headers, and silent about clients that break their own request.

    There are at most `limit_concurrency` connections: for one more, the oldest without login makes room. uvicorn itself
    would answer 503 to all from there on, those with login, too.
    """

    _deadline: asyncio.TimerHandle | None = None
    _has_logged_in = False
    _next_warning: ClassVar[float] = 0.0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._most, self.limit_concurrency = self.limit_concurrency, None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._wait()
        if self._most is not None and len(self.connections) > self._most:
            self._make_room()

    def on_response_complete(self) -> None:
        """Remember a login; the next request replaces this one."""
        self._has_logged_in = self._is_known()
        super().on_response_complete()

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

    def _is_known(self) -> bool:
        return self._has_logged_in or (self.cycle is not None and _is_logged_in(self.cycle.scope))

    def _make_room(self) -> None:
        strangers = [one for one in self.connections if isinstance(one, BoundedProtocol) and not one._is_known()]
        oldest = min(strangers, key=lambda one: one._since)  # this one at least has not logged in
        self.connections.discard(oldest)  # not only when asyncio says that it is lost
        oldest.transport.abort()  # its file is free at once, whatever it does not read
        if self.loop.time() >= BoundedProtocol._next_warning:
            BoundedProtocol._next_warning = self.loop.time() + WARNING_SECONDS
            self.logger.warning(
                "%d connections are open, as many as the limit of open files allows: for each new one the oldest that "
                "has not logged in is closed. Raise the limit (ulimit -n), or let fewer clients reach this address.",
                len(self.connections),
            )

    def _wait(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
