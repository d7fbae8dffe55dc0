"""How one request of a client travels: a shared connection pool, retries, the time limit, and what each failure means.

    no connection, or one that broke   sent again, with growing pauses, then ServingError
    no answer within the time limit    ServingError at once: the server may still be computing, more load is no help
    429, 503                           NotReadyError    the same request may work later
    other 4xx                          RequestError     it will not work in this form
    everything else                    ServingError

No request that a server answered is repeated here: a refusal is the server's decision, and the caller's to handle.
"""

import asyncio
import random
import re
from typing import TypeVar

import httpx
from pydantic import ValidationError

from rmcore.core.errors import ConfigError, NotReadyError, RequestError, RmcoreError, ServingError
from rmcore.core.proxies import LOOPBACK
from rmcore.serving.messages import checked_token
from rmcore.serving.token_file import find_token
from rmcore.serving.types import Refusal, Wire

CONNECT_TIMEOUT_S = 5.0
"""Longest wait for a connection in one try: a machine that is there answers within milliseconds."""
LONGEST_PAUSE_S = 1.0
"""Where pauses between tries stop growing (a larger `backoff_s` is respected): a server that is back is seen soon."""

_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
_CONNECTION_FAULTS = (*_NOT_SENT, httpx.NetworkError, httpx.RemoteProtocolError, httpx.ProxyError)
_INPUT_FIELD = re.compile(r"\binputs\.(\d+)")

Answer = TypeVar("Answer", bound=Wire)


class Session:
    """Sends requests to one reward server over one connection pool. Lives in one event loop.

    Raises:
        ConfigError: the address or the token cannot be used, or a number is out of range.
    """

    def __init__(
        self, address: str, *, token: str | None, timeout_s: float, keep_alive: int, attempts: int, backoff_s: float
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("attempts", attempts)):
            if not value > 0:
                raise ConfigError(f"{name}={value} lets no request through; give a number above 0.")
        if not backoff_s >= 0:
            raise ConfigError(f"backoff_s={backoff_s} is no length of time; give the seconds of the first pause.")
        self.address, host = _checked_address(address)
        self.timeout_s = timeout_s
        self.attempts = attempts
        self._backoff_s = backoff_s
        self._http = httpx.AsyncClient(
            base_url=self.address,
            headers=_authorization(find_token(self.address) if token is None else token),
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # the whole exchange has one limit, in _once
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=keep_alive),
            trust_env=host not in LOOPBACK,  # a proxy of the environment cannot reach this machine's loopback
        )

    async def exchange(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        *,
        body: Wire | None = None,
        timeout_s: float | None = None,
        attempts: int | None = None,
        repeatable: bool = True,
        also: int | None = None,
        first_input: int = 0,
    ) -> Answer:
        """Send one request and read its answer.

        Args:
            method: HTTP method.
            path: route, from the slash on.
            answer: what the body of a success holds.
            body: sent as JSON.
            timeout_s: limit of one try in seconds; None takes the session's.
            attempts: most tries; None takes the session's.
            repeatable: False where a second execution could do harm: then only a request that was never sent is
                sent again.
            also: a status besides 2xx whose body may hold the answer.
            first_input: place in the caller's list of the request's first input; errors count from there.

        Raises:
            RequestError: the server refused the request.
            NotReadyError: the server cannot answer now.
            ServingError: there is no server, no answer in time, or none that can be used.
        """
        if self._http.is_closed:
            raise ServingError(f"the client of {self.address} was closed and sends nothing any more; make a new one.")
        what = f"{method} {path}"
        unknown = "" if repeatable else " Whether it took effect is unknown: version() tells what is served."
        content = None if body is None else body.model_dump_json().encode()
        attempts = attempts or self.attempts
        for attempt in range(1, attempts + 1):
            try:
                response = await self._once(what, content, timeout_s or self.timeout_s, unknown)
                break
            except _CONNECTION_FAULTS as error:
                if not (repeatable or isinstance(error, _NOT_SENT)):
                    raise ServingError(
                        f"the connection to {self.address} broke after {what} was sent ({_why(error)})." + unknown
                    ) from error
                if attempt == attempts:
                    raise ServingError(
                        f"{self.address} could not be reached, {what} failed in {attempts} tries ({_why(error)}): no "
                        "server listens there, or it ends. See that it runs; wait_ready() waits for one that starts."
                    ) from error
            await asyncio.sleep(self.pause_s(attempt))
        return _read(response, f"{what} of {self.address}", answer, also, first_input)

    async def _once(self, what: str, content: bytes | None, timeout_s: float, unknown: str) -> httpx.Response:
        method, path = what.split(" ")
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(timeout_s):
                return await self._http.request(method, path, content=content, headers=headers)
        except _CONNECTION_FAULTS:
            raise
        except TimeoutError as error:
            raise ServingError(
                f"{what} of {self.address} had no answer within {timeout_s:g} s: the server has too much to do or "
                f"hangs.{unknown} Raise timeout_s, send smaller batches, or ask health()."
            ) from error
        except httpx.HTTPError as error:
            raise ServingError(
                f"{what} of {self.address} failed ({_why(error)}): the answer is not one of a reward server. See what "
                f"listens at this address.{unknown}"
            ) from error

    def pause_s(self, attempt: int) -> float:
        """Seconds to wait after a failed try: they double, and a random half keeps clients from returning together."""
        whole = min(self._backoff_s * 2 ** min(attempt - 1, 30), max(self._backoff_s, LONGEST_PAUSE_S))
        return whole * random.uniform(0.5, 1.0)  # noqa: S311 - nothing is kept secret by it

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()


def in_callers_list(text: str, first_input: int) -> str:
    """Count the `inputs.N` of a message about one batch from the start of the caller's list."""
    return _INPUT_FIELD.sub(lambda match: f"inputs.{int(match[1]) + first_input}", text)


def _checked_address(address: str) -> tuple[str, str]:
    """The address without a slash at its end, and its host."""
    form = "give http://HOST:PORT, as the server printed it"
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the address of a reward server cannot be read ({error}); {form}.") from error
    if url.userinfo:  # not shown: it may be a password
        raise ConfigError(f"the address of a reward server holds a user's name or password; {form}, and pass token=.")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigError(f"{address!r} is not the address of a reward server; {form}.")
    return address.rstrip("/"), url.host


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {checked_token(token)}"}


def _read(response: httpx.Response, what: str, answer: type[Answer], also: int | None, first_input: int) -> Answer:
    if response.is_success or response.status_code == also:
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            if response.is_success:
                first = error.errors(include_url=False, include_input=False)[0]
                place = ".".join(map(str, first["loc"])) or "its body"
                raise ServingError(
                    f"{what} answered {response.status_code} with no valid {answer.__name__} ({place}: "
                    f"{first['msg']}): nothing of it can be used. See the server's log, and that both sides are of "
                    "one release."
                ) from error
    raise _failure(response, what, first_input)


def _failure(response: httpx.Response, what: str, first_input: int) -> RmcoreError:
    status = response.status_code
    kind: type[RmcoreError] = ServingError
    if status in (429, 503):
        kind = NotReadyError
    elif 400 <= status < 500:
        kind = RequestError
    try:
        refusal = Refusal.model_validate_json(response.content)
    except ValidationError:
        return kind(
            f"{what} answered {status} {response.reason_phrase} and not as a reward server does "
            f"({response.text[:120]!r}): something else is at this address or before it. Correct the address."
        )
    message = in_callers_list(refusal.message, first_input)
    field = "" if refusal.field is None else in_callers_list(refusal.field, first_input)
    named = "" if field in message else f", field {field}"
    return kind(f"{what} answered {status} {refusal.error}{named}: {message}")


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
