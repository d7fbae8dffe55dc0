"""Findings as blocks: a title, sentences, tables and figures, which every reader is shown alike.

A module of `html/` turns a record into blocks once. Three renderers know blocks alone: the macro `block_body` in
`html/macros.html.j2` for pages, `markdown` here for Prefect's artifacts, `print_block` in `rmcore/cli/common.py`
for a terminal. So one more section of a report is one function that returns a `Block`.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from rmcore.core.capabilities import modules

if TYPE_CHECKING:
    from huggingface_hub import EvalResult
    from matplotlib.figure import Figure

LONGEST_TEXT = 700
"""Characters that are shown of a text of the data."""
ROUNDED = "Measured with weights in bfloat16, the reward head in float32; rewards differ a little from the file's."
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


class Named(NamedTuple):
    """A cell with small print below it, for example its definition."""

    text: str
    definition: str
    is_kept: bool = False
    """Whether Markdown and terminals show the small print, too, in brackets: an interval, not a definition."""
    colour: str = ""
    """Colour of a square before the text, as the figures have it."""


class Table(NamedTuple):
    """Rows under headings; a table whose headings are all empty shows none.

    A first column called "result" is coloured by the signs ✓, ✗ and ? that its cells begin with.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Named]]
    left: Collection[int] = (0,)
    """Columns that are aligned left; the others hold numbers."""
    title: str = ""
    """Names a folded table, which the page opens by a click and Markdown leaves out."""


class Block(NamedTuple):
    """One section, in the order in which it is read."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs."""
    figures: Sequence[str] = ()
    """Names of figures, which only the page shows."""
    tables: Sequence[Table] = ()
    findings: Sequence[str] = ()
    """Sentences below the tables, a list item each."""
    code: str = ""
    """Lines shown as they are, for example YAML."""
    parts: Sequence["Block"] = ()
    """Sections one level below."""
    is_folded: bool = False
    """Detail that the page opens by a click."""


class Section(NamedTuple):
    """A block of a page: its anchor, and its name among the links at the top."""

    anchor: str
    name: str
    block: Block


CardParts = Callable[[Mapping[str, Any]], tuple[tuple[Block, ...], tuple["EvalResult", ...]]]
"""Makes a model card's sections of a record, and its results in the hub's form."""


class Shown(NamedTuple):
    """How reports and cards show the record of a capability's stage: `SHOWN` of its `blocks.py`."""

    block: Callable[[Mapping[str, Any]], Block]
    """Makes the section of the record."""
    after: str
    """Anchor of the section that it follows."""
    stage: str = ""
    """The stage's name, which is also the record's in a run's results, and the section's anchor; else the folder's."""
    name: str = ""
    """Among the links at the top of a report; else the stage's name, capitalised."""
    figures: Mapping[str, Callable[[Mapping[str, Any]], "Figure"]] = {}
    """Draw those of the record, by the names of their files: the functions NAME_figure of `blocks.py`."""
    is_folded: Callable[[Mapping[str, Any]], bool] = lambda record: True
    in_summary: bool = False
    """Whether the short summary of a run, for a terminal, has it, too."""
    card: CardParts | None = None
    """None: it is no evidence for a card."""
    key_of_command: str = ""
    """A key that only this record has, also where the command of the stage's name wrote it with --json."""
    captions: Mapping[str, str] = {}
    """Texts below its figures, by their names."""
    words: Mapping[str, str] = {}
    """Its terms in the glossary of a report."""
    tables_of_pairs: Callable[[Mapping[str, Any]], Mapping[str, Sequence[Table]]] = lambda record: {}
    """Tables, by pair, that the section of mistakes shows below the pair."""


def capabilities_shown() -> list[Shown]:
    """Return how the records of capabilities are shown, in the order of these."""
    return [_completed(file.SHOWN, file) for file in modules("blocks")]


def _completed(shown: Shown, file: ModuleType) -> Shown:
    stage = shown.stage or file.__name__.split(".")[1]
    drawn = {name: one for name, one in vars(file).items() if getattr(one, "__module__", "") == file.__name__}
    figures = {name.removesuffix("_figure"): one for name, one in drawn.items() if name.endswith("_figure")}
    return shown._replace(stage=stage, name=shown.name or stage.capitalize(), figures=figures)


def hub_result(task: str, dataset: tuple[str, str], metric_name: str, metric: Mapping[str, Any]) -> "EvalResult":
    """A number with its interval in the hub's own form; `dataset` is the type that the hub groups by, and the name."""
    from huggingface_hub import EvalResult

    ends = {end: round(float(metric[end]), 4) for end in ("ci_low", "ci_high") if metric[end] is not None}
    return EvalResult(
        task_type="text-classification",
        task_name=task,
        dataset_type=dataset[0],
        dataset_name=dataset[1],
        metric_type="accuracy",
        metric_name=metric_name,
        metric_value=round(float(metric["value"]), 4),
        metric_args={**ends, **({"level": 0.95} if ends else {}), "n": int(metric["num"])},
    )


def facts(values: Mapping[str, str]) -> Table:
    """Names with their values, a row each."""
    return Table(("", ""), list(values.items()), left=range(2))


def words(meanings: Mapping[str, str]) -> Block:
    """A glossary."""
    return Block("Glossary", tables=(facts(meanings),), is_folded=True)


def escape(text: str) -> str:
    """One line of Markdown that shows `text` as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.splitlines()))


def markdown(block: Block, level: int = 1, *, is_whole: bool = False, escape: Callable[[str], str] = escape) -> str:
    """The block in Markdown, its title a heading of `level`; every text is shown as it is; ends in no line break.

    Args:
        block: to show.
        level: of its heading.
        is_whole: whether folded parts and tables and all small print are shown, too.
        escape: makes Markdown of a text.
    """
    return "\n\n".join(_paragraphs(block, level, is_whole, escape))


def _paragraphs(block: Block, level: int, is_whole: bool, escape: Callable[[str], str]) -> Iterator[str]:
    yield f"{'#' * level} {escape(block.title)}"
    yield from map(escape, block.text)
    for table in block.tables:
        if is_whole or not table.title:
            yield from [f"**{escape(table.title)}**"] if table.title else []
            rule = ["---" if column in table.left else "---:" for column in range(len(table.headings))]
            rows = [[escape(cell_text(cell, is_whole)) for cell in row] for row in table.rows]
            lines = [[escape(heading) for heading in table.headings], rule, *rows]
            yield "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    if block.findings:
        yield "\n".join(f"- {escape(line)}" for line in block.findings)
    if block.code:
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.code)), default=0))
        yield f"{fence}\n{block.code.rstrip()}\n{fence}"
    for part in block.parts:
        if is_whole or not part.is_folded:
            yield from _paragraphs(part, level + 1, is_whole, escape)


def cell_text(cell: str | Named, is_whole: bool = False) -> str:
    """The text of a cell as Markdown and terminals show it."""
    if isinstance(cell, str):
        return cell
    return f"{cell.text} ({cell.definition})" if cell.definition and (is_whole or cell.is_kept) else cell.text


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """`text`, its middle left out where it is longer: the end of a dialogue matters as much as its start."""
    if len(text) <= longest:
        return text
    left_out = len(text) - longest
    return f"{text[: longest // 2]} […{left_out:,} characters…] {text[len(text) - (longest - longest // 2) :]}"
