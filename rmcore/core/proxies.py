"""Proxies of the environment: never for this machine itself, and only such as HTTP clients can use.

`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` are read by every client: httpx (ours, Prefect's, the hub's),
requests (MLflow's), urllib, websockets. A proxy cannot reach this machine's loopback.
"""

import os
from collections.abc import Iterable
from importlib.util import find_spec

from rmcore.core.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SCHEMES = ("http", "https", "socks5", "socks5h")
"""Proxies that httpx speaks to; it refuses to make any client, even one of loopback, where another kind is set."""


def keep_direct(hosts: Iterable[str] = ()) -> None:
    """Let no client of this process and its children use a proxy for loopback, or for these addresses of this machine.

    Raises:
        ConfigError: a proxy is set that HTTP clients cannot use.
    """
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            _require_usable(variable, os.environ.get(variable, ""))
    for variable in ("NO_PROXY", "no_proxy"):
        kept = [host for host in map(str.strip, os.environ.get(variable, "").split(",")) if host]
        os.environ[variable] = ",".join(dict.fromkeys([*kept, *LOOPBACK, *hosts]))


def _require_usable(variable: str, address: str) -> None:
    scheme, colon, _ = address.partition("://")
    if colon and scheme.lower() not in SCHEMES:
        raise ConfigError(
            f"{variable} names a proxy of the kind {scheme!r}, which HTTP clients of Python cannot use, so that none "
            f"could be made: set it to an address of {', '.join(SCHEMES)} (most socks:// proxies are socks5://), or "
            f"unset it. Requests to this machine use no proxy."
        )
    if scheme.lower().startswith("socks") and colon and find_spec("socksio") is None:
        raise ConfigError(
            f"{variable} names a SOCKS proxy, and the package socksio, which speaks to one, is not installed: run "
            "`pip install 'httpx[socks]'`, or unset it. Requests to this machine use no proxy."
        )
