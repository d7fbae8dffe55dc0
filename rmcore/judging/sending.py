"""How a request is sent to a judge's server, and its answer received: one place with all its limits.

The server may be broken or hostile. No redirect is followed; a whole request has a limit of time, and what is answered
one of bytes; the key is taken out of whatever is answered, before anything reads it; an error inside an answer of
status 200 becomes the answer's status, so that the client repeats it as it repeats others.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from email.utils import mktime_tz, parsedate_tz
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx2
import openai

from rmcore.core.errors import ConfigError, NotReadyError, RmcoreError, ServingError
from rmcore.core.printing import printable
from rmcore.judging.replies import error_inside

MASK = "…"
SHORTEST_KEY = 4
"""Characters of a key that is masked: a shorter one is no secret, and may be a word of any answer."""
LIST_BYTES = 2**24
"""Largest size of a list of models; those of large providers have half a million."""
OPTIONAL = ("top_logprobs", "logprobs", "temperature", "max_tokens")
"""Parameters that some endpoints refuse by name; such a one is left out from then on."""
COMPLAINT = (
    r"(?:un(?:supported|recogni[sz]ed|expected|known)|not (?:support|available|allowed|permitted|enabled)|instead of|"
    r"invalid|deprecated|must be|should be)"
)
"""How an endpoint that does not name the parameter in a field of its own says that it takes none."""
KEPT_HEADERS = ("location", "retry-after", "retry-after-ms", "x-should-retry")
CLIENT_WAITS = 120.0
"""Seconds of `Retry-After` beyond which the package openai gives up instead of waiting."""


class LimitedClient(openai.DefaultAsyncHttpxClient):
    """Sends requests and receives their answers within limits.

    Args:
        before: called with each request before it is sent, repeated ones included; refuses by raising.
        seconds: of a whole request, until the last byte of its answer.
        most_bytes: of an answer.
        key: that no answer may hold.
        trust_env: whether the environment's proxies are used.
    """

    def __init__(
        self, *, before: Callable[[httpx2.Request], None], seconds: float, most_bytes: int, key: str, trust_env: bool
    ) -> None:
        plain = {"Accept-Encoding": "identity"}  # a compressed answer has no limit that its bytes tell
        super().__init__(trust_env=trust_env, follow_redirects=False, headers=plain)
        self._before, self._seconds, self._most_bytes = before, seconds, most_bytes
        self._key = key if len(key) >= SHORTEST_KEY else ""
        self.num_open = 0
        """Requests that were sent and are not answered yet."""
        self.last_failure = ""
        """A sentence about the last request, if it was answered with an error."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send one request.

        Raises:
            httpx2.RequestError: it cannot be sent, or is not answered in time.
            ServingError: the answer is too long, or compressed.
        """
        self._before(request)
        self.num_open += 1
        try:
            async with asyncio.timeout(self._seconds):
                response = await super().send(request, **options | {"stream": True})
                body = await self._received(response, LIST_BYTES if request.method == "GET" else self._most_bytes)
        except TimeoutError as error:
            raise httpx2.ReadTimeout("the whole request", request=request) from error
        finally:
            self.num_open -= 1
        status, content = self._read(response.status_code, body)
        self.last_failure = f" The last request was answered with status {status}." if status >= 300 else ""
        headers = {name: value for name, value in response.headers.items() if name in KEPT_HEADERS}
        return httpx2.Response(status, headers=headers, content=content, request=request)

    async def _received(self, response: httpx2.Response, most: int) -> bytes:
        body = bytearray()
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ServingError("compresses its answers, which was not requested")
            async for part in response.aiter_raw():
                body += part
                if len(body) > most:
                    raise ServingError(f"answers with more than {most:,} bytes, far more than answer_tokens need")
        finally:
            await response.aclose()
        return bytes(body)

    def _read(self, status: int, body: bytes) -> tuple[int, bytes]:
        """The status and the body without the key, and in one spelling where it is JSON."""
        text = body.decode("utf-8", "replace")
        try:
            said = json.loads(text)
            inside = error_inside(said) if status < 300 else None
            if inside is not None:
                status, said = inside[0], {"error": inside[1]}
            text = json.dumps(said)
        except (ValueError, RecursionError):  # no JSON, or none that can be read
            pass
        for spelling in (self._key, json.dumps(self._key)[1:-1]) if self._key else ():
            text = text.replace(spelling, MASK)
        return status, text.encode()


def wait_named(error: openai.APIError) -> float:
    """Seconds that a busy server asks to wait before the next request, by its header; 0 where it does not."""
    if not isinstance(error, openai.RateLimitError | openai.InternalServerError):
        return 0.0
    said = error.response.headers.get("retry-after", "")
    try:
        seconds = float(said)
    except ValueError:
        date = parsedate_tz(said)
        seconds = 0.0 if date is None else mktime_tz(date) - time.time()
    return seconds if math.isfinite(seconds) else 0.0


def refused_parameter(error: openai.APIError, sent: Mapping[str, Any]) -> str | None:
    """Which optional parameter a refusal is about, and not about a text that has its name in it; None: none."""
    return next((name for name in OPTIONAL if name in sent and _is_about(error, name)), None)


def failure(error: Exception, key_variable: str, seconds: float, address: str) -> RmcoreError:
    """Say what a user has to know of a request that has failed, without the name of who was asked.

    Args:
        error: of the client.
        key_variable: where the key is from.
        seconds: that a request may take.
        address: that was asked.
    """
    said = f" ({error_line(error)})"
    if isinstance(error, openai.APIStatusError) and 300 <= error.status_code < 400:
        to = urlsplit(urljoin(address, error.response.headers.get("location", "")))
        origin = printable(f"{to.scheme}://{to.netloc.rpartition('@')[2]}")
        return ConfigError(
            f"sends on to {origin}, and no redirect is followed: prompts and the key are for the named address alone. "
            "If that is the judge, name its address"
        )
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        advice = f"; put a valid key into the environment variable {key_variable}"
        return ConfigError(f"refused the key{said}{advice}")
    if isinstance(error, openai.NotFoundError):
        return ConfigError(f"knows no such model or address{said}")
    if isinstance(error, openai.APITimeoutError):
        return ServingError(f"did not answer within timeout_seconds={seconds:g}{said}")
    if isinstance(error, openai.RateLimitError | openai.InternalServerError | openai.APIConnectionError):
        return NotReadyError(f"failed{said}. What was answered is kept: the same command continues there")
    return ServingError(f"failed{said}")


def error_line(error: Exception) -> str:
    """An error with what the server said, in one printable line."""
    return printable(" ".join(f"{type(error).__name__}: {_said(error)}".split()))[:600]


def _said(error: Exception) -> str:
    """An error with all that the server said; the client leaves out what is not in its usual place."""
    body = getattr(error, "body", None)
    has_message = body is None or (isinstance(body, Mapping) and isinstance(body.get("message"), str))
    return str(error) if has_message else f"{error} - {body}"


def _is_about(error: openai.APIError, parameter: str) -> bool:
    said = _said(error)
    if error.param:
        named = error.param == parameter
    else:
        apart = r"\W+(?:\w+\W+){0,5}?"  # up to five words
        complaint = rf"{COMPLAINT}{apart}{parameter}\b|\b{parameter}{apart}{COMPLAINT}"
        named = re.search(complaint, said, re.IGNORECASE) is not None
    is_too_long = parameter == "max_tokens" and "context" in said  # the text and the answer's room together
    return named and not is_too_long
