"""The token of a reward server, for its clients: RM_OPT_TOKEN, or a file that `rm-opt serve` keeps while it runs.

The file is its user's alone, and its name says the machine, the host and the port that the server listens at. A client
takes it for that very address only: `localhost` may be two addresses, and another user may listen at the second.
"""

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rmcore.core.errors import ConfigError, ServingError
from rmcore.core.files import write_text

TOKEN_VARIABLE = "RM_OPT_TOKEN"  # noqa: S105 - the name of a variable


def find_token(address: str) -> str | None:
    """The token for a server at `address`; None where neither the variable nor a file of this user has one.

    Raises:
        ServingError: the file is there and cannot be read.
    """
    named = os.environ.get(TOKEN_VARIABLE)
    return _read(token_file(address)) if named is None else named


def token_file(address: str) -> Path:
    """Where the token of a server at `address` is kept on this machine."""
    name = f"{socket.gethostname()}-{urlsplit(address).netloc}"
    return Path.home() / ".cache" / "rm-opt" / "tokens" / name


@contextlib.contextmanager
def kept_token(address: str, token: str) -> Iterator[Path]:
    """Keep the token where this user's clients find it, inside the block.

    Raises:
        ServingError: it cannot be written.
    """
    path = token_file(address)
    with _kept_below(path.parent):
        write_text(path, token + "\n", mode=0o600, durable=False)
    try:
        yield path
    finally:
        if _read(path) == token:  # not that of a server which has the address now
            path.unlink()


def require_token_folder() -> None:
    """Refuse a server whose token could not be kept, before it loads a model.

    Raises:
        ServingError: nothing can be written where tokens are kept.
    """
    folder = token_file("").parent
    with _kept_below(folder), tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def _kept_below(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield
    except OSError as error:
        raise ServingError(
            f"the token cannot be kept in {folder} ({error.strerror}), where clients look for it: set a token of your "
            f"own in {TOKEN_VARIABLE}, for the server and its clients."
        ) from error


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServingError(f"{path} cannot be read ({error.strerror}): set {TOKEN_VARIABLE}.") from error


def checked_token(token: str) -> str:
    """The token, which is never shown.

    Raises:
        ConfigError: no HTTP header can carry it.
    """
    if not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(
            "the token is empty or holds a space, a line end or a letter that is not ASCII, which no HTTP header can "
            "carry; read it again (a file often ends in a line end), or leave it out for a server without one."
        )
    return token
