"""The password of a home's servers: one random text, in a file for its owner to read, until that file is deleted.

A worker of another machine has a copy. Before it sends it, a server proves that it has it, too: the head's may have
ended, and another user's program listen at its address.
"""

import base64
import hmac
import os
import re
import secrets
from pathlib import Path

import httpx

from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.files import exclusive, write_text
from tasks.local_services import services_folder

FILE_VARIABLE = "RM_OPT_PASSWORD_FILE"
"""Environment variable with the file of the password, where it is not the home's own: a mounted secret, for example."""
PROOF_PATH = "/rm-opt/proof"
"""Where a server proves that it has the password; without a login, because it is asked before one is sent."""
NUM_BYTES = 32
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
"""Form of a password and of a question: that of `secrets.token_urlsafe`."""


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


def proof(secret: str, place: str, question: str) -> str:
    """The answer of the server at `place` (HOST:PORT) that has a password; it fits no other server or question."""
    return hmac.digest(secret.encode(), f"rm-opt proof {place} {question}".encode(), "sha256").hex()


def require_proof(address: str, secret: str) -> None:
    """See that the server at `http://HOST:PORT` has the password, without sending what helps one that has it not.

    Raises:
        httpx.HTTPError: it does not answer.
        ServiceError: it has another one, or none.
    """
    question = secrets.token_urlsafe(NUM_BYTES)
    answer = httpx.get(f"{address}{PROOF_PATH}", params={"question": question}, timeout=20)
    place = answer.url.netloc.decode()  # as the header Host has it
    if not hmac.compare_digest(answer.content, proof(secret, place, question).encode()):
        raise ServiceError(
            f"{address} did not prove that it is a server of `rm-opt up` with this password, and was sent no password: "
            "it has another one (name a copy of services/password of the home that `rm-opt up` runs in with "
            "--password-file), or another program listens there."
        )


def mlflow_login(secret: str) -> dict[str, str]:
    """Environment with which MLflow's client logs in, to whatever server it speaks to; the name may be any."""
    return {"MLFLOW_TRACKING_USERNAME": "rm-opt", "MLFLOW_TRACKING_PASSWORD": secret}


def basic_authorization(secret: str) -> dict[str, str]:
    """HTTP header with which a server lets a request in."""
    return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}
