"""Objects in S3, GCS, Azure or a folder: whole or absent, created once, changed by compare-and-swap; refusals in words.

A store is told by its address: `s3://bucket/prefix`, `gs://…`, `az://…` or `file:///folder`. Credentials come from the
environment, as the cloud's own tools have them. Importing this module does not import obstore.
"""

import hashlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rmcore.core.errors import ConfigError, StoreError
from rmcore.core.extras import require_extra
from rmcore.core.files import atomic_file

if TYPE_CHECKING:
    from obstore.store import RetryConfig

QUICK: "RetryConfig" = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
"""When a command begins, so that a wrong address is told at once."""
PATIENT: "RetryConfig" = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=40),
    "backoff": {"init_backoff": timedelta(seconds=1), "max_backoff": timedelta(seconds=8), "base": 2},
}
"""Afterwards: a store that is away for half a minute ends nothing."""
CHUNK = 8 * 2**20
"""Bytes of a transfer that are in memory at once."""


class ObjectStore:
    """Objects under one address, named by their place there."""

    def __init__(self, url: str, *, named_by: str = "RM_OPT_SHARED", read_only: bool = False) -> None:
        """Open it, and unless it is only read, make sure that it keeps what is created from being created again.

        `named_by` is where the address was set, for messages.

        Raises:
            ConfigError: there is no such address, or obstore is not installed.
            StoreError: it cannot be reached, forbids something, or lets two writers create the same object.
        """
        self.url = url.rstrip("/")
        _check(self.url, named_by)
        with self.errors():
            if not read_only:
                self._objects = _open(self.url, QUICK)
                self._probe()
            self._objects = _open(self.url, PATIENT)

    def _probe(self) -> None:
        from obstore.exceptions import AlreadyExistsError

        place = f"probes/{uuid.uuid4().hex}"
        self._objects.put(place, b"1", mode="create")
        try:
            self._objects.put(place, b"2", mode="create")
        except AlreadyExistsError:
            return
        finally:
            self._objects.delete(place)
        raise StoreError(
            f"{self.url} lets two writers create the same object, so two machines could both commit an artifact. Use a "
            "store that knows conditional writes (If-None-Match: S3 since 2024, GCS, Azure, MinIO)."
        )

    def read(self, place: str) -> bytes | None:
        """Return an object's content; None where there is none."""
        with self.errors(), suppress(FileNotFoundError):
            return bytes(self._objects.get(place).bytes())
        return None

    def write(self, place: str, content: bytes | Path | Iterator[bytes]) -> None:
        """Write an object, over what is there; a file, or what is read of one, in parts where it is large."""
        with self.errors():
            self._objects.put(place, content)

    def create(self, place: str, content: bytes) -> bool:
        """Write an object unless there is one at that place; gives whether it was written."""
        from obstore.exceptions import AlreadyExistsError

        with self.errors(), suppress(AlreadyExistsError):
            self._objects.put(place, content, mode="create")
            return True
        return False

    def delete(self, *places: str) -> None:
        """Remove objects, those that are there."""
        for place in places:
            with self.errors(), suppress(FileNotFoundError):
                self._objects.delete(place)

    def list(self, prefix: str) -> list[str]:
        """List what is stored under a prefix."""
        with self.errors():
            return [one["path"] for part in self._objects.list(prefix) for one in part]

    def versions(self) -> dict[str, str]:
        """Everything that lies there by its place, each with words that change when it does."""
        with self.errors():
            found = [one for part in self._objects.list() for one in part]
        marks = ("size", "last_modified", "e_tag", "version")
        return {one["path"]: " ".join(str(one.get(mark)) for mark in marks) for one in found}

    def written(self, place: str) -> datetime | None:
        """Return when the object at that place was written; None where there is none."""
        with self.errors(), suppress(FileNotFoundError):
            found: datetime = self._objects.head(place)["last_modified"]
            return found
        return None

    def fetch(self, place: str, target: Path) -> str:
        """Write an object to a file; gives the digest of what came, which is that of nothing where there is none."""
        digest = hashlib.sha256()
        with (
            self.errors(),
            suppress(FileNotFoundError),
            atomic_file(target, durable=False) as temporary,
            temporary.open("wb") as out,
        ):
            for chunk in self._objects.get(place).stream(min_chunk_size=CHUNK):
                digest.update(chunk)
                out.write(chunk)
        return digest.hexdigest()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Say what an object store refuses, what that means, and what to do."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except FileNotFoundError as error:  # callers expect that some may be missing
            raise StoreError(f"{self.url} {_meaning('NotFoundError', 'NoSuchBucket')}.") from error
        except OSError as error:
            raise StoreError(
                f"a file of an artifact could not be read or written here ({error.strerror}: {error.filename}); most "
                "often this disk is full. Free space and run again."
            ) from error
        except (exceptions.BaseError, NotImplementedError) as error:  # the latter: what this kind of store cannot do
            meaning, said = _meaning(type(error).__name__, str(error)), str(error).partition("\n\nDebug source")[0]
            raise StoreError(f"{self.url} {meaning}. It said: {said[:400]}") from error


def _meaning(kind: str, said: str) -> str:
    known = {
        "RequestTimeTooSkewed": "refuses requests from this machine's clock, which is off by too much; set it (NTP)",
        "NoSuchBucket": "is not there: no such bucket; make it, or name another one",
        "No space left": "is full; free space",
        "QuotaExceeded": "is full; free space",
        "AccessDenied": "does not let these credentials read and write; give them rights on this prefix",
        "InvalidAccessKeyId": "does not know these credentials; set those of the bucket (AWS_ACCESS_KEY_ID, …)",
        "SignatureDoesNotMatch": "does not know these credentials; set those of the bucket (AWS_SECRET_ACCESS_KEY, …)",
    }
    for sign, meaning in known.items():
        if sign in said:
            return meaning
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return "does not let these credentials read and write; give them rights on this prefix"
    return "does not answer, or not as an object store does; the same command continues when it is back"


def _check(url: str, named_by: str) -> None:
    """Refuse an address before anything is asked of it.

    Raises:
        ConfigError: obstore is not installed, or there is no such address.
    """
    require_extra("obstore", "cluster", named_by)
    parts, folder = urlsplit(url), _folder(url)
    if parts.scheme not in ("s3", "gs", "az", "file"):
        raise ConfigError(
            f"{named_by}={url!r} is no address of a store; it begins with s3://, gs://, az:// or file://."
        )
    if parts.username or parts.query:
        raise ConfigError(
            f"{named_by} holds credentials or parameters (it is not shown); the address goes without, they belong "
            "into the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, …)."
        )
    if folder is not None and (parts.netloc or not folder.is_absolute() or not folder.is_dir()):
        raise ConfigError(
            f"{named_by}={url!r} names no folder that is there; it begins with file:/// and a folder that all "
            "machines see. Make it first: a share that is not mounted must not be taken for an empty store."
        )


def _open(url: str, patience: "RetryConfig") -> Any:
    """Obstore's own client."""
    from obstore.store import LocalStore, from_url

    folder = _folder(url)
    return LocalStore(folder) if folder is not None else from_url(url, config=None, retry_config=patience)


def _folder(url: str) -> Path | None:
    parts = urlsplit(url)
    return Path(parts.path) if parts.scheme == "file" else None
