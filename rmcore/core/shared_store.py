"""Artifacts that several machines share, in an object store: `RM_OPT_SHARED=s3://bucket/prefix` (gs, az, file, too).

    blobs/<sha256>                  a file of an artifact, named by its content
    manifests/<stage>/<key>.json    created once and never changed: the commit of an artifact
    used/<stage>/<key>              when it was last taken, as the store's own clock says
    states/<stage>/<key>.json       what a stage that runs has saved so far, for whoever resumes it elsewhere
    leases/<key>.json               who computes an artifact right now

Blobs go first and the manifest last, so whoever dies between leaves nothing that anybody sees. Of two machines that
computed the same the first one's manifest stands, and the other one takes its bytes: what runs downstream, anywhere,
reads the same. A lease is changed only by compare-and-swap on its ETag. Its holder renews it; who wants it measures by
its own clock how long it has not been renewed, so no two clocks are ever compared.
"""

import hashlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rmcore.core.errors import ConfigError, StoreError
from rmcore.core.files import atomic_file, exclusive
from rmcore.core.store import Entry, Store, sealed

if TYPE_CHECKING:
    from obstore.store import RetryConfig

SCHEMES = ("s3", "gs", "az", "file")
QUICK: "RetryConfig" = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
"""When a command begins, so that a wrong address is told at once."""
PATIENT: "RetryConfig" = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=40),
    "backoff": {"init_backoff": timedelta(seconds=1), "max_backoff": timedelta(seconds=8), "base": 2},
}
"""Afterwards: a store that is away for half a minute ends nothing."""
CHUNK = 8 * 2**20
"""Bytes of a download that are in memory at once, for each of `TRANSFERS`."""
TRANSFERS = 8
LEASE_SECONDS = 60.0
"""A lease that was not renewed for so long may be taken. Its holder gives up a quarter earlier."""
RELEASE_SECONDS = 5.0
"""How long giving a lease back may take where the store is slow; it runs out anyway."""
GRACE = timedelta(days=1)
"""Blobs without a manifest are collected after this time: an upload may take so long."""


@dataclass(slots=True)
class Lease:
    """The right to compute one artifact, for as long as it is renewed."""

    lost: threading.Event = field(default_factory=threading.Event)
    """Set when another machine may have taken it: what is computed under it has to end."""
    renewed: float = field(default_factory=time.monotonic)
    """When its last renewal began, by this process's clock."""
    _on_loss: list[Callable[[], None]] = field(default_factory=list)

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call `end` if the lease is lost inside the block, or has been lost before."""
        self._on_loss.append(end)
        if self.lost.is_set():
            end()
        try:
            yield
        finally:
            self._on_loss.remove(end)

    def lose(self) -> None:
        """End what is computed under this lease."""
        self.lost.set()
        for end in tuple(self._on_loss):
            end()


class SharedStore:
    """An object store that several homes push finished artifacts to and pull them from."""

    def __init__(
        self,
        url: str,
        owner: Mapping[str, str],
        has_died: Callable[[Mapping[str, str]], bool] = lambda owner: False,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """Open it, and make sure that it keeps what is created from being created again.

        Args:
            url: `s3://bucket/prefix`, `gs://…`, `az://…` or `file:///folder`; credentials come from the environment,
                as the cloud's own tools have them.
            owner: names this process to others, JSON-ready.
            has_died: whether the process that an `owner` names is known to have ended.
            lease_seconds: see `LEASE_SECONDS`.

        Raises:
            ConfigError: no such address.
            StoreError: it cannot be reached, forbids something, or lets two writers create the same object.
        """
        self.url, self.owner, self.has_died, self.lease_seconds = url.rstrip("/"), dict(owner), has_died, lease_seconds
        self._seen: dict[str, tuple[str, float]] = {}
        _check(self.url)
        with self._errors():
            self._objects = _open(self.url, QUICK)
            self._probe()
            self._objects = _open(self.url, PATIENT)

    def _probe(self) -> None:
        import obstore

        place = f"probes/{uuid.uuid4().hex}"
        obstore.put(self._objects, place, b"1", mode="create")
        try:
            obstore.put(self._objects, place, b"2", mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return
        finally:
            obstore.delete(self._objects, place)
        raise StoreError(
            f"{self.url} lets two writers create the same object, so two machines could both commit an artifact. Use a "
            "store that knows conditional writes (If-None-Match: S3 since 2024, GCS, Azure, MinIO)."
        )

    # Artifacts

    def find(self, stage: str, key: str) -> dict[str, Any] | None:
        """The committed record of an artifact: its `name` and `manifest`; None where there is none."""
        found = self._read(f"manifests/{stage}/{key}.json")
        if found is None:
            return None
        record, place = _mapping(found[0]), f"manifests/{stage}/{key}.json"
        manifest = record.get("manifest")
        whole = isinstance(manifest, dict) and manifest == sealed(manifest) and isinstance(record.get("name"), str)
        if not whole or manifest is None or (manifest["stage"], manifest["key"]) != (stage, key):
            raise StoreError(f"{self.url}/{place} is not what was written; remove it, and the artifact is made again.")
        return record

    def pull(self, local: Store, stage: str, key: str) -> bool:
        """Make an artifact that is committed here one of `local`, checked against its digests; False: there is none.

        One whose blobs are gone or damaged loses its manifest, so that whoever needs it computes it again. The caller
        holds the local lock of the key.
        """
        record = self.find(stage, key)
        if record is None:
            return False
        manifest = record["manifest"]
        try:
            with local.receive(manifest, record["name"]) as folder:
                self._download(manifest["files"], folder)
        except _DamagedBlobError as damage:
            self._delete(f"manifests/{stage}/{key}.json", *damage.blobs)
            return False
        self._write(f"used/{stage}/{key}", b"")
        return True

    def push(self, local: Store, stage: str, key: str) -> bool:
        """Commit an artifact of `local`; where another outcome was committed first, take that one's bytes instead.

        Returns:
            Whether this one stands.

        Raises:
            StoreError: it cannot be written, or the one that was first is damaged.
        """
        folder, manifest = local.find(stage, key), local.manifest(stage, key)
        if folder is None or manifest is None:
            raise StoreError(f"no {stage} artifact {key} in {local.root} to share; this is a defect, report it.")
        self._upload({name: entry["sha256"] for name, entry in manifest["files"].items()}, folder)
        record = json.dumps({"name": folder.name, "manifest": manifest, "made_by": self.owner}).encode()
        stands = self._create(f"manifests/{stage}/{key}.json", record)
        if not stands:  # the same outcome, as nearly always: only logs or times differ, and ours is being read perhaps
            committed = self.find(stage, key)
            stands = committed is not None and committed["manifest"]["digest"] == manifest["digest"]
        if stands:
            self._drop_state(stage, key)
            return True
        if not self.pull(local, stage, key):
            raise StoreError(
                f"another machine committed {stage} {key[:12]} to {self.url} and its files are gone; run again."
            )
        return False

    def push_all(self, local: Store) -> Iterator[tuple[Entry, bool]]:
        """Commit every artifact of `local` that is not committed here; gives each, and whether it stands.

        Where another machine has committed another outcome, nothing is exchanged: what was made of ours stands on it.
        """
        for entry in local.entries():
            with local.lock(entry.key):
                if local.status(entry.stage, entry.key).state != "valid":
                    continue
                committed = self.find(entry.stage, entry.key)
                if committed is None:
                    yield entry, self.push(local, entry.stage, entry.key)
                elif committed["manifest"]["digest"] != entry.digest:
                    yield entry, False

    def keep_state(self, stage: str, key: str, folder: Path, patterns: Iterable[str], lease: Lease) -> None:
        """Keep what a running stage has saved in `folder`, the newest alone; files that vanish meanwhile are left out.

        As after a kill, what one file says may be newer than what another does: whoever resumes is used to that. Of a
        stage whose lease was lost nothing is kept: the one who has it now keeps its own.
        """
        place, digests = f"states/{stage}/{key}", dict[str, str]()
        for path in _files(folder, patterns):
            with self._errors(), suppress(FileNotFoundError):
                digests[str(path.relative_to(folder))] = self._upload_changing(path, place)
        if lease.lost.is_set():
            return
        self._write(f"{place}.json", json.dumps({"saved_in": str(folder), **self.owner, "files": digests}).encode())
        kept = {f"{place}/{digest}" for digest in digests.values()}
        self._delete(*(blob for blob, _ in self._list(f"{place}/") if blob not in kept))

    def take_state(self, stage: str, key: str, folder: Path, patterns: Sequence[str]) -> bool:
        """Exchange what lies in `folder` of a stage for what another machine saved of it last.

        False: there is nothing, not all of it, or it was saved from this very folder, which has the newest then. The
        exchange begins when all of it is here.
        """
        place = f"states/{stage}/{key}"
        found = self._read(f"{place}.json")
        state = {} if found is None else _mapping(found[0])
        files, own = state.get("files"), {"saved_in": str(folder), "host": self.owner.get("host")}
        is_own = {name: state.get(name) for name in own} == own and _files(folder, patterns)
        if not isinstance(files, dict) or not files or is_own:
            return False
        arriving = folder.with_name(f"{folder.name}.arriving")
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir(parents=True)
        try:
            self._download({name: {"sha256": digest} for name, digest in files.items()}, arriving, place)
            for old in (path for pattern in patterns for path in folder.glob(pattern)):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (arriving / name).replace(folder / name)
        except _DamagedBlobError:
            return False
        finally:
            shutil.rmtree(arriving, ignore_errors=True)
        return True

    def _drop_state(self, stage: str, key: str) -> None:
        place = f"states/{stage}/{key}"
        self._delete(f"{place}.json", *(blob for blob, _ in self._list(f"{place}/")))

    def register(self, name: str, record: bytes) -> bytes:
        """Write down once what is declared under `name`; gives what stands there: this, or what came before it."""
        if self._create(f"registrations/{name}", record):
            return record
        found = self._read(f"registrations/{name}")
        return record if found is None else found[0]

    def collect_garbage(self, older_than: timedelta, grace: timedelta = GRACE) -> tuple[int, int]:
        """Remove artifacts that nobody took for so long, and blobs that none names and that are older than `grace`.

        Returns:
            How many artifacts and how many blobs went.
        """
        now = self._now()
        used = {place.removeprefix("used/"): when for place, when in self._list("used/")}
        old, named = list[str](), set[str]()
        for place, made in self._list("manifests/"):
            name = place.removeprefix("manifests/").removesuffix(".json")
            if now - max(made, used.get(name, made)) > older_than:
                old += [place, f"used/{name}"]
                continue
            try:
                record = self.find(*name.split("/"))
            except StoreError:  # damaged: nobody can take it
                old.append(place)
                continue
            if record is not None:
                named |= {f"blobs/{entry['sha256']}" for entry in record["manifest"]["files"].values()}
        old += [place for place, made in self._list("states/") if now - made > older_than]
        self._delete(*old)
        loose = [place for place, made in self._list("blobs/") if place not in named and now - made > grace]
        self._delete(*loose, *(place for place, made in self._list("leases/") if now - made > grace))
        return sum(place.startswith("manifests/") for place in old), len(loose)

    # Leases

    def holder(self, key: str) -> dict[str, Any] | None:
        """Who computes that artifact, as far as can be seen: its `owner`, `run` and `since`; None where nobody does."""
        found = self._read(f"leases/{key}.json")
        return None if found is None or self._is_over(key, *found) else _mapping(found[0])

    @contextmanager
    def lease(self, key: str, run: str) -> Iterator[Lease | None]:
        """Hold the lease of a key inside the block, and renew it; None, at once, where another process holds it."""
        place = f"leases/{key}.json"
        since = datetime.now(UTC).isoformat(timespec="seconds")
        note = partial(_note, {"owner": self.owner, "run": run, "since": since})
        found = self._read(place)
        if found is None:
            token = self._created(place, note())
        else:
            token = self._swapped(place, note(), found[1]) if self._is_over(key, *found) else None
        if token is None:
            yield None
            return
        lease, done = Lease(), threading.Event()
        renewing = threading.Thread(target=self._renew, args=(place, note, token, lease, done), daemon=True)
        renewing.start()
        threading.Thread(target=self._doubt, args=(lease, done), daemon=True).start()
        try:
            yield lease
        finally:
            done.set()
            renewing.join(timeout=RELEASE_SECONDS)

    def _renew(self, place: str, note: Callable[[], bytes], token: str, lease: Lease, done: threading.Event) -> None:
        """Renew until done, then give it back; it is lost when another process has taken it."""
        asked = list[bytes]()  # since the last answer
        while not done.wait(self.lease_seconds / 6):
            began = time.monotonic()
            asked.append(note())
            try:
                swapped = self._swapped(place, asked[-1], token)
                if swapped is None and (found := self._read(place)) is not None and found[0] in asked:
                    swapped = found[1]  # it was renewed, and the answer was lost on the way
            except StoreError:  # away for a moment, or for too long: see `_doubt`
                continue
            asked.clear()
            if swapped is None:
                lease.lose()
                return
            token, lease.renewed = swapped, began
        with suppress(StoreError):  # it runs out by itself
            self._swapped(place, b"{}", token)

    def _doubt(self, lease: Lease, done: threading.Event) -> None:
        """Give the lease up a quarter before others may take it, also while a renewal still waits for an answer."""
        while not done.wait(self.lease_seconds / 12):
            if time.monotonic() - lease.renewed > 0.75 * self.lease_seconds:
                lease.lose()
                return

    def _is_over(self, key: str, content: bytes, token: str) -> bool:
        """Whether a lease was given back, its holder is known to have died, or it was not renewed for long."""
        noted = _mapping(content)  # a damaged one holds nothing
        first, since = self._seen.get(key, ("", 0.0))
        if first != token:
            since = time.monotonic()
            self._seen[key] = (token, since)
        owner = noted.get("owner")
        if not isinstance(owner, dict) or not {"run", "since"} <= noted.keys():
            return True
        return self.has_died(owner) or time.monotonic() - since > self.lease_seconds

    # Objects

    def _upload(self, digests: Mapping[str, str], folder: Path) -> None:
        import obstore

        now = self._now()

        def send(name: str, digest: str) -> None:
            place = f"blobs/{digest}"
            with self._errors():
                # One that may be collected before our manifest names it is written once more.
                with suppress(FileNotFoundError):
                    if now - obstore.head(self._objects, place)["last_modified"] < GRACE / 2:
                        return
                obstore.put(self._objects, place, folder / name)

        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(send, digests.keys(), digests.values()))

    def _upload_changing(self, path: Path, folder: str) -> str:
        """Send a file that may grow or go meanwhile, as it was read; gives its digest, by which it is named."""
        import obstore

        with path.open("rb") as source:
            end = path.stat().st_size
            digest = hashlib.sha256()
            while chunk := source.read(min(CHUNK, end - source.tell())):
                digest.update(chunk)
            place = f"{folder}/{digest.hexdigest()}"
            with suppress(FileNotFoundError):
                obstore.head(self._objects, place)
                return digest.hexdigest()
            source.seek(0)
            obstore.put(self._objects, place, iter(lambda: source.read(min(CHUNK, end - source.tell())), b""))
        return digest.hexdigest()

    def _download(self, files: Mapping[str, Mapping[str, Any]], folder: Path, blobs: str = "blobs") -> None:
        def fetch(name: str, digest: str) -> str | None:
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise StoreError(f"{self.url} names a file outside of its artifact: {name!r}; it was not written.")
            target.parent.mkdir(parents=True, exist_ok=True)
            return None if self._fetch(f"{blobs}/{digest}", target) == digest else f"{blobs}/{digest}"

        with ThreadPoolExecutor(TRANSFERS) as pool:
            damaged = [one for one in pool.map(fetch, files, (entry["sha256"] for entry in files.values())) if one]
        if damaged:
            raise _DamagedBlobError(damaged)

    def _fetch(self, place: str, target: Path) -> str:
        import obstore

        digest = hashlib.sha256()
        with (
            self._errors(),
            suppress(FileNotFoundError),
            atomic_file(target, durable=False) as temporary,
            temporary.open("wb") as out,
        ):
            for chunk in obstore.get(self._objects, place).stream(min_chunk_size=CHUNK):
                digest.update(chunk)
                out.write(chunk)
        return digest.hexdigest()

    def _read(self, place: str) -> tuple[bytes, str] | None:
        """An object and the token of this version of it; None where there is none."""
        import obstore

        with self._errors(), suppress(FileNotFoundError):
            found = obstore.get(self._objects, place)
            return bytes(found.bytes()), _token(found.meta)
        return None

    def _write(self, place: str, content: bytes) -> None:
        import obstore

        with self._errors():
            obstore.put(self._objects, place, content)

    def _create(self, place: str, content: bytes) -> bool:
        return self._created(place, content) is not None

    def _created(self, place: str, content: bytes) -> str | None:
        """Write an object that is not there; its token, or None where it is."""
        import obstore

        with self._errors(), suppress(obstore.exceptions.AlreadyExistsError):
            return _token(obstore.put(self._objects, place, content, mode="create"))
        return None

    def _swapped(self, place: str, content: bytes, token: str) -> str | None:
        """Write over the version of an object that `token` names; the new token, or None where that one has gone."""
        import obstore

        if (folder := _folder(self.url)) is not None:  # local files know no conditional update, but locks
            with self._errors(), exclusive(folder / ".locks" / place.replace("/", "-")):
                found = self._read(place)
                if found is None or found[1] != token:
                    return None
                return _token(obstore.put(self._objects, place, content))
        missing = (obstore.exceptions.PreconditionError, FileNotFoundError)
        with self._errors(), suppress(*missing):
            return _token(obstore.put(self._objects, place, content, mode=json.loads(token)))
        return None

    def _delete(self, *places: str) -> None:
        import obstore

        for place in places:
            with self._errors(), suppress(FileNotFoundError):
                obstore.delete(self._objects, place)

    def _list(self, prefix: str) -> list[tuple[str, datetime]]:
        import obstore

        with self._errors():
            return [(one["path"], one["last_modified"]) for part in obstore.list(self._objects, prefix) for one in part]

    def _now(self) -> datetime:
        """The time by the store's own clock, by which it dates its objects."""
        import obstore

        place = f"probes/{uuid.uuid4().hex}"
        with self._errors():
            obstore.put(self._objects, place, b"")
            now: datetime = obstore.head(self._objects, place)["last_modified"]
            obstore.delete(self._objects, place)
        return now

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say what an object store refuses, what that means, and what to do."""
        from obstore import exceptions

        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except FileNotFoundError as error:  # what may be missing is asked for with that in mind
            raise StoreError(f"{self.url} {_meaning('NotFoundError', 'NoSuchBucket')}.") from error
        except OSError as error:
            raise StoreError(
                f"a file of an artifact could not be read or written here ({error.strerror}: {error.filename}); most "
                "often this disk is full. Free space and run again."
            ) from error
        except (exceptions.BaseError, NotImplementedError) as error:
            meaning, said = _meaning(type(error).__name__, str(error)), str(error).partition("\n\nDebug source")[0]
            raise StoreError(f"{self.url} {meaning}. It said: {said[:400]}") from error


class _DamagedBlobError(Exception):
    def __init__(self, blobs: Sequence[str]) -> None:
        super().__init__(", ".join(blobs))
        self.blobs = blobs


def _meaning(kind: str, said: str) -> str:
    known = {
        "RequestTimeTooSkewed": "refuses requests from this machine's clock, which is off by too much; set it (NTP)",
        "NoSuchBucket": "is not there: no such bucket; make it, or name another one in RM_OPT_SHARED",
        "No space left": "is full; free space, or run `rm-opt store gc-shared`",
        "QuotaExceeded": "is full; free space, or run `rm-opt store gc-shared`",
        "AccessDenied": "does not let these credentials read and write; give them rights on this prefix",
        "InvalidAccessKeyId": "does not know these credentials; set those of the bucket (AWS_ACCESS_KEY_ID, …)",
        "SignatureDoesNotMatch": "does not know these credentials; set those of the bucket (AWS_SECRET_ACCESS_KEY, …)",
    }
    for sign, meaning in known.items():
        if sign in said:
            return meaning
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return "does not let these credentials read and write; give them rights on this prefix"
    return "does not answer, or not as an object store does; the same command goes on when it is back"


def _check(url: str) -> None:
    """Refuse an address before anything is asked of it.

    Raises:
        ConfigError: obstore is not installed, or there is no such address.
    """
    try:
        import obstore  # noqa: F401 - is it there?
    except ImportError as error:
        raise ConfigError(
            "RM_OPT_SHARED needs obstore: pip install 'rm-optimizer[cluster]', or unset it to work alone."
        ) from error
    if urlsplit(url).scheme not in SCHEMES:
        raise ConfigError(
            f"RM_OPT_SHARED={url!r} is no address of a store; it begins with s3://, gs://, az:// or file://."
        )
    if urlsplit(url).username or urlsplit(url).query:
        raise ConfigError(
            "RM_OPT_SHARED holds credentials or parameters (it is not shown); the address goes without, they belong "
            "into the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, …)."
        )
    folder = _folder(url)
    if folder is not None and (urlsplit(url).netloc or not folder.is_absolute() or not folder.is_dir()):
        raise ConfigError(
            f"RM_OPT_SHARED={url!r} names no folder that is there; it begins with file:/// and a folder that all "
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


def _mapping(content: bytes) -> dict[str, Any]:
    """A JSON object; empty for anything else, which only damage can have left."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _token(meta: Mapping[str, Any]) -> str:
    return json.dumps({name: meta.get(name) for name in ("e_tag", "version") if meta.get(name) is not None})


def _note(noted: Mapping[str, Any]) -> bytes:
    """A lease's content, another one at each renewal: an ETag may be a digest of it."""
    return json.dumps({**noted, "renewal": uuid.uuid4().hex}).encode()


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Give the files under what matches, but for what is still being written (a name that begins with a dot)."""
    found = list[Path]()
    for pattern in patterns:
        for match in sorted(folder.glob(pattern)):
            inside = sorted(match.rglob("*")) if match.is_dir() else [match]
            found += [
                one
                for one in inside
                if one.is_file() and not any(part[0] == "." for part in one.relative_to(folder).parts)
            ]
    return found
