"""Passwords of a home's servers: one a server, new whenever `rm-opt up` starts them, all made of one key.

The key stays in its file and is never sent. A server's password is made of it, of the server's name and of the *era*, a
random text that each start of the servers draws. So a person who learns a password can use it with one server until
the next start. A worker of another machine has a copy of the key: it can make every password, and ask a server to prove
that it has the key, too, before a password is sent there.
"""

import base64
import hmac
import json
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.files import exclusive, write_text
from tasks.local_services import PREFECT_SERVER, SERVERS, services_folder

KEY_VARIABLE = "RM_OPT_PASSWORD_FILE"
"""Environment variable with the file of the key, where it is not the home's own: a mounted secret, for example."""
PROOF_PATH = "/rm-opt/proof"
"""Where a server proves that it has the key; without a password, because it is asked before one is sent."""
NUM_BYTES = 32
TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
"""Form of a key, an era, a password, a question and a proof: of `secrets.token_urlsafe`."""
TIMEOUT_S = 20.0


class Identity(NamedTuple):
    """The secrets that a server of a home knows, and no other program does."""

    key: str
    era: str

    def password(self, name: str) -> str:
        """The password of the server `name`; Prefect's, which its page takes in one field, begins with a user name."""
        return ("admin:" if name == PREFECT_SERVER else "") + _made_of(self.key, "password", name, self.era)

    def proof(self, place: str, question: str) -> str:
        """The answer of the server at `place` (HOST:PORT), which fits no other server and no other question."""
        return _made_of(self.key, "proof", place, question, self.era)


def _made_of(key: str, *parts: str) -> str:
    digest = hmac.digest(key.encode(), json.dumps(parts).encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def key_file(directory: Path) -> Path:
    """The file of the key: in the home, or where `RM_OPT_PASSWORD_FILE` says."""
    named = os.environ.get(KEY_VARIABLE)
    return Path(named) if named else services_folder(directory) / "key"


def password_file(directory: Path, name: str) -> Path:
    """The file with the password of the server `name`, for its owner to read."""
    return services_folder(directory) / f"{name}.password"


def identity(directory: Path) -> Identity:
    """The key of a home and the era of its last start; the first call makes both, for their owner to read only.

    Raises:
        ConfigError: `RM_OPT_PASSWORD_FILE` names a file that holds no key; such a file is never written.
    """
    era = services_folder(directory) / "era"
    key = read_key(key_file(directory)) if KEY_VARIABLE in os.environ else _kept(key_file(directory))
    return Identity(key, _kept(era))


def renew(directory: Path) -> Identity:
    """Begin an era, and write each server's password for the owner to read; those of before are no longer valid."""
    (services_folder(directory) / "era").unlink(missing_ok=True)
    found = identity(directory)
    for name in SERVERS:
        write_text(password_file(directory, name), found.password(name) + "\n", mode=0o600)
    return found


def _kept(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    with exclusive(path.with_name("key.lock")):
        known = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
        if not TOKEN.fullmatch(known):  # not there, or damaged
            known = secrets.token_urlsafe(NUM_BYTES)
            write_text(path, known + "\n", mode=0o600)
    return known


def read_key(path: Path) -> str:
    """The key that a file holds.

    Raises:
        ConfigError: it holds none.
    """
    found = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    if not TOKEN.fullmatch(found):
        raise ConfigError(
            f"{path} holds no key of the servers. On a worker's machine it is a copy of services/key from "
            "the home that `rm-opt up` runs in, which only you may read; a new one comes from "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'."
        )
    return found


def ask_for_proof(address: str, key: str) -> Identity:
    """See that the server at `http://HOST:PORT` has the key, without sending anything that helps one that has it not.

    Raises:
        httpx.HTTPError: it does not answer.
        ServiceError: it has not the key.
    """
    question = secrets.token_urlsafe(NUM_BYTES)
    answer = httpx.get(f"{address}{PROOF_PATH}", params={"question": question}, timeout=TIMEOUT_S)
    given = answer.json() if answer.is_success and answer.headers.get("content-type") == "application/json" else None
    if isinstance(given, dict) and isinstance(era := given.get("era"), str) and isinstance(given.get("proof"), str):
        found = Identity(key, era)
        if hmac.compare_digest(found.proof(urlsplit(address).netloc, question).encode(), given["proof"].encode()):
            return found
    raise ServiceError(
        f"{address} did not prove that it is a server of `rm-opt up` with this key, and was sent no password: the key "
        "is another one (copy services/key of the home that `rm-opt up` runs in, and name it with --password-file), "
        "or another program listens there."
    )


def mlflow_login(password: str) -> dict[str, str]:
    """Environment with which MLflow's client logs in, to whatever server it speaks to; the name may be any."""
    return {"MLFLOW_TRACKING_USERNAME": "rm-opt", "MLFLOW_TRACKING_PASSWORD": password}


def basic_authorization(password: str) -> dict[str, str]:
    """HTTP header with which a server lets a request in."""
    return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
