"""One row a side: the chosen and the rejected row of a pair, wherever they lie in the source, become one pair.

Rows are grouped by `pair_id` over all rows that are read, as they may be sorted by side or shuffled: the whole source,
or up to the row that completes the last pair of a limit. A group must be exactly one chosen and one rejected row with
the same prompt; of any other group all rows are set aside with one reason. Where a limit ends the reading before the
source does, rows without their other side are counted and not set aside.
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


def read_unpaired_rows(
    records: Iterable[RawRecord], layout: Layout, limit: int | None = None
) -> tuple[list[RowPairs], list[RejectedRow], int, int]:
    """Read rows until `limit` pairs are whole.

    Returns:
        Pairs in the order in which their ids first appeared, rows set aside in their order, the number of rows that
        were read, and how many of them wait for their other side, which the rows behind the limit may hold.
    """
    groups: dict[str, list[RawRecord]] = {}
    pairs: dict[str, RowPairs] = {}
    reasons: dict[str, Reason] = {}
    rejected: list[RejectedRow] = []
    num_rows = num_waiting = 0
    is_cut = False
    for record in records:
        if len(pairs) == limit:
            is_cut = True
            break
        num_rows += 1
        try:
            if record.fields is None:
                raise RowRejected(record.problem or Reason.MISSING_VALUE)
            fields = side_fields(layout.columns.rename(record.fields))
            pair_id = pair_id_value(fields.get("pair_id"))
            if not pair_id:
                raise RowRejected(Reason.NO_PAIR_ID)
        except RowRejected as rejection:
            rejected.append(reject(record, rejection.reason))
            continue
        group = groups.setdefault(pair_id, [])
        group.append(RawRecord(record.row, fields))
        pairs.pop(pair_id, None)
        try:
            if len(group) > 2:
                raise RowRejected(Reason.MORE_THAN_TWO_ROWS)  # which two of them belong together is unknown
            pairs[pair_id] = layout.parse(_joined([side.fields or {} for side in group]))
        except RowRejected as rejection:
            reasons[pair_id] = rejection.reason
    for pair_id, group in groups.items():
        if pair_id in pairs:
            continue
        if is_cut and reasons[pair_id] is Reason.OTHER_SIDE_MISSING:
            num_waiting += len(group)
        else:
            rejected += [reject(side, reasons[pair_id]) for side in group]
    return (
        [pairs[pair_id] for pair_id in groups if pair_id in pairs],
        sorted(rejected, key=lambda row: row.row),
        num_rows,
        num_waiting,
    )


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
