"""Requests of this machine to itself: no proxy on the way, and no page of another address among them.

`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` are read by every client: httpx (ours, Prefect's, the hub's),
requests (MLflow's), urllib, websockets. A proxy cannot reach this machine's loopback.

A port is reached by every web page in a browser that sees it. A page of another address is told by its `Origin`, and
one whose own name was made to point here (DNS rebinding) by the `Host` that it names.
"""

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rmcore.core.errors import ConfigError


class Denial(NamedTuple):
    """Why a request is not answered: an HTTP status and a sentence."""

    status: int
    reason: str


def values_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    """All values of a header, in their order; names are in lower case, as ASGI has them."""
    return [value.decode("latin-1") for key, value in headers if key == name]


def misaddressed(
    headers: Iterable[tuple[bytes, bytes]], is_ours: Callable[[str], bool], answers_as: str
) -> Denial | None:
    """Refuse a request that names another server, or comes from a web page of another address.

    Args:
        headers: of the request, as ASGI has them.
        is_ours: whether a `Host`, such as 127.0.0.1:8100, is this server's.
        answers_as: the address that is shown in place of a wrong one.
    """
    given = list(headers)
    hosts = values_of(given, b"host")
    if len(hosts) != 1 or not is_ours(hosts[0]):
        return Denial(421, f"This server answers as {answers_as} only.")
    if values_of(given, b"origin") not in ([], [f"http://{hosts[0]}"]):
        return Denial(403, "Pages of other addresses may not use this server.")
    return None


LOOPBACK = ("127.0.0.1", "localhost", "::1")
SCHEMES = ("http", "https", "socks5", "socks5h")
"""Proxies that httpx speaks to; it refuses to make any client, even one of loopback, where another kind is set."""


def keep_direct(hosts: Iterable[str] = ()) -> None:
    """Let no client of this process and its children use a proxy for loopback, or for these addresses of ours.

    Raises:
        ConfigError: as `require_usable_proxies`.
    """
    require_usable_proxies()
    for variable in ("NO_PROXY", "no_proxy"):
        kept = [host for host in map(str.strip, os.environ.get(variable, "").split(",")) if host]
        os.environ[variable] = ",".join(dict.fromkeys([*kept, *LOOPBACK, *hosts]))


def uses_proxies(host: str | None) -> bool:
    """Whether a client of this host takes the environment's proxies, of which none reaches loopback.

    Raises:
        ConfigError: as `require_usable_proxies`.
    """
    if host in LOOPBACK:
        return False
    require_usable_proxies()
    return True


def require_usable_proxies() -> None:
    """Check the environment's proxies before a client is made.

    Raises:
        ConfigError: one is set that HTTP clients cannot use.
    """
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            scheme, colon, _ = os.environ.get(variable, "").partition("://")
            if colon and scheme.lower() not in SCHEMES:
                raise ConfigError(
                    f"{variable} names a proxy of the kind {scheme!r}, which HTTP clients of Python cannot use, so "
                    f"that none could be made: set it to an address of {', '.join(SCHEMES)} (most socks:// proxies are "
                    "socks5://), or unset it. Requests to this machine use no proxy."
                )
