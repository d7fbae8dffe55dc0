"""One row a side: the chosen and the rejected row of a pair, wherever they lie in the source, become one pair.

Rows are grouped by `pair_id` over the whole source, as they may be sorted by side or shuffled. A group must be exactly
one chosen and one rejected row with the same prompt; of any other group all rows are set aside with one reason.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rmcore.data.readers.columns import MARGIN_COLUMNS, SIDE_COLUMNS, without
from rmcore.data.readers.fields import Reason, RowRejected, number, pair_id_value
from rmcore.data.readers.layouts import Layout, side_fields
from rmcore.data.readers.records import RawRecord, RejectedRow, reject
from rmcore.data.readers.row_pairs import RowPairs, of_sides
from rmcore.data.readers.turns import OF_THE_PROMPT

_ROLE_OF_LABEL = {1.0: "chosen", 0.0: "rejected"}


def read_unpaired_rows(records: Iterable[RawRecord], layout: Layout) -> tuple[list[RowPairs], list[RejectedRow], int]:
    """Read all rows.

    Returns:
        Pairs in the order in which their ids first appeared, rows set aside in their order, and the number of rows.
    """
    groups: dict[str, list[RawRecord]] = {}
    rejected: list[RejectedRow] = []
    num_rows = 0
    for record in records:
        num_rows += 1
        try:
            if record.fields is None:
                raise RowRejected(record.problem or Reason.MISSING_VALUE)
            fields = side_fields(layout.columns.rename(record.fields))
            pair_id = pair_id_value(fields.get("pair_id"))
            if not pair_id:
                raise RowRejected(Reason.NO_PAIR_ID)
            groups.setdefault(pair_id, []).append(RawRecord(record.row, fields))
        except RowRejected as rejection:
            rejected.append(reject(record, rejection.reason))
    pairs: list[RowPairs] = []
    for group in groups.values():
        try:
            if len(group) > 2:
                raise RowRejected(Reason.MORE_THAN_TWO_ROWS)  # which two of them belong together is unknown
            pairs.append(layout.parse(_joined([side.fields or {} for side in group])))
        except RowRejected as rejection:
            rejected += [reject(side, rejection.reason) for side in group]
    return pairs, sorted(rejected, key=lambda row: row.row), num_rows


def _role(row: Mapping[str, Any]) -> str:
    """`chosen` or `rejected`, from `role`, else from `label`; a label next to a role may not say the opposite."""
    role = row.get("role")
    try:
        label = number(row.get("label"), Reason.UNKNOWN_ROLE)
    except RowRejected:  # next to a role it may be the label of something else
        label = None
    by_label = None if label is None else _ROLE_OF_LABEL.get(label)
    side = by_label if role is None or role == "" else role
    if side not in ("chosen", "rejected"):
        raise RowRejected(Reason.UNKNOWN_ROLE)
    if by_label not in (None, side):
        raise RowRejected(Reason.ROLE_CONTRADICTS_LABEL)
    return str(side)


def _joined(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of one or two rows; columns in which the sides differ become `chosen_<name>` and `rejected_<name>`."""
    by_role = {_role(row): row for row in rows}
    if len(by_role) < 2:
        raise RowRejected(Reason.OTHER_SIDE_MISSING if len(rows) == 1 else Reason.ONE_SIDE_TWICE)
    chosen, rejected = by_role["chosen"], by_role["rejected"]
    if chosen.get("prompt") != rejected.get("prompt"):
        raise RowRejected(Reason.PROMPTS_DIFFER)
    columns = [next((name for name in SIDE_COLUMNS if name in row), SIDE_COLUMNS[0]) for row in (chosen, rejected)]
    used = {"pair_id", "role", "label", "prompt", *columns, *MARGIN_COLUMNS, *OF_THE_PROMPT}
    if any(chosen.get(name) != rejected.get(name) for name in OF_THE_PROMPT):
        raise RowRejected(Reason.PROMPTS_DIFFER)
    margins = {number(row.get(name), Reason.BAD_MARGIN) for row in (chosen, rejected) for name in MARGIN_COLUMNS}
    if len(margins - {None}) > 1:
        raise RowRejected(Reason.MARGINS_DIFFER)
    return {name: chosen[name] for name in OF_THE_PROMPT if name in chosen} | {
        "pair_id": chosen["pair_id"],
        "prompt": chosen.get("prompt"),
        "chosen": chosen.get(columns[0]),
        "rejected": rejected.get(columns[1]),
        "target_margin": next(iter(margins - {None}), None),
        "metadata": of_sides(without(chosen, *used), without(rejected, *used)),
    }
