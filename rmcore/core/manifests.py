"""Keys of inputs, and manifests: what an artifact's folder says of itself, and whether its files are unchanged.

A manifest holds the digest of all the rest of itself. A file whose size and time of change (ctime, which no program can
set) are those that were recorded counts as unchanged and is not read, so that a cached run does not read large
checkpoints.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeGuard

from pydantic_core import from_json

from rmcore.core.errors import ConfigError
from rmcore.core.files import file_digest, fsync_tree, read_object, write_json

SEAL = "manifest_sha256"
"""Field of a manifest that holds the digest of all the rest of it."""


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text. Raises ValueError on NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def make_key(inputs: Mapping[str, Any]) -> str:
    """Digest a stage's inputs: 64 hex digits."""
    return hashlib.sha256(canonical_json(inputs).encode()).hexdigest()


def with_self_digest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with its own digest in it, by which a change of any of it is seen."""
    content = {name: value for name, value in manifest.items() if name != SEAL}
    return {**content, SEAL: make_key(content)}


def is_whole(manifest: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a manifest is what was written."""
    try:
        return isinstance(manifest, dict) and manifest == with_self_digest(manifest)
    except (ValueError, RecursionError):  # a number that is not finite, or nested too deep: it was never written so
        return False


DIGEST = re.compile("[0-9a-f]{64}")
MANIFEST = "MANIFEST.json"
TIMES = ".times.json"
"""File next to the manifest with the time of change (ctime, ns) at which each file was last digested. If it is lost or
wrong, files are digested once more than necessary."""
FORMAT = "1"
"""Version of what artifacts hold and how; it rises with a change after which older ones cannot be read."""
FORMAT_FILE = ".format"
"""Has that version, from the first artifact on."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored artifact as its manifest says, which is not checked: that takes ten times as long."""

    stage: str
    key: str
    path: Path
    created: float
    last_used: float
    num_bytes: int
    wall_seconds: float
    """Seconds that its computation took, in all attempts on this machine."""
    digest: str
    """Digest of its outcome files."""
    inputs: Mapping[str, Any]
    """Inputs that its key digests, as the manifest records them."""

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Read the entry of a folder; None where it has no manifest, or one that cannot be read."""
        try:
            with (folder / MANIFEST).open("rb") as file:
                manifest, state = from_json(file.read()), os.fstat(file.fileno())
            return cls(
                path=folder,
                last_used=state.st_mtime,
                num_bytes=sum(entry["size"] for entry in manifest["files"].values()),
                **{name: manifest[name] for name in ("stage", "key", "created", "wall_seconds", "digest", "inputs")},
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def require_format(root: Path) -> None:
    """Refuse a store that holds artifacts of another version of this package.

    Raises:
        ConfigError: it does; says what to do.
    """
    mark = root / FORMAT_FILE
    found = mark.read_text(encoding="utf-8", errors="replace").strip() if os.access(mark, os.R_OK) else ""
    if found != FORMAT and (found or any(root.glob(f"[!.]*/*/{MANIFEST}"))):
        raise ConfigError(
            f"{root} was written by another version of rm-opt (format {found[:20] or 'without a number'}, this one "
            f"reads {FORMAT}): set RM_OPT_HOME to a new folder, or move that home away; a checkpoint of it can be used "
            "from a copy of its folder elsewhere."
        )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest in `folder`; None if it is missing, unreadable or not what was written."""
    found = read_object(folder / MANIFEST)
    return found if is_manifest(found) else None


def is_manifest(found: Any) -> TypeGuard[dict[str, Any]]:
    """Whether this is what was written as an artifact's manifest: any program can seal something else."""
    if not is_whole(found) or not isinstance(found.get("files"), dict):
        return False
    return all(isinstance(found.get(name), str) for name in ("stage", "key", "digest")) and all(
        isinstance(one, dict) and isinstance(one.get("sha256"), str) and isinstance(one.get("size"), int)
        for one in found["files"].values()
    )


def write_manifest(folder: Path, manifest: Mapping[str, Any], times: Mapping[str, int]) -> None:
    """Write the manifest and the times of change of its files, and force all of the folder to disk."""
    (folder / MANIFEST).write_text(json.dumps(with_self_digest(manifest), indent=1) + "\n")
    write_json(folder / TIMES, times)
    fsync_tree(folder)


def find_damage(folder: Path, key: str, *, read_all: bool = False) -> str | None:
    """Describe the first damage of an artifact, of whose key the first digits are enough; None if it is whole.

    Files whose time of change is the recorded one are not read, unless with `read_all`. If all match, their times are
    recorded.
    """
    manifest = read_manifest(folder)
    if manifest is None or not manifest["key"].startswith(key):
        return f"{folder / MANIFEST} is missing, unreadable or not what was written"
    known, found = {} if read_all else read_object(folder / TIMES) or {}, dict[str, int]()
    for name, entry in manifest["files"].items():
        path = folder / name
        try:
            stat = path.stat()
            if stat.st_size != entry["size"]:
                return f"{path} has {stat.st_size} bytes, its manifest says {entry['size']}"
            found[name] = stat.st_ctime_ns
            if known.get(name) != stat.st_ctime_ns:
                digest = file_digest(path)
                if digest != entry["sha256"]:
                    return f"{path} has sha256 {digest[:12]}, its manifest says {entry['sha256'][:12]}"
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    if found != known:
        with suppress(OSError):  # the store is read-only, or another process records the same
            write_json(folder / TIMES, found)
    return None
