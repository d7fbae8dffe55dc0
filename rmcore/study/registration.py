"""Pre-registration: what an experiment claims, frozen with hash and time before its first cell runs.

A registration is a file that is never changed. Declaring something else makes the next one, which says what differs;
so a verdict can always name the claims that it judged.
"""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rmcore.core.errors import StoreError
from rmcore.core.files import exclusive, write_json
from rmcore.core.manifests import canonical_json, make_key
from rmcore.core.store import flatten
from rmcore.reporting.experiment_schema import Registration

LONGEST_VALUE = 120
"""Characters of a value in a line that says what changed."""


def register(
    folder: Path, frozen: Mapping[str, Any], write_once: Callable[[str, bytes], bytes] | None = None
) -> Registration:
    """Freeze a declaration, or find it where it was frozen before: its claims are as old as their first writing.

    Args:
        folder: all registrations of one experiment and size; made here.
        frozen: everything that decides a verdict, JSON-ready.
        write_once: writes a registration down for all machines under a name that nobody can write again, and gives
            the record that is kept. Who declared it first, anywhere, has said when.

    Raises:
        StoreError: an earlier registration was changed after it was frozen.
    """
    frozen = json.loads(canonical_json(frozen))  # as it is read back, lists for tuples
    digest = make_key(frozen)
    with exclusive(folder / ".lock"):
        earlier = [read_registration(path) for path in sorted(folder.glob("*.json"))]
        for known in earlier:
            if known["hash"] == digest:
                return _summary(known, folder)
        number = earlier[-1]["number"] + 1 if earlier else 1
        record = {
            "hash": digest,
            "number": number,
            "frozen_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "changes": describe_changes(earlier[-1]["frozen"], frozen) if earlier else [],
            "frozen": frozen,
        }
        if write_once is not None:
            stands = write_once(f"{folder.name}/{digest}.json", json.dumps(record).encode())
            first = _frozen_at(stands, digest)
            if first is None:
                raise StoreError(
                    f"the shared registration {folder.name}/{digest}.json is not what was frozen: it was changed or "
                    "damaged. Restore it, or remove it if no verdict names it."
                )
            record["frozen_at"] = first
        write_json(_path(folder, number, digest), record)
    return _summary(record, folder)


def _frozen_at(content: bytes, digest: str) -> str | None:
    """When a registration was frozen; None where it is not the one of that digest."""
    try:
        record = json.loads(content)
        return str(record["frozen_at"]) if make_key(record["frozen"]) == digest else None
    except (ValueError, KeyError, TypeError):
        return None


def read_registration(path: Path) -> dict[str, Any]:
    """Read a registration and check that it is what was frozen.

    Raises:
        StoreError: it is no registration, or its content does not have the number and hash that it names.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        whole = make_key(record["frozen"]) == record["hash"]
        whole = whole and path.name == _path(path.parent, record["number"], record["hash"]).name
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise StoreError(
            f"the registration {path} was changed after it was frozen: what it says is not what its hash names. "
            "Restore the file, or remove it if no verdict names it."
        )
    return record


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line for each value that differs: `hypotheses.H1.threshold: 0.03 -> 0.02`; also where only an order does."""
    old, new = (flatten(_by_name(record)) for record in (before, after))
    lines = [
        f"{name}: in another order: {', '.join(one['name'] for one in after[name])}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name] and _by_name(before[name]) == _by_name(after[name])
    ]
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append(f"{name} removed (was {_shown(old[name])})")
        elif name not in old:
            lines.append(f"{name} added: {_shown(new[name])}")
        elif canonical_json(old[name]) != canonical_json(new[name]):  # to Python, true is 1
            lines.append(f"{name}: {_shown(old[name])} -> {_shown(new[name])}")
    return lines


def _by_name(value: Any) -> Any:
    """Lists of named things as mappings, so that a hypothesis is found again at any place."""
    if isinstance(value, Mapping):
        return {name: _by_name(item) for name, item in value.items()}
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(item, Mapping) and "name" in item for item in value)
    ):
        return {str(item["name"]).replace(".", "_"): _by_name(item) for item in value}
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _path(folder: Path, number: int, digest: str) -> Path:
    return folder / f"{number:04d}-{digest[:12]}.json"


def _summary(record: Mapping[str, Any], folder: Path) -> Registration:
    return {
        "hash": record["hash"],
        "number": record["number"],
        "frozen_at": record["frozen_at"],
        "changes": record["changes"],
        "path": str(_path(folder, record["number"], record["hash"])),
    }
