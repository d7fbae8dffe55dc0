"""A new data file without, with turned, or with down-weighted doubtful labels; and a manifest of what was changed.

Nothing is lost: the manifest, a JSONL file next to the new one, has every changed pair as it was, with the reason.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rmcore.core.files import write_json_lines
from rmcore.data.observation import WEIGHT
from rmcore.data.pair import PreferencePair
from rmcore.data.table import write_converted
from rmcore.noise.ledger import FLAGS, Ledger

How = Literal["drop", "flip", "weight"]
TURNED_FROM = "label_turned_from"
"""Where a turned pair's metadata have the id that it had before."""
LEAST_WEIGHT = 0.01
"""A weight has to be above 0."""


def clean(ledger: Ledger, how: How) -> tuple[list[PreferencePair], list[dict[str, Any]]]:
    """The pairs as they are after cleaning, and the manifest's rows.

    `drop` leaves out the pairs that are called, `flip` exchanges their answers (the new pair has a new id, and no
    annotated strength, which was that of the other order), `weight` lets every pair count by the probability that its
    label is right, times the weight that it has. Where the rate is not shown to be above 0 nothing is changed.
    """
    kept: list[PreferencePair] = []
    changes: list[dict[str, Any]] = []
    for pair, row in zip(ledger.pairs, ledger.table.to_dict("records"), strict=True):
        is_changed = row["called"] or (how == "weight" and ledger.model.is_shown)
        new = _changed(pair, how, row["posterior"]) if is_changed else pair
        if new is not None:
            kept.append(new)
        if is_changed:
            changes.append(
                {
                    "pair_id": pair.pair_id,
                    "change": how,
                    "margin": row["margin"],
                    "with_others": row["with_others"],
                    "posterior": row["posterior"],
                    "flags": [name for name in FLAGS if row[name]],
                    "now": None if new is None else {"pair_id": new.pair_id, "weight": new.metadata.get(WEIGHT, 1.0)},
                    "was": pair.to_dict(),
                }
            )
    return kept, changes


def _changed(pair: PreferencePair, how: How, posterior: float) -> PreferencePair | None:
    if how == "drop":
        return None
    if how == "flip":
        return PreferencePair(
            pair.prompt, pair.rejected, pair.chosen, metadata={**pair.metadata, TURNED_FROM: pair.pair_id}
        )
    weight = float(pair.metadata.get(WEIGHT) or 1.0) * max(LEAST_WEIGHT, 1 - posterior)
    return PreferencePair(
        pair.prompt,
        pair.chosen,
        pair.rejected,
        pair.target_margin,
        {**pair.metadata, WEIGHT: round(weight, 6)},
        pair.pair_id,
    )


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
