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
from urllib.parse import urlsplit

from rmcore.core.errors import ServiceError

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
            f"port {port} on {host}, where a server of `rm-opt up` is expected, is another program's: the password was "
            "not sent there. Run `rm-opt down`, and then `rm-opt up` with another port."
        ) from error


def held() -> list[int]:
    """File descriptors of all that this process holds, for a child that shall hold it, too."""
    return [one.fileno() for one in _held.values()]
