"""A new data file without doubtful labels, or with weights for all; and a manifest of what was changed.

Nothing is lost: the manifest, a JSONL file next to the new one, has every changed pair as it was, with the reason.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rmcore.core.files import write_json_lines
from rmcore.data.observation import WEIGHT
from rmcore.data.pair import PreferencePair
from rmcore.data.table import write_converted
from rmcore.noise.ledger import FLAGS, Ledger

How = Literal["drop", "weight"]
LEAST_WEIGHT = 0.01
"""A weight has to be above 0."""


def clean(ledger: Ledger, how: How) -> tuple[list[PreferencePair], list[dict[str, Any]]]:
    """The pairs as they are after cleaning, and the manifest's rows.

    `drop` leaves out the pairs that are called, `weight` lets every pair count by the probability that its label is
    right, times the weight that it has. Where the rate is not shown to be above 0 nothing is changed.
    """
    kept: list[PreferencePair] = []
    changes: list[dict[str, Any]] = []
    for pair, row in zip(ledger.pairs, ledger.table.to_dict("records"), strict=True):
        if not (row["called"] if how == "drop" else ledger.model.is_shown):
            kept.append(pair)
            continue
        weight = 0.0
        if how == "weight":
            right = max(LEAST_WEIGHT, 1 - row["posterior"])
            weight = round(float(pair.metadata.get(WEIGHT) or 1.0) * right, 6)
            kept.append(replace(pair, metadata={**pair.metadata, WEIGHT: weight}))
        said = {name: row[name] for name in ("pair_id", "margin", "with_others", "posterior")}
        flags = [name for name in FLAGS if row[name]]
        changes.append({**said, "flags": flags, "weight": weight, "was": pair.to_dict()})
    return kept, changes


def manifest_of(out: Path) -> Path:
    """Where the manifest of a cleaned file is: `cleaned.changes.jsonl` of `cleaned.parquet`."""
    return out.with_name(f"{out.stem}.changes.jsonl")


def write_cleaned(ledger: Ledger, how: How, out: Path, *, unread: Sequence[PreferencePair] = ()) -> tuple[int, int]:
    """Write the cleaned pairs to `out` and what was changed to its manifest, which comes first.

    Args:
        ledger: of the pairs.
        how: see `clean`.
        out: the new file.
        unread: pairs that no model could read, so that nothing is known of them: they follow as they are.

    Returns:
        How many pairs were changed, and how many are in the new file.
    """
    kept, changes = clean(ledger, how)
    write_json_lines(manifest_of(out), changes)
    write_converted([*kept, *unread], out)
    return len(changes), len(kept) + len(unread)
