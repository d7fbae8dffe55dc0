"""Tokenized pairs on disk: what a training draws its steps from, whatever their number.

Pairs are tokenized a batch at a time into Arrow files that are mapped into memory, so the system keeps of them what is
in use. Several processes of one host share the work: the batches are dealt out in turn, and each opens all files.
"""

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import DroppedPair, Renderer, TokenizedPair, TokenizedSide, count_cut

PAIRS_A_BATCH = 1024
"""Pairs that are tokenized, and lie in the file, together; the last batch has fewer, and any loses what is left out."""
UNREADABLE = "cannot be read"
OVER_LENGTH = "a side is longer than max_seq_len"
EQUAL_AFTER_CUT = "sides equal after the cut"
EQUAL_TOKENS = "sides equal as tokens"
REASONS = (OVER_LENGTH, EQUAL_AFTER_CUT, EQUAL_TOKENS)
"""Why a pair is not trained on. In evaluation none is left out: equal sides are a tie there (`rendering.count_cut`)."""
Item = TypeVar("Item")
Held = TypeVar("Held")
Record_co = TypeVar("Record_co", covariant=True)
_SCHEMA = pa.schema(
    [
        pa.field("pair_id", pa.string(), nullable=False),
        pa.field("chosen", pa.list_(pa.int32()), nullable=False),
        pa.field("rejected", pa.list_(pa.int32()), nullable=False),
        pa.field("chosen_cut", pa.int32(), nullable=False),
        pa.field("rejected_cut", pa.int32(), nullable=False),
        pa.field("target_margin", pa.float64()),
    ]
)


class Records(Protocol[Record_co]):
    """Records that can be gone through, more than once: a list, or `rmcore.data.pairs_on_disk`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Record_co]: ...


Pairs = Records[PreferencePair]


class _Side(NamedTuple):
    """One side of a batch of B pairs."""

    ids: npt.NDArray[np.int32]  # of all of them, joined
    starts: npt.NDArray[np.int32]  # (B + 1,) where each begins in `ids`, and the end
    num_cut: npt.NDArray[np.int32]  # (B,)

    def at(self, row: int) -> TokenizedSide:
        return TokenizedSide(self.ids[self.starts[row] : self.starts[row + 1]].tolist(), int(self.num_cut[row]))


class _Batch(NamedTuple):
    pair_id: pa.StringArray
    chosen: _Side
    rejected: _Side
    target_margin: pa.DoubleArray

    def at(self, row: int) -> TokenizedPair:
        return TokenizedPair(
            self.pair_id[row].as_py(), self.chosen.at(row), self.rejected.at(row), self.target_margin[row].as_py()
        )


class TokenizedOnDisk(Sequence[Item], Generic[Item, Held]):
    """N tokenized items in the order of their source, mapped from files whose batches were dealt out in turn.

    A kind of item says how a batch is held in memory (`_hold`), and how one of its rows is read (`_at`).
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        readers = [pa.ipc.open_file(pa.memory_map(str(file))) for file in files]
        number = sum(reader.num_record_batches for reader in readers)
        turns = (divmod(batch, len(readers)) for batch in range(number))
        batches = [readers[file].get_batch(place) for place, file in turns]
        self._batches = [self._hold(batch) for batch in batches]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])

    @abstractmethod
    def _hold(self, batch: pa.RecordBatch) -> Held: ...

    @abstractmethod
    def _at(self, batch: Held, row: int) -> Item: ...

    def __reduce__(self) -> tuple[type, tuple[list[Path]]]:  # a process that loads data maps the files itself
        return type(self), (self._files,)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...
    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        index = place + len(self) if place < 0 else place
        if not 0 <= index < len(self):
            raise IndexError(f"item {place} of {len(self)}")
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._at(self._batches[batch], index - int(self._starts[batch]))


class TokenizedPairs(TokenizedOnDisk[TokenizedPair, _Batch]):
    """P tokenized pairs in the order of their source, read as they are needed from what `write_tokenized` wrote."""

    def _hold(self, batch: pa.RecordBatch) -> _Batch:
        return _mapped(batch)

    def _at(self, batch: _Batch, row: int) -> TokenizedPair:
        return batch.at(row)

    def __iter__(self) -> Iterator[TokenizedPair]:
        for batch in self._batches:
            yield from map(batch.at, range(len(batch.pair_id)))

    def lengths(self) -> npt.NDArray[np.int32]:
        """(P, 2) tokens of the chosen and the rejected side."""
        both = [np.stack([np.diff(one.chosen.starts), np.diff(one.rejected.starts)], axis=1) for one in self._batches]
        return np.concatenate([np.zeros((0, 2), dtype=np.int32), *both])

    def digest(self) -> str:
        """Hex digits that depend on all pairs, their order and the batches that they were tokenized in."""
        digest = hashlib.sha256()
        for batch in self._batches:
            digest.update("\n".join(batch.pair_id.to_pylist()).encode())
            for side in (batch.chosen, batch.rejected):
                digest.update(np.diff(side.starts).tobytes())
                digest.update(side.ids[side.starts[0] : side.starts[-1]].tobytes())
            digest.update(repr(batch.target_margin.to_pylist()).encode())
        return digest.hexdigest()


def _mapped(batch: pa.RecordBatch) -> _Batch:
    def side(name: str) -> _Side:
        lists = batch.column(name)
        return _Side(lists.values.to_numpy(), lists.offsets.to_numpy(), batch.column(f"{name}_cut").to_numpy())

    return _Batch(batch.column("pair_id"), side("chosen"), side("rejected"), batch.column("target_margin"))


def select_training_pairs(
    tokenized: Sequence[TokenizedPair], *, over_length: Literal["cut", "drop"]
) -> tuple[list[TokenizedPair], list[DroppedPair]]:
    """Split pairs into those to train on and those left out, each in their given order.

    Args:
        tokenized: pairs, already cut to the limit.
        over_length: `drop` leaves out a pair with a cut side, `cut` keeps it. Either way a pair whose sides are the
            same tokens, by the cut or by the tokenizer, is left out: its margin is 0 whatever the weights.

    Raises:
        DataError: there were pairs and none is left.
    """
    kept: list[TokenizedPair] = []
    dropped: list[DroppedPair] = []
    for pair in tokenized:
        reason = reason_left_out(pair, over_length)
        if reason is None:
            kept.append(pair)
        else:
            dropped.append(DroppedPair(pair.pair_id, reason, pair.truncation))
    if dropped and not kept:
        raise nothing_left(Counter(pair.reason for pair in dropped))
    return kept, dropped


def reason_left_out(pair: TokenizedPair, over_length: Literal["cut", "drop"]) -> str | None:
    """Why a pair is not trained on, if so; see `select_training_pairs`."""
    if over_length == "drop" and any(pair.truncation.values()):
        return OVER_LENGTH
    if pair.chosen.ids != pair.rejected.ids:
        return None
    return EQUAL_AFTER_CUT if pair.equal_after_cut else EQUAL_TOKENS


def nothing_left(reasons: Counter[str]) -> DataError:
    """Say that every pair was left out; `reasons` counts why."""
    counts = ", ".join(f"{why}: {n}" for why, n in reasons.items())
    if set(reasons) == {EQUAL_TOKENS}:
        remedy = "this model's tokenizer makes one of both sides, as one without capitals may; take another model"
    else:
        remedy = "raise max_seq_len" + (", or cut such sides with over_length=cut" if OVER_LENGTH in reasons else "")
    return DataError(f"none of the {reasons.total()} training pairs is left ({counts}): {remedy}.")


def token_lengths(pairs: Sequence[TokenizedPair]) -> npt.NDArray[np.int32]:
    """(P, 2) tokens of the chosen and the rejected side of pairs in memory or on disk."""
    if isinstance(pairs, TokenizedPairs):
        return pairs.lengths()
    return np.array([(len(pair.chosen.ids), len(pair.rejected.ids)) for pair in pairs], dtype=np.int32).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The pairs that can be used after tokenizing, and all that is known of the others."""

    pairs: TokenizedPairs
    cut: dict[str, int]
    """`rendering.count_cut` of all pairs that can be read, also of those left out for their length."""
    num_left_out: int
    records: Sequence[Path]
    """Files with a line for each pair left out: `row`, its place in the source, and `DroppedPair.to_dict`."""

    def left_out(self) -> Iterator[dict[str, Any]]:
        """The records of the pairs left out, in the order of the source."""
        return merge(*map(json_lines, self.records), key=itemgetter("row"))


Sorted = tuple[list[dict[str, Any] | DroppedPair], Mapping[str, int]]
"""A row for each record of a batch, or why it is left out; and counts as those of `rendering.count_cut`."""


def write_tokenized(
    renderer: Renderer,
    pairs: Pairs,
    folder: Path,
    *,
    over_length: Literal["cut", "drop"] | None,
    share: tuple[int, int] = (0, 1),
    report: Report = silent,
) -> None:
    """Tokenize this process's share of the pairs into `folder`; `open_tokenized` reads it when all have written.

    Args:
        renderer: of the model.
        pairs: all of them; the same ones in every process.
        folder: of this host alone.
        over_length: see `select_training_pairs`; None keeps every pair that can be read.
        share: number of this process, from 0, and number of processes of this host.
        report: told of the pairs that this process has passed.
    """

    def tokenize(batch: list[PreferencePair], first: int) -> tuple[list[dict[str, Any] | DroppedPair], dict[str, int]]:
        found = renderer.try_pairs(batch, report=partial(_report_of, report, first, len(pairs)))
        return [_row(one, over_length) for one in found], count_cut(
            [one for one in found if isinstance(one, TokenizedPair)]
        )

    write_share(
        folder, _SCHEMA, pairs, PAIRS_A_BATCH, share, tokenize, lambda why: why if why in REASONS else UNREADABLE
    )


def write_share(
    folder: Path,
    schema: pa.Schema,
    records: Records[Item],
    size: int,
    share: tuple[int, int],
    tokenize: Callable[[list[Item], int], Sorted],
    counted: Callable[[str], str] = str,
) -> None:
    """Write this process's share of tokenized records, and what is known of them, for `read_counts`.

    Args:
        folder: of this host alone; it gets NUMBER.arrow with the rows, NUMBER.jsonl with a line for each record that is
            left out, and NUMBER.json with the counts.
        schema: of the rows.
        records: all of them; the same ones in every process.
        size: records of a batch; batches are dealt out in turn.
        share: number of this process, from 0, and number of processes of this host.
        tokenize: given a batch and the place of its first record.
        counted: reason -> the name under which it is counted.
    """
    number, of = share
    folder.mkdir(parents=True, exist_ok=True)
    cut, reasons = Counter(count_cut([])), Counter[str]()
    with (
        pa.ipc.new_file(str(folder / f"{number}.arrow"), schema) as writer,
        (folder / f"{number}.jsonl").open("w", encoding="utf-8") as left_out,
    ):
        each = iter(records)
        for first in range(0, len(records), size):
            batch = list(islice(each, size))
            if first // size % of != number:
                continue
            found, cut_here = tokenize(batch, first)
            cut.update(cut_here)
            kept = [one for one in found if not isinstance(one, DroppedPair)]
            writer.write_batch(pa.RecordBatch.from_pylist(kept, schema=schema))
            for row, one in enumerate(found, first):
                if isinstance(one, DroppedPair):
                    left_out.write(json.dumps({"row": row, **one.to_dict()}) + "\n")
                    reasons[counted(one.reason)] += 1
    write_json(folder / f"{number}.json", {"cut": cut, "reasons": reasons})


def _report_of(report: Report, first: int, num_pairs: int, num_sides: int, _total: int, _text: str) -> None:
    report(first + num_sides // 2, num_pairs, "pairs tokenized")


def open_tokenized(folder: Path, num_pairs: int, *, parts: int = 1) -> Tokenized:
    """Open what `parts` processes have written of `num_pairs` pairs.

    Raises:
        DataError: there were pairs, and none can be read, or none is left.
    """
    cut, reasons, records = read_counts(folder, parts)
    pairs = TokenizedPairs([folder / f"{number}.arrow" for number in range(parts)])
    result = Tokenized(pairs, cut, reasons.total(), records)
    if num_pairs and reasons[UNREADABLE] == num_pairs:
        reason = next(result.left_out())["reason"]
        raise DataError(f"none of the {num_pairs} pairs can be read as this model reads text: {reason}")
    if num_pairs and not result.pairs:
        del reasons[UNREADABLE]
        raise nothing_left(reasons)
    return result


def read_counts(folder: Path, parts: int) -> tuple[dict[str, int], Counter[str], list[Path]]:
    """Sum what `parts` processes have counted: as `rendering.count_cut`, by reason left out; and the files of these."""
    counts = [json.loads((folder / f"{number}.json").read_text()) for number in range(parts)]
    cut = {name: sum(one["cut"][name] for one in counts) for name in count_cut([])}
    reasons = sum((Counter(one["reasons"]) for one in counts), Counter[str]())
    return cut, reasons, [folder / f"{number}.jsonl" for number in range(parts)]


def _row(pair: TokenizedPair | DroppedPair, over_length: Literal["cut", "drop"] | None) -> dict[str, Any] | DroppedPair:
    if isinstance(pair, DroppedPair):
        return pair
    reason = None if over_length is None else reason_left_out(pair, over_length)
    if reason is not None:
        return DroppedPair(pair.pair_id, reason, pair.truncation)
    return {
        "pair_id": pair.pair_id,
        "chosen": pair.chosen.ids,
        "rejected": pair.rejected.ids,
        "chosen_cut": pair.chosen.num_cut,
        "rejected_cut": pair.rejected.num_cut,
        "target_margin": pair.target_margin,
    }


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON Lines, one after the other."""
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)
