"""The pairs and observations of a source's rows, collected in memory or on disk.

As long as every row is one strict pair, nothing is kept but the pairs. From the first row that says more on,
observations are kept next to them; those of the rows before are then made of their pairs.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair
from rmcore.data.pairs_on_disk import RowWriter
from rmcore.data.readers.row_pairs import RowPairs
from rmcore.data.table import OBSERVATIONS, PAIRS


@dataclass(frozen=True, slots=True)
class Collected:
    """Everything that was collected; see `LoadedPairs` for the fields."""

    pairs: Sequence[PreferencePair]
    observations: Sequence[Observation] = ()
    num_over_row_cap: int = 0
    num_ties: int = 0
    num_contradicting: int = 0


class Collector(ExitStack):
    """Takes the rows of a source one after the other: `add` them inside a `with` block, then ask for `collected`.

    Args:
        spool: a file to write the pairs to, the observations next to it; memory then holds some hundred of them. None:
            they are lists.
    """

    def __init__(self, spool: Path | None) -> None:
        super().__init__()
        self.pairs: list[PreferencePair] | RowWriter[PreferencePair]
        """Those so far."""
        self.pairs = [] if spool is None else self.enter_context(RowWriter(spool, PAIRS))
        self._later: list[Observation] | RowWriter[Observation] | None = None
        self._num_before = 0
        """Rows before the first one that says more: each is one pair."""
        self._num_over_row_cap = self._num_ties = self._num_contradicting = 0
        self._has_more = False

    def add(self, row: RowPairs) -> None:
        """Take what the next row says."""
        self._has_more |= row.observation is not None
        if self._later is None and (row.observation is not None or row.contradicts):
            self._num_before = len(self.pairs)
            self._later = []
            if isinstance(self.pairs, RowWriter):
                place = _sibling(self.pairs.path, "later")
                self._later = self.enter_context(RowWriter(place, OBSERVATIONS))
        self.pairs.extend(row.pairs)
        self._num_over_row_cap += row.num_over_cap
        self._num_contradicting += row.contradicts
        if self._later is not None and not row.contradicts:
            said = row.observation or Observation.of_pair(row.pairs[0])
            self._later.extend([said])
            self._num_ties += not row.pairs

    def collected(self) -> Collected:
        """Everything, once the block has ended."""
        pairs = self.pairs.rows() if isinstance(self.pairs, RowWriter) else self.pairs
        return Collected(
            pairs, self._observations(pairs), self._num_over_row_cap, self._num_ties, self._num_contradicting
        )

    def _observations(self, pairs: Sequence[PreferencePair]) -> Sequence[Observation]:
        if not self._later or not self._has_more:  # a row that contradicts itself alone leaves a source of pairs
            return ()
        before = map(Observation.of_pair, islice(pairs, self._num_before))
        if not isinstance(self._later, RowWriter):
            return [*before, *self._later]
        later = self._later.rows()
        if not self._num_before:
            return later
        with RowWriter(_sibling(self._later.path, "observations"), OBSERVATIONS) as writer:
            writer.extend(chain(before, later))
        return writer.rows()


def _sibling(place: Path, name: str) -> Path:
    return place.with_suffix(f".{name}{place.suffix}")
