"""Artifacts that several machines share, in an object store: `RM_OPT_SHARED=s3://bucket/prefix` (gs, az, file, too).

    blobs/<sha256>                  a file of an artifact, named by its content
    manifests/<stage>/<key>.json    created once and never changed: the commit of an artifact
    states/<stage>/<key>.json       what a running stage has saved so far, for a process that resumes it elsewhere
    states/<stage>/<key>/<sha256>   the files of that
    registrations/<name>.json       created once: when the claims of an experiment were declared first

Blobs go first and the manifest last, so a machine that dies between leaves nothing that any other sees. Of two
machines that computed the same the first one's manifest stays, and the other one takes its bytes: what runs downstream,
anywhere, reads the same. So no machine reserves a stage: one that is computed twice costs time and changes nothing.
An artifact whose blobs are gone is computed again, or sent again by a machine that has it, so a bucket's own rule may
remove blobs, manifests and states that are old; what is written of a new one is new, also where the content was there.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from rmcore.core.errors import StoreError
from rmcore.core.files import parse_object
from rmcore.core.manifests import Entry, is_manifest
from rmcore.core.object_store import CHUNK, ObjectStore
from rmcore.core.store import Store

TRANSFERS = 8
"""Files that are sent or fetched side by side."""
RENEWED_AFTER = timedelta(days=1)
"""An object that is older is written again when something new needs it: the bucket may be about to remove it."""


class SharedStore:
    """An object store that several homes push finished artifacts to and pull them from."""

    def __init__(self, url: str, owner: Mapping[str, str]) -> None:
        """Open it.

        Args:
            url: address of the object store.
            owner: names this process to others, JSON-ready.

        Raises:
            RmcoreError: as `ObjectStore`.
        """
        self.objects, self.owner = ObjectStore(url), dict(owner)
        self.url = self.objects.url

    def find(self, stage: str, key: str) -> dict[str, Any] | None:
        """The committed record of an artifact: its `name` and `manifest`; None where there is none."""
        place = f"manifests/{stage}/{key}.json"
        found = self.objects.read(place)
        if found is None:
            return None
        record = parse_object(found) or {}
        manifest, name = record.get("manifest"), record.get("name")
        if (
            not is_manifest(manifest)
            or (manifest["stage"], manifest["key"]) != (stage, key)
            or not isinstance(name, str)
        ):
            raise StoreError(f"{self.url}/{place} is not what was written; remove it, and the artifact is made again.")
        return record

    def has(self, stage: str, key: str) -> bool:
        """Return whether an artifact is committed and all of its files are there."""
        record = self.find(stage, key)
        return record is not None and self._has_files(record["manifest"])

    def _has_files(self, manifest: Mapping[str, Any]) -> bool:
        places = [f"blobs/{entry['sha256']}" for entry in manifest["files"].values()]
        with ThreadPoolExecutor(TRANSFERS) as pool:
            return None not in pool.map(self.objects.written, places)

    def pull(self, local: Store, stage: str, key: str) -> bool:
        """Make an artifact that is committed here one of `local`, checked against its digests; False: there is none.

        One whose blobs are gone or damaged loses its manifest, so that it is computed again where it is needed. The
        caller holds the local lock of the key.
        """
        record = self.find(stage, key)
        if record is None:
            return False
        manifest = record["manifest"]
        try:
            with local.receive(manifest, record["name"]) as folder:
                self._download(manifest["files"], folder)
        except _DamagedBlobError as damage:
            self.objects.delete(f"manifests/{stage}/{key}.json", *damage.blobs)
            return False
        return True

    def push(self, local: Store, stage: str, key: str) -> bool:
        """Commit an artifact of `local`; where another outcome was committed first, take that one's bytes instead.

        Returns:
            Whether this one was kept.

        Raises:
            StoreError: it cannot be written, or the one that was first is damaged.
        """
        folder, manifest = local.find(stage, key), local.manifest(stage, key)
        if folder is None or manifest is None:
            raise StoreError(f"no {stage} artifact {key} in {local.root} to share; this is a defect, report it.")
        self._upload({name: entry["sha256"] for name, entry in manifest["files"].items()}, folder)
        place = f"manifests/{stage}/{key}.json"
        record = json.dumps({"name": folder.name, "manifest": manifest, "made_by": self.owner}).encode()
        is_committed = self.objects.create(place, record)
        if (
            not is_committed
        ):  # nearly always the same outcome: only logs or times differ, and ours is being read perhaps
            committed = self.find(stage, key)
            is_committed = committed is not None and committed["manifest"]["digest"] == manifest["digest"]
            if committed is not None and is_committed and not self._has_files(committed["manifest"]):
                self.objects.write(place, record)  # its logs are gone, and ours are there
        if is_committed:
            self._drop_state(stage, key)
            return True
        if not self.pull(local, stage, key):
            raise StoreError(
                f"another machine committed {stage} {key[:12]} to {self.url} and its files are gone; run again."
            )
        return False

    def push_all(self, local: Store) -> Iterator[tuple[Entry, bool]]:
        """Commit every artifact of `local` that is not here, or not all of it; gives each, and whether it was kept.

        Where another machine has committed another outcome, nothing is exchanged: what was made of ours depends on it.
        """
        for entry in local.entries():
            with local.lock(entry.key):
                if local.status(entry.stage, entry.key).state != "valid":
                    continue
                committed = self.find(entry.stage, entry.key)
                is_lacking = committed is None or (
                    committed["manifest"]["digest"] == entry.digest and not self._has_files(committed["manifest"])
                )
                is_committed = is_lacking and self.push(local, entry.stage, entry.key)
            if is_committed or committed is None or committed["manifest"]["digest"] != entry.digest:
                yield entry, is_committed

    def keep_state(self, stage: str, key: str, folder: Path, patterns: Iterable[str]) -> None:
        """Keep what a running stage has saved in `folder`, the newest alone; files that vanish meanwhile are left out.

        As after a kill, one file may be newer than another, which resuming allows for. Of two machines that compute the
        same stage the last to save is kept; where each removes the other's files, `take_state` finds nothing whole.
        """
        place, digests = f"states/{stage}/{key}", dict[str, str]()
        for path in saved_files(folder, patterns):
            with self.objects.errors(), suppress(FileNotFoundError):
                digests[str(path.relative_to(folder))] = self._upload_changing(path, place)
        self.objects.write(
            f"{place}.json", json.dumps({"saved_in": str(folder), **self.owner, "files": digests}).encode()
        )
        kept = {f"{place}/{digest}" for digest in digests.values()}
        self.objects.delete(*(blob for blob in self.objects.list(f"{place}/") if blob not in kept))

    def take_state(self, stage: str, key: str, folder: Path, patterns: Sequence[str]) -> bool:
        """Exchange what is in `folder` of a stage for what another machine saved of it last.

        False: there is nothing, not all of it, or it was saved from this very folder, which has the newest then. The
        exchange begins when all of it is here.

        Raises:
            StoreError: what is stored there is no state, or names a file outside of the folder.
        """
        place = f"states/{stage}/{key}"
        found = self.objects.read(f"{place}.json")
        if found is None:
            return False
        state = parse_object(found) or {}
        files, own = state.get("files"), {"saved_in": str(folder), "host": self.owner.get("host")}
        if not isinstance(files, dict):
            raise StoreError(
                f"{self.url}/{place}.json is not what was written; remove it, and the stage begins with what this "
                "machine has of it."
            )
        if not files or ({name: state.get(name) for name in own} == own and saved_files(folder, patterns)):
            return False
        arriving = folder.with_name(f"arriving-{folder.name}")  # ends with the key, whose lock keeps it
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
        self.objects.delete(f"{place}.json", *self.objects.list(f"{place}/"))

    def register(self, name: str, record: bytes) -> bytes:
        """Write down once what is declared under `name`; gives the record that is kept: this one, or an earlier one."""
        if self.objects.create(f"registrations/{name}", record):
            return record
        found = self.objects.read(f"registrations/{name}")
        return record if found is None else found

    def _is_new(self, place: str) -> bool:
        written = self.objects.written(place)
        return written is not None and datetime.now(UTC) - written < RENEWED_AFTER

    def _upload(self, digests: Mapping[str, str], folder: Path) -> None:
        def send(name: str, digest: str) -> None:
            if not self._is_new(f"blobs/{digest}"):
                self.objects.write(f"blobs/{digest}", folder / name)

        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(send, digests.keys(), digests.values()))

    def _upload_changing(self, path: Path, folder: str) -> str:
        """Send a file that may grow or go meanwhile, as it was read; gives its digest, by which it is named."""
        with path.open("rb") as source:
            end = path.stat().st_size
            digest = hashlib.sha256()
            while chunk := source.read(min(CHUNK, end - source.tell())):
                digest.update(chunk)
            place = f"{folder}/{digest.hexdigest()}"
            if not self._is_new(place):
                source.seek(0)
                self.objects.write(place, iter(lambda: source.read(min(CHUNK, end - source.tell())), b""))
        return digest.hexdigest()

    def _download(self, files: Mapping[str, Mapping[str, Any]], folder: Path, blobs: str = "blobs") -> None:
        def fetch(name: str, digest: str) -> str | None:
            target = folder / name
            if not target.resolve().is_relative_to(folder.resolve()):
                raise StoreError(f"{self.url} names a file outside of its artifact: {name!r}; it was not written.")
            target.parent.mkdir(parents=True, exist_ok=True)
            return None if self.objects.fetch(f"{blobs}/{digest}", target) == digest else f"{blobs}/{digest}"

        with ThreadPoolExecutor(TRANSFERS) as pool:
            damaged = [one for one in pool.map(fetch, files, (entry["sha256"] for entry in files.values())) if one]
        if damaged:
            raise _DamagedBlobError(damaged)


class _DamagedBlobError(Exception):
    def __init__(self, blobs: Sequence[str]) -> None:
        super().__init__(", ".join(blobs))
        self.blobs = blobs


def saved_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Give the files under what matches, but for what is still being written (a name that begins with a dot).

    A state that is removed while it is listed is left out, where `Path.glob` would raise an error.
    """
    names = dict[Path, None]()
    for pattern in patterns:
        matches = (glob(place, root_dir=folder, recursive=True) for place in (pattern, f"{pattern}/**"))
        names |= dict.fromkeys(sorted(map(Path, chain(*matches))))
    return [folder / name for name in names if (folder / name).is_file()]
