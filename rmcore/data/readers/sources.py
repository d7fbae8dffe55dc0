"""Any source of preference data as pairs: a file, a `datasets` folder or a hub name goes in, `LoadedPairs` come out.

The road: `iter_records` gives raw records (`files`, `hub`), `layouts` makes each into pairs or refuses it with a
reason, and what is refused is kept next to the pairs, so that nothing gets lost without being counted. Where a source
says more than strict pairs, all that it says is there as observations, too.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from rmcore.core.errors import DataError
from rmcore.core.files import known_digest, known_digests, write_json_lines
from rmcore.core.progress import Report, silent
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair
from rmcore.data.pairs_on_disk import RowWriter
from rmcore.data.readers.cluster import SCHEME, cluster_digest, read_cluster
from rmcore.data.readers.columns import USUAL_COLUMNS, ColumnMap
from rmcore.data.readers.fields import Reason, RowRejected
from rmcore.data.readers.files import is_file_name, is_text_file, is_utf8, read_file
from rmcore.data.readers.graded_rows import GradedRows
from rmcore.data.readers.hub import hub_revision, read_folder, read_hub
from rmcore.data.readers.layouts import GRADED_ROWS, SIDE_ROWS, Layout, recognise
from rmcore.data.readers.records import RawRecord, RejectedRow, reject
from rmcore.data.readers.row_pairs import RowPairs
from rmcore.data.readers.tables import conversion_to_utf8
from rmcore.data.readers.unpaired_rows import read_unpaired_rows
from rmcore.data.readers.unread import INCOMPLETE, INCOMPLETE_SIDES, counted, refuse_incomplete, unread_columns
from rmcore.data.table import OBSERVATIONS, PAIRS

FEW_BAD_ROWS = 0.05
"""Share of rows that are not UTF-8, or not CSV, above which a text file is refused."""
ROWS_A_REPORT = 1000
"""Between two reports of how far a source is read."""
_PROBE_ROWS = 100
"""Rows whose columns together decide the layout: more than one, as JSON rows may each leave out what they lack."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class LoadedPairs:
    """The pairs and the refused rows of one source. `num_rows` rows were read; `layout` is how they were understood.

    Of a row that several people have labelled, each label counts as a row.
    """

    pairs: Sequence[PreferencePair]
    """A list, or on disk where a place was named for them."""
    rejected: list[RejectedRow]
    num_rows: int
    layout: str
    source: str
    num_over_cap: int = 0
    """Usable pairs left out because their prompt has `cap` others (`cap_prompts`)."""
    cap: int | None = None
    num_held_out: int = 0
    """Usable pairs left out by `exclude_held_out_conversations`."""
    num_over_row_cap: int = 0
    """Usable pairs left out because their row of ranked answers gave enough."""
    observations: Sequence[Observation] = ()
    """All that the rows say, in order, where that is more than the pairs; empty where it is strict pairs alone. On disk
    where the pairs are."""
    num_ties: int = 0
    """Rows that say no answer is better: observations that give no pair."""
    num_contradicting: int = 0
    """Rows that give one text two ranks: their pairs are here, and no observation."""
    sentences: Sequence[str] = ()
    """Further notices, of the observations."""

    def notices(self, num_pairs: int | None = None) -> list[str]:
        """Say what a reader of the numbers must know about ties and usable pairs that are not here: a sentence each.

        Args:
            num_pairs: how many pairs were read; None: those that are here.
        """
        source, num_rows = self.source, self.num_rows
        counts = (
            (self.num_over_row_cap, "are beyond what one row of ranked answers gives: a random choice is kept"),
            (
                self.num_over_cap,
                f"are left out: data.pairs_per_prompt={self.cap} takes at most {self.cap} of each prompt, and null all",
            ),
            (
                self.num_held_out,
                "share their prompt, or a dialogue's first user turn, with held-out pairs: taken out of training",
            ),
        )
        usable = (len(self.pairs) if num_pairs is None else num_pairs) + sum(count for count, _ in counts)
        sentences = []
        for count, what in counts:
            if count:
                sentences.append(f"{count:,} of {usable:,} pairs of {source} {what}.")
            usable -= count
        if self.num_ties:
            sentences.append(
                f"{self.num_ties:,} of {num_rows:,} rows of {source} are ties: they give no pair, and are trained on "
                "as ties."
            )
        if self.num_contradicting:
            sentences.append(
                f"{self.num_contradicting:,} of {num_rows:,} rows of {source} give one text two ranks: their pairs go "
                "both ways and as rankings they are left out."
            )
        num_bad = sum(row.reason == Reason.INVALID_UTF8 for row in self.rejected)
        if num_bad and (advice := _conversion(source)):
            sentences.append(f"{num_bad:,} of {num_rows:,} rows of {source} are not UTF-8 and left out. {advice}")
        return [*sentences, *self.sentences]


def load_pairs(
    source: str,
    *,
    split: str = "train",
    columns: ColumnMap = USUAL_COLUMNS,
    limit: int | None = None,
    require_complete_pairs: bool = False,
    attribute_weights: Mapping[str, float] | None = None,
    require_pairs: bool = True,
    report: Report = silent,
    spool: Path | None = None,
) -> LoadedPairs:
    """Read the pairs of a source, in its order.

    Args:
        source: a file, a `datasets` folder, or a hub name.
        split: which split of a folder or hub data set; a file has none.
        columns: names of the columns, where they are not the usual ones.
        limit: stop reading after this many pairs. Observations are those of the rows read. Of rows that are one side,
            or grade one answer, all are read, and the first pairs or prompts are kept.
        require_complete_pairs: make it an error where, in the rows read, a pair lacks a completion (missing, empty, or
            a dialogue that ends before it) or, with one row a side, is not exactly one chosen and one rejected row of
            the same prompt. Rows of which only something else is wrong (equal sides, a bad margin, a line that is not
            JSON) are set aside as ever, and so are ranked answers, which have no sides.
        attribute_weights: how much each graded attribute counts in what is better; None: see `survey.better_weights`.
        require_pairs: make it an error where grades imply no pair. Ties alone always are one.
        report: called as report(0, 1, "12,000 rows of FILE") on the way: how many there are is known at the end only.
        spool: a file to write the pairs to as they are read; memory then holds some hundred of them, or all where each
            row is one side of a pair, or grades one answer. None: they are a list.

    Raises:
        DataError: the source cannot be read, its columns fit no layout, no row gives a pair, or see above.
    """
    records = _counted(iter_records(source, split=split), source, report)
    reading = probe(records, source, columns)
    layout, sentences = reading.layout, list[str]()
    pairs: Sequence[PreferencePair]
    observations: Sequence[Observation]
    labels: Iterable[list[RowPairs]] = reading
    if layout.name == GRADED_ROWS:
        graded = GradedRows(source, attribute_weights)
        for rows in reading:
            graded.add(rows)
        pairs, observations, reading.num_over_row_cap, sentences = graded.collected(limit)
        reading.num_ties = 0
        if observations and not pairs and require_pairs:
            raise graded.why_no_pair()
    else:
        with _Collector(spool) as collector:
            if layout.name == SIDE_ROWS:
                whole, reading.rejected, reading.num_rows = read_unpaired_rows(reading.records, layout)
                labels = ([row] for row in whole)
            for rows in labels:
                for row in rows:
                    collector.add(row)
                if limit is not None and len(collector.pairs) >= limit:
                    break
        pairs, observations = collector.collected()
    incomplete = INCOMPLETE_SIDES if layout.name == SIDE_ROWS else INCOMPLETE
    reading.check_usable(
        len(pairs) or len(observations) * (layout.name == GRADED_ROWS),
        errors=incomplete if require_complete_pairs else frozenset(),
    )
    sentences += unread_columns(source, ((pair.prompt, pair.metadata) for pair in pairs))
    return reading.loaded(pairs[:limit], observations, sentences)


@dataclass
class Reading:
    """Iterates over the rows of a source that say something; what it sets aside and counts is whole at the end."""

    source: str
    records: Iterator[RawRecord]
    layout: Layout
    rejected: list[RejectedRow] = field(default_factory=list)
    num_rows: int = 0
    num_over_row_cap: int = 0
    num_ties: int = 0
    num_contradicting: int = 0

    def __iter__(self) -> Iterator[list[RowPairs]]:
        """The labels of each record, together: a limit that cut a record would leave its last labels uncounted.

        Raises:
            DataError: a record cannot be understood, and so the whole source.
        """
        for record in self.records:
            if record.fields is None:
                self.num_rows += 1
                self.rejected.append(reject(record, record.problem or Reason.MISSING_VALUE))
                continue
            rows = list[RowPairs]()
            try:
                for label in self.layout.unfold(self.layout.columns.rename(record.fields)):
                    self.num_rows += 1
                    try:
                        row = self.layout.parse(label)
                    except RowRejected as rejection:
                        self.rejected.append(reject(record, rejection.reason))
                        continue
                    self.num_over_row_cap += row.num_over_cap
                    self.num_ties += not row.pairs
                    self.num_contradicting += row.contradicts
                    rows.append(row)
            except DataError as error:  # what one row shows of the whole file
                raise DataError(f"{self.source}, row {record.row}: {error}") from error
            yield rows

    def loaded(
        self, pairs: Sequence[PreferencePair], observations: Sequence[Observation], sentences: Sequence[str]
    ) -> LoadedPairs:
        """Return what was read, with the pairs and observations that were made of it."""
        return LoadedPairs(
            pairs,
            self.rejected,
            self.num_rows,
            self.layout.name,
            self.source,
            num_over_row_cap=self.num_over_row_cap,
            observations=observations,
            num_ties=self.num_ties,
            num_contradicting=self.num_contradicting,
            sentences=sentences,
        )

    def check_usable(self, num_usable: int, errors: frozenset[Reason] = frozenset()) -> None:
        """Refuse a source that was read where its rows were understood by chance, or none of them can be used.

        What is left of a text file that is not UTF-8, without the rows that hold an accent, is another data set; which
        encoding it has is not guessed, as each of them reads without an error. Where many rows of CSV have too few or
        too many cells, others are parts of rows. A few bad rows are damage, and cost those rows.

        Raises:
            DataError: says why, and what to do; also where a row is set aside for one of the reasons `errors`.
        """
        source, rejected, num_rows = self.source, self.rejected, self.num_rows
        bad = [row for row in rejected if row.reason == Reason.INVALID_UTF8]
        advice = _conversion(source) if bad and not (_are_few(bad, num_rows) and num_usable) else ""
        if advice and not (is_text_file(source) and is_utf8(Path(source).expanduser())):
            raise DataError(
                f"{source} is not UTF-8: {len(bad):,} of {num_rows:,} rows hold other bytes, row {bad[0].row} first. "
                + advice
            )
        bad = [row for row in rejected if row.reason == Reason.NOT_CSV]
        if not _are_few(bad, num_rows):
            raise DataError(
                f"{source}: {len(bad):,} of {num_rows:,} rows have another number of cells than the header, row "
                f"{bad[0].row} first ({bad[0].excerpt}): its cells hold delimiters or line breaks without quotes, so "
                "what looks like a row may be a part of one. Write the file again with such cells in double quotes, or "
                "as JSON Lines."
            )
        refuse_incomplete(source, rejected, errors)
        if num_usable:
            return
        if self.num_ties:
            raise DataError(
                f"all {self.num_ties:,} usable judgements of {source} are ties: no answer is better than another, so "
                "there is no pair, and nothing to learn but how wide a tie is. Add judgements that prefer an answer, "
                "or check what the column of the winner, the ranks or the scores means."
            )
        read_as = f"They were read as {self.layout.name}: {self.layout.needs}. " if self.layout.needs else ""
        raise DataError(
            f"{source} has {len(rejected)} rows and none gives a preference pair "
            f"({counted(row.reason for row in rejected)}). The first is row {rejected[0].row}: "
            f"{rejected[0].excerpt[:120]} ... {read_as}Correct the file, or name its columns with --prompt-column, "
            "--chosen-column, --rejected-column."
        )


class _Collector(ExitStack):
    """The pairs and observations of rows, in memory or, with a file for the pairs, on disk.

    As long as every row is one strict pair, nothing is kept but the pairs. From the first row that says more on,
    observations are kept next to them; those of the rows before are then made of their pairs.
    """

    def __init__(self, spool: Path | None) -> None:
        super().__init__()
        self.pairs: list[PreferencePair] | RowWriter[PreferencePair]
        self.pairs = [] if spool is None else self.enter_context(RowWriter(spool, PAIRS))
        self._later: list[Observation] | RowWriter[Observation] | None = None
        self._num_before = 0
        """Rows before the first one that says more: each is one pair."""
        self._has_more = False

    def add(self, row: RowPairs) -> None:
        """Take what the next row says."""
        self._has_more |= row.observation is not None
        if self._later is None and (row.observation is not None or row.contradicts):
            self._num_before = len(self.pairs)
            self._later = []
            if isinstance(self.pairs, RowWriter):
                self._later = self.enter_context(RowWriter(_sibling(self.pairs.path, "later"), OBSERVATIONS))
        self.pairs.extend(row.pairs)
        if self._later is not None and not row.contradicts:
            self._later.extend([row.observation or Observation.of_pair(row.pairs[0])])

    def collected(self) -> tuple[Sequence[PreferencePair], Sequence[Observation]]:
        """Everything, once the block has ended."""
        pairs = self.pairs.rows() if isinstance(self.pairs, RowWriter) else self.pairs
        if not self._later or not self._has_more:  # a row that contradicts itself alone leaves a source of pairs
            return pairs, ()
        before = map(Observation.of_pair, islice(pairs, self._num_before))
        if not isinstance(self._later, RowWriter):
            return pairs, [*before, *self._later]
        later = self._later.rows()
        if not self._num_before:
            return pairs, later
        with RowWriter(_sibling(self._later.path, "observations"), OBSERVATIONS) as writer:
            writer.extend(chain(before, later))
        return pairs, writer.rows()


def _sibling(path: Path, name: str) -> Path:
    return path.with_suffix(f".{name}{path.suffix}")


def iter_records(source: str, *, split: str = "train") -> Iterator[RawRecord]:
    """The raw records of a source, in order; memory stays bounded by one batch.

    Raises:
        DataError: the source is missing, damaged or of a kind that is not read.
    """
    kind = source_kind(source)
    if kind == "cluster":
        return read_cluster(source)
    if kind == "file":
        return read_file(Path(source).expanduser())
    return read_folder(Path(source).expanduser(), split) if kind == "folder" else read_hub(source, split)


def _counted(records: Iterator[RawRecord], source: str, report: Report) -> Iterator[RawRecord]:
    for number, record in enumerate(records, start=1):
        if number % ROWS_A_REPORT == 0:
            report(0, 1, f"{number:,} rows of {source}")
        yield record


def source_kind(source: str) -> Literal["cluster", "file", "folder", "hub"]:
    """Tell what a source is: files for a Ray cluster by its `ray:`, else what is on disk, then what it looks like."""
    if source.startswith(SCHEME):
        return "cluster"
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder"
    if path.exists() or is_file_name(source) or not _HUB_NAME.fullmatch(source):
        return "file"
    return "hub"


def source_digest(source: str) -> str:
    """Digest the content of a source: equal digests mean equal rows.

    Returns:
        sha256 in hex of a file's bytes, or of a folder's relative names and bytes; `hub:<name>@<commit>` for the hub;
        of files for a cluster see `rmcore.data.readers.cluster.cluster_digest`.

    Raises:
        DataError: the source is not there, or the hub does not say which commit it has.
    """
    kind = source_kind(source)
    if kind == "hub":
        return f"hub:{source}@{hub_revision(source)}"
    if kind == "cluster":
        return cluster_digest(source)
    path = Path(source).expanduser()
    try:
        return known_digest(path) if kind == "file" else _folder_digest(path)
    except OSError as error:
        raise DataError(f"{source} cannot be read ({error.strerror}): check the path and its permissions.") from error


def write_rejected(rejected: Iterable[RejectedRow], path: Path) -> None:
    """Write the rows set aside as JSON Lines, `{"row", "reason", "excerpt", "pair_id"}`."""
    write_json_lines(path, map(asdict, rejected))


def probe(records: Iterator[RawRecord], source: str, columns: ColumnMap) -> Reading:
    """Begin to read records, by the layout that the columns of the first ones show.

    Raises:
        DataError: there are none, none can be read, or the columns fit no layout.
    """
    head: list[RawRecord] = []
    sample: dict[str, Any] = {}
    for record in records:
        head.append(record)
        for name, value in (record.fields or {}).items():
            if sample.get(name) is None:
                sample[name] = value
        if sample and len(head) >= _PROBE_ROWS:
            break
    if not head:
        raise DataError(f"{source} has no rows: there is nothing to train or measure on. Check how it was written.")
    if not sample:
        unreadable = Reading(source, iter(()), Layout(""))
        unreadable.rejected = [reject(record, record.problem or Reason.MISSING_VALUE) for record in head]
        unreadable.num_rows = len(head)
        unreadable.check_usable(0)
    try:
        return Reading(source, chain(head, records), recognise(sample, columns))
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


def _are_few(bad: Sequence[RejectedRow], num_rows: int) -> bool:
    return len(bad) < 2 or len(bad) <= FEW_BAD_ROWS * num_rows


def _conversion(source: str) -> str:
    """Say how to convert a source of text; empty where it is none."""
    if is_text_file(source):
        return conversion_to_utf8(Path(source).expanduser())
    return "Convert the files, with iconv for example." if source_kind(source) == "cluster" else ""


def _folder_digest(folder: Path) -> str:
    files = dict(sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file()))
    lines = "".join(f"{digest} {name}\n" for name, digest in zip(files, known_digests(files.values()), strict=True))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()
