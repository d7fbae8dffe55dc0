"""The report of a flow whose result is one block: a table, some sentences, figures."""

from collections.abc import Collection, Mapping
from pathlib import Path

from rmcore.reporting.html.blocks import Block
from rmcore.reporting.html.page import write_page

TEMPLATE = "text.html.j2"


def write_block_report(
    name: str, block: Block, figures: Mapping[str, Path], out: Path, captions: Mapping[str, str] | None = None
) -> Path:
    """Write a block as one self-contained HTML file to `out`; returns `out`.

    Args:
        name: of the run.
        block: what was found.
        figures: PNG files by name; those that the block does not name are shown after it.
        out: HTML file to write; its folder is made.
        captions: of figures, by name.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    shown, rest = _drawn(block, figures), set(figures) - _named(block)
    values = {"name": name, "block": shown, "rest": [one for one in figures if one in rest]}
    return write_page(TEMPLATE, values, figures, captions or {}, out)


def _named(block: Block) -> set[str]:
    return {*block.figures, *(name for part in block.parts for name in _named(part))}


def _drawn(block: Block, figures: Collection[str]) -> Block:
    """The block without the figures that were not drawn."""
    parts = [_drawn(part, figures) for part in block.parts]
    return block._replace(figures=[name for name in block.figures if name in figures], parts=parts)
