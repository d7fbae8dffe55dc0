"""One row a side: the chosen and the rejected row of a pair, wherever they lie in the source, become one pair.

Rows are grouped by `pair_id` over the whole source, as they may be sorted by side or shuffled. A group must be exactly
one chosen and one rejected row with the same prompt; of any other group all rows are set aside with one reason. Only a
row that waits for its other side is kept as it was read: memory holds the pairs and what is unmatched.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.data.readers.columns import MARGIN_COLUMNS, SIDE_COLUMNS
from rmcore.data.readers.fields import Reason, RowRejected, number, pair_id_value
from rmcore.data.readers.files import RawRecord
from rmcore.data.readers.layouts import Layout, side_fields
from rmcore.data.readers.rejected import RejectedRow, reject
from rmcore.data.readers.turns import OF_THE_PROMPT

_ROLE_OF_LABEL = {1.0: "chosen", 0.0: "rejected"}


@dataclass(slots=True)
class _Group:
    """The rows of one pair_id read so far: one that waits, or a whole pair, or what was set aside."""

    waiting: RawRecord | None
    pair: PreferencePair | None = None
    observation: Observation | None = None
    """All that the rows say, where that is more than the pair."""
    rows: tuple[int, int] = (0, 0)
    """Numbers of the chosen and the rejected row of `pair`."""
    rejected: list[RejectedRow] = field(default_factory=list)
    counted: bool = False
    """Whether `pair` is among the first pairs, all of whose predecessors are settled."""


class SideRows:
    """Pairs from rows of one side each.

    Args:
        layout: what `recognise` gave; its `parse` reads the joined record.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._groups: dict[str, _Group] = {}
        self._unsettled: deque[_Group] = deque()
        self._loose: list[RejectedRow] = []
        self.num_first_pairs = 0
        """Pairs that are whole and before which, in order of first appearance, no group waits for a row."""

    def add(self, record: RawRecord) -> None:
        """Take the next row."""
        if record.fields is None:
            self._loose.append(reject(record, record.problem or Reason.MISSING_VALUE))
            return
        record = RawRecord(record.row, side_fields(self._layout.columns.rename(record.fields)))
        try:
            pair_id = pair_id_value(_fields(record).get("pair_id"))
            if not pair_id:
                raise RowRejected(Reason.NO_PAIR_ID)
        except RowRejected as rejection:
            self._loose.append(reject(record, rejection.reason))
            return
        group = self._groups.get(pair_id)
        if group is None:
            group = self._groups[pair_id] = _Group(record)
            self._unsettled.append(group)
        elif group.waiting is not None:
            self._settle(group, group.waiting, record)
        else:
            self._break(group, record)
        while self._unsettled and self._unsettled[0].waiting is None:
            first = self._unsettled.popleft()
            first.counted = first.pair is not None
            self.num_first_pairs += first.counted

    def pairs(self) -> list[PreferencePair]:
        """The whole pairs, in the order in which their ids first appeared."""
        return [group.pair for group in self._groups.values() if group.pair is not None]

    def observations(self, limit: int | None) -> list[Observation]:
        """All that the rows of the first `limit` pairs say, in order; none where that is no more than the pairs."""
        said = [(group.pair, group.observation) for group in self._groups.values() if group.pair is not None][:limit]
        if all(observation is None for _, observation in said):
            return []
        return [Observation.of_pair(pair) if observation is None else observation for pair, observation in said]

    def rejected(self, *, at_end: bool) -> list[RejectedRow]:
        """The rows set aside, in their order; `at_end` of the source also those whose other side never came."""
        rows = [row for group in self._groups.values() for row in group.rejected] + self._loose
        if at_end:
            waiting = [group.waiting for group in self._groups.values() if group.waiting is not None]
            rows += [reject(record, _reason_alone(record)) for record in waiting]
        return sorted(rows, key=lambda row: row.row)

    def _settle(self, group: _Group, first: RawRecord, second: RawRecord) -> None:
        group.waiting = None
        try:
            chosen, rejected = _by_role(first, second)
            joined = self._layout.parse(_joined(_fields(chosen), _fields(rejected)))
            (group.pair,), group.observation = joined.pairs, joined.observation
            group.rows = (chosen.row, rejected.row)
        except RowRejected as rejection:
            group.rejected = [reject(record, rejection.reason) for record in (first, second)]

    def _break(self, group: _Group, record: RawRecord) -> None:
        """A third row: which two of the three belong together is unknown."""
        if group.pair is not None:
            group.rejected = _as_rows(group.pair, group.rows)
            group.pair = group.observation = None
            self.num_first_pairs -= group.counted
        reason = Reason.MORE_THAN_TWO_ROWS
        group.rejected = [replace(row, reason=str(reason)) for row in group.rejected] + [reject(record, reason)]


def read_unpaired_rows(
    records: Iterable[RawRecord], layout: Layout, limit: int | None
) -> tuple[SideRows, list[RejectedRow], int]:
    """Read (sides with their pairs, rows set aside, number of rows) from rows of one side each.

    With a `limit` one reads on until the first so many pairs are whole, as far as the end if need be. Sides of later
    pairs that were met on the way are then no pairs and not set aside either: their other halves may be yet to come.
    """
    sides = SideRows(layout)
    num_rows = 0
    for record in records:
        num_rows += 1
        sides.add(record)
        if limit is not None and sides.num_first_pairs >= limit:
            return sides, sides.rejected(at_end=False), num_rows
    return sides, sides.rejected(at_end=True), num_rows


def _fields(record: RawRecord) -> Mapping[str, Any]:
    return record.fields or {}


def _role(row: Mapping[str, Any]) -> str:
    """`chosen` or `rejected`, from `role`, else from `label`; a label next to a role may not say the opposite."""
    role = row.get("role")
    try:
        label = number(row.get("label"), Reason.UNKNOWN_ROLE)
    except RowRejected:  # next to a role it may be the label of something else
        label = None
    by_label = None if label is None else _ROLE_OF_LABEL.get(label)
    found = by_label if role is None or role == "" else role
    if found not in ("chosen", "rejected"):
        raise RowRejected(Reason.UNKNOWN_ROLE)
    if by_label not in (None, found):
        raise RowRejected(Reason.ROLE_CONTRADICTS_LABEL)
    return found


def _reason_alone(record: RawRecord) -> Reason:
    try:
        _role(_fields(record))
    except RowRejected as rejection:
        return rejection.reason
    return Reason.OTHER_SIDE_MISSING


def _by_role(first: RawRecord, second: RawRecord) -> tuple[RawRecord, RawRecord]:
    """(chosen, rejected)."""
    roles = _role(_fields(first)), _role(_fields(second))
    if roles[0] == roles[1]:
        raise RowRejected(Reason.ONE_SIDE_TWICE)
    return (first, second) if roles[0] == "chosen" else (second, first)


def _joined(chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> dict[str, Any]:
    """One record of the pair; columns in which the sides differ become `chosen_<name>` and `rejected_<name>`."""
    if chosen.get("prompt") != rejected.get("prompt"):
        raise RowRejected(Reason.PROMPTS_DIFFER)
    columns = [next((name for name in SIDE_COLUMNS if name in row), SIDE_COLUMNS[0]) for row in (chosen, rejected)]
    used = {"pair_id", "role", "label", "prompt", *columns, *MARGIN_COLUMNS}
    metadata: dict[str, Any] = {}
    for name in [name for name in {**chosen, **rejected} if name not in used]:
        if chosen.get(name) == rejected.get(name):
            metadata[name] = chosen.get(name)
        elif name in OF_THE_PROMPT:
            raise RowRejected(Reason.PROMPTS_DIFFER)
        else:
            metadata |= {f"chosen_{name}": chosen.get(name), f"rejected_{name}": rejected.get(name)}
    of_prompt = {name: metadata.pop(name) for name in OF_THE_PROMPT if name in metadata}
    return of_prompt | {
        "pair_id": chosen["pair_id"],
        "prompt": chosen.get("prompt"),
        "chosen": chosen.get(columns[0]),
        "rejected": rejected.get(columns[1]),
        "target_margin": _margin(chosen, rejected),
        "metadata": {name: value for name, value in metadata.items() if value is not None},
    }


def _margin(*sides: Mapping[str, Any]) -> float | None:
    """The annotated margin of the pair, which one row or both may carry."""
    values = {number(row.get(name), Reason.BAD_MARGIN) for row in sides for name in MARGIN_COLUMNS} - {None}
    if len(values) > 1:
        raise RowRejected(Reason.MARGINS_DIFFER)
    return values.pop() if values else None


def _as_rows(pair: PreferencePair, rows: tuple[int, int]) -> list[RejectedRow]:
    """The two rows that a pair was made of, shown from what the pair holds."""
    sides = (("chosen", pair.chosen), ("rejected", pair.rejected))
    return [
        reject(
            RawRecord(
                row, {"pair_id": pair.pair_id, "role": role, "prompt": prompt_text(pair.prompt), "response": text}
            ),
            Reason.MORE_THAN_TWO_ROWS,
        )
        for row, (role, text) in zip(rows, sides, strict=True)
    ]
