"""Requests between reward servers that share a token: both sides sign with it, and it is never sent.

A request carries a nonce, the digest of its body, and a signature of both; the answer carries a signature of the same
nonce, its status and its body. A program that takes the place of a server therefore learns no token and can forge no
answer, and one that relays an exchange cannot change it. Signatures are HMAC-SHA256 (RFC 2104) under the token.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Generator

import httpx
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from rmcore.core.errors import ConfigError, ServingError

SCHEME = "RM-HMAC"
"""Scheme of the header Authorization, before nonce, body digest and signature."""
SIGNATURE = "RM-Signature"
"""Header of a signed answer."""
SHORTEST_TOKEN = 16
"""Least number of characters of a signing token: anyone who sees a signature can try guesses at the token offline."""


def sign(token: str, *parts: str) -> str:
    """Return the signature of some texts in their order, in hex digits."""
    return hmac.new(token.encode(), json.dumps(["rm-opt", *parts]).encode(), "sha256").hexdigest()


def digest(body: bytes) -> str:
    """Return the sha256 of a body, in hex digits."""
    return hashlib.sha256(body).hexdigest()


class SignedRequests(httpx.Auth):
    """Signs every request of a client, and accepts only answers that are signed for it.

    Args:
        token: the token of the server.
        named: the server, in messages.

    Raises:
        ConfigError: the token is too short to sign with.
    """

    requires_request_body = True
    requires_response_body = True

    def __init__(self, token: str, named: str) -> None:
        if len(token) < SHORTEST_TOKEN:
            raise ConfigError(
                f"the token for {named} has {len(token)} characters, and signatures need {SHORTEST_TOKEN} or more: a "
                "shorter one can be guessed from them. Set a longer RM_OPT_TOKEN for both servers."
            )
        self._token, self._named = token, named

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Sign one request, and check its answer.

        Raises:
            ServingError: the answer is not signed with the token.
        """
        nonce, of_body = secrets.token_urlsafe(), digest(request.content)
        signed = sign(self._token, "request", nonce, request.method, request.url.path, of_body)
        request.headers["Authorization"] = f"{SCHEME} {nonce} {of_body} {signed}"
        response = yield request
        expected = sign(self._token, "answer", nonce, str(response.status_code), digest(response.content))
        if not hmac.compare_digest(response.headers.get(SIGNATURE, "").encode(), expected.encode()):
            raise ServingError(
                f"the answer of {self._named} is not signed with the token that this server has for it, so it is not "
                "used; the token was not sent. Start both servers with the same RM_OPT_TOKEN, or both without it on "
                "one machine, this one last, and again after a restart of the other."
            )


def body_digest(token: str, given: str, method: str, path: str) -> str | None:
    """Return the digest that the body of a signed request must have; None if its signature is wrong.

    Args:
        token: the token of this server.
        given: nonce, digest and signature, as they follow the scheme.
        method: method of the request.
        path: path of the request.
    """
    nonce, of_body, signed = (*given.split(" "), "", "", "")[:3]
    expected = sign(token, "request", nonce, method, path, of_body)
    return of_body if hmac.compare_digest(signed.encode(), expected.encode()) else None


class SigningAnswers:
    """An ASGI application in front of `app` that signs the answers to signed requests with the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind != SCHEME:
            await self.app(scope, receive, send)
            return
        nonce, start, body = given.split(" ")[0], dict[str, Event](), bytearray()

        async def signed(event: Event) -> None:
            if event["type"] == "http.response.start":
                start["event"] = event
                return
            body.extend(event.get("body", b""))
            if not event.get("more_body"):
                status = str(start["event"]["status"])
                answer = sign(self._token, "answer", nonce, status, digest(bytes(body)))
                MutableHeaders(raw=start["event"]["headers"])[SIGNATURE] = answer
                await send(start["event"])
                await send({"type": "http.response.body", "body": bytes(body)})

        await self.app(scope, receive, signed)
