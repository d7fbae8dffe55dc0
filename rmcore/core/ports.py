"""Ports of this machine that no other user can listen on.

A client that sends a password to a port must know who listens there, also when the server has died meanwhile. On Linux
the kernel knows: several sockets may be bound to one port only where each asks for it (SO_REUSEPORT) and all belong to
one user. So a socket that is bound and never listens *holds* a port. As long as the process that has it lives, another
user's program cannot bind there, whatever it asks for, but a server of ours can, also a second time. And where a port
cannot be held, it is not ours. No option of ours lets a socket be bound over one that has ended (SO_REUSEADDR): another
user's could be, too.
"""

import errno
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rmcore.core.errors import ServiceError

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""

_held: dict[tuple[str, int], socket.socket] = {}


def claim(host: str, port: int) -> socket.socket:
    """Bind a socket to a port that no other user's program can then be bound to; 0 takes a free one.

    Raises:
        OSError: another user's program has the port, or one of this user that shares it with none.
    """
    claimed = socket.socket()
    try:
        if sys.platform == "linux":
            claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind((host, port))
    except BaseException:
        claimed.close()
        raise
    return claimed


def hold(address: str) -> None:
    """See that no other user's program has or gets the port of `http://HOST:PORT`, for as long as this process lives.

    Call it before a password is sent there. An address of another machine is let through: nothing is known of it here.

    Raises:
        ServiceError: the port is another user's, or a program's of this user that shares it with none.
    """
    place = urlsplit(address)
    host, port = place.hostname, place.port
    if sys.platform != "linux" or host is None or port is None or (host, port) in _held:
        return
    try:
        _held[host, port] = claim(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:  # a name or an address of another machine
            return
        raise ServiceError(
            f"port {port} on {host}, where a server of `rm-opt up` is expected, is not ours "
            f"({owner_of(port) or 'no program that is known listens'}): the password was not sent there. Run `rm-opt "
            "down`, and then `rm-opt up` with another port."
        ) from error


def held() -> list[int]:
    """File descriptors of all that this process holds, for a child that shall hold it, too."""
    return [one.fileno() for one in _held.values()]


def owner_of(port: int) -> str:
    """`pid 7 (name), uid 1000` of the program that listens on a port, as far as the system tells; else empty."""
    found = []
    with suppress(psutil.Error):
        listening = (
            c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
        )
        found += [f"pid {one.pid} ({psutil.Process(one.pid).name()})" for one in listening if one.pid is not None][:1]
    return ", ".join(found + [f"uid {uid}" for uid in sorted(listening_uids(port))])


def listening_uids(port: int) -> set[int]:
    """The users that listen on a port, on whatever address of this machine; none known but on Linux."""
    uids = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                if state == LISTENS and int(local.rpartition(":")[2], 16) == port:
                    uids.add(int(uid))
    return uids
