"""Content-addressed artifacts: equal inputs are computed once, and a change of an artifact on disk is detected.

An artifact is a folder `<root>/<stage>/<slug>-<key12>/` with a `MANIFEST.json`. Its key digests everything that can
affect the outcome; its `digest` covers the outcome files, and downstream keys contain that digest. It is written to a
temporary folder, synced and renamed, so an incomplete artifact never has a name. A lock is `flock`, which the kernel
releases when the process that holds it dies.

Readers protect artifacts from garbage collection: a `Store` writes each key that it returns into its lease, a file that
it keeps locked until it is collected or its process ends, and `collect_garbage` keeps the artifacts of locked leases.
"""

import fcntl
import json
import os
import re
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from rmcore.core.errors import StoreError
from rmcore.core.files import (
    TEMPORARY,
    exclusive,
    file_digest,
    fsync_folder,
    is_free,
    remove_abandoned,
    rename_onto,
    shared,
    try_exclusive,
    write_text,
)
from rmcore.core.manifests import (
    DIGEST,
    FORMAT,
    FORMAT_FILE,
    MANIFEST,
    TIMES,
    Entry,
    find_damage,
    make_key,
    read_manifest,
    write_manifest,
)

KEY_LENGTH = 12
"""Digits of a key in folder names, leases and messages; the manifest has the whole key."""
ATTEMPTS = ".attempts.json"
"""File in the folder of an unfinished artifact: when the last attempt began, and the seconds of all before it."""
UNFINISHED = ".wip"
LEASES = ".leases"
LEASE_LOCK = "leases"
"""A lock: shared while a key is added to a lease, exclusive while an artifact is removed."""


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """Names one artifact: small, JSON-ready, passed between tasks instead of data."""

    stage: str
    key: str
    path: str
    digest: str

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return Path(self.path)


@dataclass(frozen=True, slots=True)
class ArtifactStatus:
    """Whether an artifact can be used."""

    state: Literal["missing", "corrupt", "valid"]
    damage: str = ""
    """Description of the damage of a corrupt artifact, with the file."""


class Store:
    """All artifacts under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lease: IO[str] | None = None
        self._held: set[str] = set()
        self._growing = threading.Lock()

    def find(self, stage: str, key: str) -> Path | None:
        """Return the folder of an artifact, complete or not; None if there is none."""
        found = sorted((self.root / stage).glob(f"*-{key[:KEY_LENGTH]}"))
        return found[0] if found else None

    def unfinished(self, stage: str, key: str) -> Path:
        """Return the folder in which an artifact is written before it is complete."""
        return self.root / UNFINISHED / f"{stage}-{key}"

    def manifest(self, stage: str, key: str) -> dict[str, Any] | None:
        """Read the manifest; None if it is missing or unreadable."""
        folder = self.find(stage, key)
        return None if folder is None else read_manifest(folder)

    def status(self, stage: str, key: str) -> ArtifactStatus:
        """Return whether an artifact exists and is unchanged.

        A file with the recorded size and time of change counts as unchanged and is not read. After a copy, or a new
        hard link, files are digested once.
        """
        folder = self.find(stage, key)
        if folder is None:
            return ArtifactStatus("missing")
        damage = find_damage(folder, key)
        return ArtifactStatus("valid") if damage is None else ArtifactStatus("corrupt", damage)

    def verify(self) -> Iterator[tuple[Path, str | None]]:
        """Digest every file of every artifact, and yield each folder with its damage or None.

        The recorded times of a damaged artifact are deleted, so that the next run detects the damage too and computes
        the artifact again. Artifacts that are being computed are skipped. Those that are verified are protected from
        garbage collection.
        """
        for folder in sorted(self.root.glob("[!.]*/*")):
            key = folder.name.rsplit("-", 1)[-1]
            self.hold(key)
            with self.try_lock(key) as is_idle:
                if not is_idle or not folder.is_dir():
                    continue
                damage = find_damage(folder, key, read_all=True)
                if damage is not None:
                    (folder / TIMES).unlink(missing_ok=True)
            yield folder, damage

    def ref(self, stage: str, key: str) -> ArtifactRef:
        """Return the reference of a stored artifact, record its use, and protect it from garbage collection.

        Raises:
            StoreError: there is no such artifact.
        """
        self.hold(key)
        folder, manifest = self.find(stage, key), self.manifest(stage, key)
        if folder is None or manifest is None:
            raise StoreError(
                f"no {stage} artifact {key[:KEY_LENGTH]} in {self.root}; run the pipeline again to compute it."
            )
        os.utime(folder / MANIFEST)
        return ArtifactRef(stage, key, str(folder), manifest["digest"])

    def hold(self, key: str) -> None:
        """Protect the artifact of a key, existing or future, from `collect_garbage` during the life of this object."""
        with self._growing:
            if key[:KEY_LENGTH] in self._held:
                return
            with shared(self._lock_path(LEASE_LOCK)):
                if self._lease is None:
                    self._lease = _new_lease(self.root / LEASES)
                    weakref.finalize(self, _end_lease, self._lease)
                self._lease.write(f"{key[:KEY_LENGTH]}\n")
                self._lease.flush()
            self._held.add(key[:KEY_LENGTH])

    def hold_around(self, path: str | Path) -> None:
        """Protect the artifact of this store that contains `path`, if there is one."""
        place, root = Path(path).expanduser().resolve(), self.root.resolve()
        if root in place.parents and len(parts := place.relative_to(root).parts) > 1:
            self.hold(parts[1].rsplit("-", 1)[-1])

    def _keys_in_use(self) -> set[str]:
        """Return the key prefixes leased by live processes, and delete other leases. The caller has the lease lock."""
        found: set[str] = set()
        for lease in (self.root / LEASES).glob("*"):
            if is_free(lease):
                lease.unlink(missing_ok=True)
            else:
                found.update(lease.read_text(encoding="utf-8").split())
        return found

    def _lock_path(self, name: str) -> Path:
        """Return the file of a lock; that of a key is the same for its first digits, all that a folder's name says."""
        return self.root / ".locks" / f"{name[:KEY_LENGTH] if DIGEST.fullmatch(name) else name}.lock"

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Hold an exclusive lock; waits until another process on this machine releases it or dies."""
        return exclusive(self._lock_path(name))

    def try_lock(self, name: str) -> AbstractContextManager[bool]:
        """Hold an exclusive lock if no other process does; yields whether it is held. Never waits."""
        return try_exclusive(self._lock_path(name))

    def is_free(self, name: str) -> bool:
        """Return whether no process on this machine holds that lock at present."""
        return is_free(self._lock_path(name))

    @contextmanager
    def publish(
        self,
        stage: str,
        slug: str,
        inputs: Mapping[str, Any],
        *,
        outcome: tuple[str, ...],
        resumable: bool = False,
        key: str | None = None,
    ) -> Iterator[Path]:
        """Yield a folder that becomes the artifact when the block succeeds, and is deleted otherwise.

        The caller holds the lock of the key.

        Args:
            stage: stage name.
            slug: readable part of the folder's name.
            inputs: everything that affects the outcome; its digest is the key.
            outcome: globs of the files whose content downstream stages depend on. Logs and figures are excluded, so
                that a recomputed artifact with the same outcome leaves downstream artifacts valid.
            resumable: whether an incomplete folder, also after a kill, is kept and passed to the next attempt.
            key: digest of `inputs`, if the caller has computed it already.

        Raises:
            StoreError: the block wrote no outcome file.
        """
        key = key or make_key(inputs)
        self.hold(key)
        started, began = time.time(), time.monotonic()
        folder = self.unfinished(stage, key)
        if not resumable:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = _spent(folder)
        attempt = json.dumps({"earlier": earlier, "began": started})
        (folder / ATTEMPTS).write_text(attempt)
        for name in (MANIFEST, TIMES):  # of an attempt that died just before the rename
            (folder / name).unlink(missing_ok=True)
        finished = False
        try:
            yield folder
            (folder / ATTEMPTS).unlink(missing_ok=True)
            places = {str(path.relative_to(folder)): path for path in _written(folder)}
            # Before the digests, so that a later write is detected.
            stats = {name: path.stat() for name, path in places.items()}
            files = {name: {"sha256": file_digest(path), "size": stats[name].st_size} for name, path in places.items()}
            matched = {str(path.relative_to(folder)) for glob in outcome for path in folder.glob(glob)} & files.keys()
            if not matched:
                raise StoreError(
                    f"stage {stage} finished without writing any of {outcome}; this is a defect, report it."
                )
            manifest = {
                "stage": stage,
                "key": key,
                "digest": make_key({name: files[name]["sha256"] for name in matched}),
                "outcome": sorted(matched),
                "created": started,
                "wall_seconds": round(earlier + time.monotonic() - began, 3),
                "inputs": dict(inputs),
                "files": files,
            }
            write_manifest(folder, manifest, {name: stat.st_ctime_ns for name, stat in stats.items()})
            self._rename(folder, stage, slug, key)
            finished = True
        finally:
            if not finished and not resumable:
                shutil.rmtree(folder, ignore_errors=True)
            elif not finished and folder.is_dir():
                with suppress(OSError):  # a full disk: some other file says about when it ended
                    (folder / ATTEMPTS).write_text(attempt)

    @contextmanager
    def receive(self, manifest: Mapping[str, Any], name: str) -> Iterator[Path]:
        """Yield a folder to write the files of an artifact of another store into; it becomes an artifact of this one.

        The caller holds the lock of the key and checks each file against the manifest.

        Args:
            manifest: the artifact's manifest, as `manifest` reads it.
            name: name of its folder in the other store, `<slug>-<key12>`.
        """
        stage, key = str(manifest["stage"]), str(manifest["key"])
        self.hold(key)
        folder = self.root / UNFINISHED / f"received-{key}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            yield folder
            write_manifest(folder, manifest, {name: (folder / name).stat().st_ctime_ns for name in manifest["files"]})
            self._rename(folder, stage, name.removesuffix(f"-{key[:KEY_LENGTH]}"), key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _rename(self, folder: Path, stage: str, slug: str, key: str) -> None:
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", slug).strip("-.")[:40] or stage
        target = self.root / stage / f"{readable}-{key[:KEY_LENGTH]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (self.root / FORMAT_FILE).exists():
            write_text(self.root / FORMAT_FILE, f"{FORMAT}\n")
        # A damaged one, or one of which another machine committed another outcome.
        rename_onto(folder, target, self.find(stage, key), self._nameless())
        fsync_folder(target.parent)

    def _nameless(self) -> Path:
        """Return a path for a folder that is to be removed, where nobody takes it for an artifact."""
        (self.root / UNFINISHED).mkdir(parents=True, exist_ok=True)
        return self.root / UNFINISHED / f"removed-{uuid.uuid4().hex}"

    def entry(self, stage: str, key: str) -> Entry | None:
        """Return one artifact; None if there is none with a readable manifest."""
        folder = self.find(stage, key)
        return None if folder is None else Entry.of(folder)

    def entries(self, stage: str = "[!.]*") -> list[Entry]:
        """Return every artifact (of a stage) with a readable manifest, the most recently used first."""
        found = filter(None, map(Entry.of, self.root.glob(f"{stage}/*")))
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def matches(self, prefix: str) -> list[Entry]:
        """Return the artifacts whose key begins with `prefix`, or whose folder has that name."""
        named = (
            folder
            for folder in self.root.glob("[!.]*/*")
            if folder.name == prefix or folder.name.rsplit("-", 1)[-1].startswith(prefix[:KEY_LENGTH])
        )
        found = filter(None, map(Entry.of, named))
        return [one for one in found if one.key.startswith(prefix) or one.path.name == prefix]

    def resolve(self, prefix: str) -> Entry:
        """Find one artifact by the first digits of its key or the name of its folder.

        Raises:
            StoreError: none or several match.
        """
        matches = self.matches(prefix)
        if len(matches) != 1:
            raise StoreError(
                f"{len(matches)} artifacts match {prefix!r} in {self.root}; `rm-opt store ls` lists the keys."
            )
        return matches[0]

    def collect_garbage(self, keep: int) -> tuple[list[Entry], list[Entry], list[Path]]:
        """Remove all but the `keep` most recently used artifacts of each stage, and unusable folders.

        Unusable are folders whose manifest is damaged, and incomplete artifacts that no process is computing.

        Returns:
            The removed artifacts, those that are kept because they are in use, and the removed unusable folders.
        """
        removed, in_use, unusable, seen = list[Entry](), list[Entry](), list[Path](), dict[str, int]()
        with self.lock("garbage"):
            for entry in self.entries():
                if read_manifest(entry.path) is None:
                    continue
                seen[entry.stage] = seen.get(entry.stage, 0) + 1
                if seen[entry.stage] > keep:
                    (removed if self._remove(entry.path) else in_use).append(entry)
            for folder in filter(_is_unusable, self.root.glob("[!.]*/*")):
                if self._remove(folder, _is_unusable):
                    unusable.append(folder)
            for folder in (self.root / UNFINISHED).glob("*"):
                with self.try_lock(folder.name.rsplit("-", 1)[-1]) as nobody_works:
                    if nobody_works:
                        shutil.rmtree(folder)
        return removed, in_use, unusable

    def _remove(self, folder: Path, still: Callable[[Path], bool] = Path.is_dir) -> bool:
        """Remove a folder unless a process computes or leases its artifact; return whether it was removed.

        `still`: looked at again once no other process can exchange the folder.
        """
        key, nameless = folder.name.rsplit("-", 1)[-1], self._nameless()  # an incomplete artifact never has a name
        with self.try_lock(key) as is_idle:
            if not is_idle:
                return False
            with exclusive(self._lock_path(LEASE_LOCK)):
                if key[:KEY_LENGTH] in self._keys_in_use() or not still(folder):
                    return False
                folder.rename(nameless)
        shutil.rmtree(nameless)
        return True


def _new_lease(folder: Path) -> IO[str]:
    """Create a file with a unique name in `folder`, and lock it."""
    folder.mkdir(parents=True, exist_ok=True)
    lease = (folder / uuid.uuid4().hex).open("x", encoding="utf-8")
    fcntl.flock(lease, fcntl.LOCK_EX)
    return lease


def _end_lease(lease: IO[str]) -> None:
    Path(lease.name).unlink(missing_ok=True)
    lease.close()


def _is_unusable(folder: Path) -> bool:
    return folder.is_dir() and read_manifest(folder) is None


def _spent(folder: Path) -> float:
    """Seconds of all attempts so far at an unfinished artifact; one that was killed counts up to its newest file."""
    try:
        record = json.loads((folder / ATTEMPTS).read_text())
        earlier, began = float(record["earlier"]), float(record["began"])
    except (OSError, ValueError, TypeError, KeyError):  # the first one, or a kill while it began
        return 0.0
    last = max(path.stat().st_mtime for path in folder.rglob("*") if path.is_file())
    return earlier + max(0.0, last - began)


def _written(folder: Path) -> list[Path]:
    """List the files of a finished stage, without temporaries, of which those that a killed writer left are removed."""
    for place in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        remove_abandoned(place, lambda name: True)
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not any(map(TEMPORARY.fullmatch, path.relative_to(folder).parts))]


def flatten(tree: Mapping[str, Any], groups: Container[str] | None = None, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one level with dotted names.

    With `groups` only these names are levels, and a setting with keys of the user's own, such as `rlhf.more_rewards`,
    stays one value.
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        where = f"{prefix}.{name}" if prefix else str(name)
        is_level = isinstance(value, Mapping) and (groups is None or where in groups)
        flat |= flatten(value, groups, where) if is_level else {where: value}
    return flat


Differences = dict[str, tuple[Any, Any]]
"""{dotted input: (value there, value here)}."""


def explain(store: Store, entry: Entry) -> tuple[Entry | None, Differences]:
    """Explain why an artifact was computed, by the earlier artifact of its stage with the most similar inputs.

    Returns:
        That artifact (None if this was the first) and the inputs that differ.
    """
    return nearest((one for one in store.entries(entry.stage) if one.created < entry.created), entry.inputs)


def nearest(entries: Iterable[Entry], inputs: Mapping[str, Any]) -> tuple[Entry | None, Differences]:
    """Return the first artifact with the fewest inputs that differ from `inputs`, and these inputs."""
    found = min(((_differences(one.inputs, inputs), one) for one in entries), key=lambda one: len(one[0]), default=None)
    return (None, {}) if found is None else (found[1], found[0])


def _differences(there: Any, here: Any, name: str = "") -> Differences:
    """Name what differs; parts that are equal, as most are of two artifacts' inputs, are not looked into."""
    if there == here:
        return {}
    left, right = (one if isinstance(one, dict) else {} for one in (there, here))
    before, now = (None if isinstance(one, dict) else one for one in (there, here))
    found = {} if before is None and now is None else {name: (before, now)}
    for part in sorted(left.keys() | right.keys()):
        found |= _differences(left.get(part), right.get(part), f"{name}.{part}" if name else part)
    return found
