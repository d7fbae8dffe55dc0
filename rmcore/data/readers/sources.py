"""Any source of preference data as pairs: a file, a `datasets` folder or a hub name goes in, `LoadedPairs` come out.

The road: `iter_records` gives raw records (`files`, `hub`), `layouts` makes each into pairs or refuses it with a
reason, and what is refused is kept next to the pairs, so that nothing gets lost without being counted. Where a source
says more than strict pairs, all that it says is there as observations, too.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import IntArray
from rmcore.core.errors import DataError
from rmcore.core.files import known_digest, known_digests, write_json_lines
from rmcore.core.progress import Report, silent
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair, Prompt, prompt_text, text_number
from rmcore.data.pairs_on_disk import prompts_of, select
from rmcore.data.readers.cluster import SCHEME, cluster_digest, read_cluster
from rmcore.data.readers.collector import Collector
from rmcore.data.readers.columns import USUAL_COLUMNS, ColumnMap
from rmcore.data.readers.fields import Reason, RowRejected
from rmcore.data.readers.files import RawRecord, conversion_to_utf8, is_file_name, is_text_file, is_utf8, read_file
from rmcore.data.readers.graded_rows import USUAL_GRADING, GradedRows, Grading
from rmcore.data.readers.hub import hub_revision, read_folder, read_hub
from rmcore.data.readers.layouts import GRADED_ROWS, PAIRS_PER_ROW, SIDE_ROWS, Layout, recognise
from rmcore.data.readers.rejected import INCOMPLETE, INCOMPLETE_SIDES, RejectedRow, counted, refuse_incomplete, reject
from rmcore.data.readers.row_pairs import RowPairs
from rmcore.data.readers.unpaired_rows import read_unpaired_rows
from rmcore.data.readers.unread import unread_parts
from rmcore.data.splits import conversation

FEWEST_PROMPTS = 20
"""As few as the synthetic benchmark can be made of (data.gold.num_prompts)."""
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
    pairs_per_row: int = PAIRS_PER_ROW,
    grading: Grading = USUAL_GRADING,
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
            or grade one answer, all are read, and the first pairs, or prompts, are kept.
        require_complete_pairs: make it an error where, in the rows read, a pair lacks a completion (missing, empty, or
            a dialogue that ends before it) or, with one row a side, is not exactly one chosen and one rejected row of
            the same prompt. Rows of which only something else is wrong (equal sides, a bad margin, a line that is not
            JSON) are set aside as ever, and so are ranked answers, which have no sides.
        pairs_per_row: a row of ranked answers that would give more gives so many, drawn at random; see `layouts`.
        grading: what the grades of answers mean, where rows grade them; see `graded_rows`.
        require_pairs: make it an error where grades imply no pair. Ties alone always are one.
        report: called as report(0, 1, "12,000 rows of FILE") on the way: how many there are is known at the end only.
        spool: a file to write the pairs to as they are read; memory then holds some hundred of them, or all where each
            row is one side of a pair, or grades one answer. None: they are a list.

    Raises:
        DataError: the source cannot be read, its columns fit no layout, no row gives a pair, or see above.
    """
    records, layout = probe(_counted(iter_records(source, split=split), source, report), source, columns, pairs_per_row)
    sentences: list[str] = []
    if layout.name == GRADED_ROWS:
        graded = GradedRows(source, grading, pairs_per_row)
        rejected, num_rows = _read_rows(records, source, layout, graded.add)
        found, sentences = graded.collected(limit)
        if found.observations and not found.pairs and require_pairs:
            raise graded.why_no_pair()
    else:
        with Collector(spool) as collector:
            if layout.name == SIDE_ROWS:
                rows, rejected, num_rows = read_unpaired_rows(records, layout)
                for row in rows[:limit]:
                    collector.add(row)
            else:
                rejected, num_rows = _read_rows(
                    records, source, layout, collector.add, lambda: limit is not None and len(collector.pairs) >= limit
                )
        found = collector.collected()
    num_usable = len(found.pairs) or len(found.observations) * (layout.name == GRADED_ROWS)
    incomplete = INCOMPLETE_SIDES if layout.name == SIDE_ROWS else INCOMPLETE
    check_usable(
        source,
        rejected,
        num_rows,
        num_usable,
        layout,
        num_ties=found.num_ties,
        errors=incomplete if require_complete_pairs else frozenset(),
    )
    return LoadedPairs(
        found.pairs[:limit],
        rejected,
        num_rows,
        layout.name,
        source,
        num_over_row_cap=found.num_over_row_cap,
        observations=found.observations,
        num_ties=found.num_ties,
        num_contradicting=found.num_contradicting,
        sentences=[*sentences, *unread_parts(source, found.pairs)],
    )


def cap_prompts(
    loaded: LoadedPairs,
    most: int | None,
    *,
    spared: Sequence[PreferencePair] = (),
    spared_observations: Sequence[Observation] = (),
) -> LoadedPairs:
    """Keep the first `most` pairs of each prompt, in order; None keeps all. What is left out is counted.

    Of observations the first `most` of each prompt are kept, too. The prompts of what is `spared` keep all.
    """
    if most is None:
        return loaded
    kept = _first_of_each_prompt(loaded.pairs, most, spared)
    said = _first_of_each_prompt(loaded.observations, most, spared_observations)
    return replace(
        loaded,
        pairs=select(loaded.pairs, kept),
        num_over_cap=len(loaded.pairs) - len(kept),
        cap=most,
        observations=select(loaded.observations, said),
    )


Said = Sequence[PreferencePair] | Sequence[Observation]


def _first_of_each_prompt(said: Said, most: int, spared: Said) -> IntArray:
    prompts = _numbers(said, prompt_text)  # not `prompt_id`, which names the whole conversation
    order = np.argsort(prompts, kind="stable")
    _, starts, counts = np.unique(prompts[order], return_index=True, return_counts=True)
    earlier = np.empty(len(prompts), dtype=np.int64)
    earlier[order] = np.arange(len(prompts)) - np.repeat(starts, counts)
    return np.flatnonzero((earlier < most) | np.isin(prompts, _numbers(spared, prompt_text)))


def _numbers(said: Said, text: Callable[[Prompt], str]) -> npt.NDArray[np.uint64]:
    return np.fromiter((text_number(text(prompt)) for prompt in prompts_of(said)), np.uint64)


def exclude_held_out_conversations(loaded: LoadedPairs, held_out: LoadedPairs) -> LoadedPairs:
    """Leave out of the training source all whose conversation is held out, as a pair or as an observation of any kind.

    The pairs left out are counted.

    Raises:
        DataError: that leaves too little to train on.
    """
    tested = np.union1d(_numbers(held_out.pairs, conversation), _numbers(held_out.observations, conversation))
    pairs, said = _numbers(loaded.pairs, conversation), _numbers(loaded.observations, conversation)
    kept, kept_said = (np.flatnonzero(~np.isin(numbers, tested)) for numbers in (pairs, said))
    num_taken = len(pairs) - len(kept)
    num_left = len(np.union1d(pairs[kept], said[kept_said]))
    if (num_taken or len(kept_said) < len(said)) and num_left < FEWEST_PROMPTS:
        raise DataError(
            f"{num_taken:,} of {len(loaded.pairs):,} pairs of {loaded.source} share their prompt, or a dialogue's "
            f"first user turn, with held-out pairs of {held_out.source}: a model trained on them has seen the test. "
            f"Without them {num_left} prompts are left to train on, and fewer than {FEWEST_PROMPTS} show nothing. Name "
            "held-out data with prompts of their own, or none: a share of the prompts of the source is then held out."
        )
    return replace(
        loaded,
        pairs=select(loaded.pairs, kept),
        num_held_out=num_taken,
        observations=select(loaded.observations, kept_said),
    )


def _read_rows(
    records: Iterable[RawRecord],
    source: str,
    layout: Layout,
    take: Callable[[RowPairs], None],
    is_enough: Callable[[], bool] = lambda: False,
) -> tuple[list[RejectedRow], int]:
    """Hand the rows that can be read to `take`, which may refuse one; all set aside, and the number of rows."""
    rejected: list[RejectedRow] = []
    num_rows = 0
    for record in records:
        for outcome in outcomes(record, source, layout):
            num_rows += 1
            try:
                if isinstance(outcome, RejectedRow):
                    rejected.append(outcome)
                else:
                    take(outcome)
            except RowRejected as rejection:
                rejected.append(reject(record, rejection.reason))
        if is_enough():
            break
    return rejected, num_rows


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


def probe(
    records: Iterator[RawRecord], source: str, columns: ColumnMap, pairs_per_row: int = PAIRS_PER_ROW
) -> tuple[Iterator[RawRecord], Layout]:
    """All the records again, and the layout that the columns of the first ones show.

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
        check_usable(source, [reject(record, record.problem or Reason.MISSING_VALUE) for record in head], len(head), 0)
    try:
        return chain(head, records), recognise(sample, columns, most=pairs_per_row)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


def outcomes(record: RawRecord, source: str, layout: Layout) -> Iterator[RowPairs | RejectedRow]:
    """Read each label of a record: the pairs that it gives, or the reason why it gives none."""
    if record.fields is None:
        yield reject(record, record.problem or Reason.MISSING_VALUE)
        return
    try:
        for label in layout.unfold(layout.columns.rename(record.fields)):
            try:
                yield layout.parse(label)
            except RowRejected as rejection:
                yield reject(record, rejection.reason)
    except DataError as error:  # what one row shows of the whole file
        raise DataError(f"{source}, row {record.row}: {error}") from error


def check_usable(
    source: str,
    rejected: list[RejectedRow],
    num_rows: int,
    num_usable: int,
    layout: Layout | None = None,
    *,
    num_ties: int = 0,
    errors: frozenset[Reason] = frozenset(),
) -> None:
    """Refuse a source that was read to its end where its rows were understood by chance, or none of them can be used.

    What is left of a text file that is not UTF-8, without the rows that hold an accent, is another data set; which
    encoding it has is not guessed, as each of them reads without an error. Where many rows of CSV have too few or too
    many cells, others are parts of rows. A few bad rows are damage, and cost those rows.

    Raises:
        DataError: says why, and what to do; also where a row is set aside for one of the reasons `errors`.
    """
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
            f"{bad[0].row} first ({bad[0].excerpt}): its cells hold delimiters or line breaks without quotes, so what "
            "looks like a row may be a part of one. Write the file again with such cells in double quotes, or as JSON "
            "Lines."
        )
    refuse_incomplete(source, rejected, errors)
    if num_usable:
        return
    if num_ties:
        raise DataError(
            f"all {num_ties:,} usable judgements of {source} are ties: no answer is better than another, so there is "
            "no pair, and nothing to learn but how wide a tie is. Add judgements that prefer an answer, or check what "
            "the column of the winner, the ranks or the scores means."
        )
    read_as = f"They were read as {layout.name}: {layout.needs}. " if layout is not None and layout.needs else ""
    raise DataError(
        f"{source} has {len(rejected)} rows and none gives a preference pair ({counted(rejected)}). "
        f"The first is row {rejected[0].row}: {rejected[0].excerpt[:120]} ... {read_as}Correct the file, or name its "
        "columns with --prompt-column, --chosen-column, --rejected-column."
    )


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
