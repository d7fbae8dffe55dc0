"""The password of a home's servers: one random text, in a file for its owner to read, until that file is deleted."""

import base64
import os
import re
import secrets
from pathlib import Path

from rmcore.core.errors import ConfigError
from rmcore.core.files import exclusive, write_text
from tasks.local_services import services_folder

FILE_VARIABLE = "RM_OPT_PASSWORD_FILE"
"""Environment variable with the file of the password, where it is not the home's own: a mounted secret, for example."""
NUM_BYTES = 32
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
"""Form of a password: that of `secrets.token_urlsafe`."""


def password_file(directory: Path) -> Path:
    """The file of the password: in the home, or where `RM_OPT_PASSWORD_FILE` says."""
    return Path(os.environ.get(FILE_VARIABLE) or services_folder(directory) / "password")


def password(directory: Path) -> str:
    """The password of the servers of a home; the first call makes it, for its owner to read only.

    Raises:
        ConfigError: `RM_OPT_PASSWORD_FILE` names a file that holds none; such a file is never written.
    """
    path = password_file(directory)
    if FILE_VARIABLE in os.environ:
        return read_password(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    with exclusive(path.with_name("password.lock")):
        known = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
        if not TOKEN.fullmatch(known):  # not there, or damaged
            known = secrets.token_urlsafe(NUM_BYTES)
            write_text(path, known + "\n", mode=0o600)
    return known


def read_password(path: Path) -> str:
    """The password that a file holds.

    Raises:
        ConfigError: it holds none.
    """
    found = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    if not TOKEN.fullmatch(found):
        raise ConfigError(
            f"{path} holds no password of the servers. On a worker's machine it is a copy of services/password from "
            "the home that `rm-opt up` runs in, which only you may read; a new one comes from "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'."
        )
    return found


def mlflow_login(secret: str) -> dict[str, str]:
    """Environment with which MLflow's client logs in, to whatever server it speaks to; the name may be any."""
    return {"MLFLOW_TRACKING_USERNAME": "rm-opt", "MLFLOW_TRACKING_PASSWORD": secret}


def basic_authorization(secret: str) -> dict[str, str]:
    """HTTP header with which a server lets a request in."""
    return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}
