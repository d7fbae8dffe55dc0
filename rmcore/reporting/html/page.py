"""Parts that all HTML pages share: the template environment, figures inside the page, dates.

Every text goes through Jinja2's autoescape: texts come from data, models and people and may hold any markup.
"""

import base64
import struct
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from rmcore.core.errors import DataError
from rmcore.core.files import write_text
from rmcore.reporting.html.blocks import Block

_PNG = b"\x89PNG\r\n\x1a\n"
_DENSITY = 1.5  # pixels of a figure a CSS pixel


class Image(NamedTuple):
    """A figure inside the page; size in CSS pixels, two thirds of its own, so that it is sharp on dense screens."""

    address: str
    width: int
    height: int


def write_page(
    template: str, values: Mapping[str, Any], figures: Mapping[str, Path], captions: Mapping[str, str], out: Path
) -> Path:
    """Render a template of this folder to `out`, making its folder; returns `out`.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    images = {name: image(path) for name, path in figures.items()}
    page = render_page(template, {**values, "images": images, "captions": captions})
    write_text(out, page, durable=False)  # it is drawn again from the numbers
    return out


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
    named = _named(block)
    unnamed = [figure for figure in figures if figure not in named]
    values = {"name": name, "block": _drawn(block, figures), "rest": unnamed}
    return write_page("text.html.j2", values, figures, captions or {}, out)


def _named(block: Block) -> set[str]:
    return {*block.figures, *(name for part in block.parts for name in _named(part))}


def _drawn(block: Block, figures: Collection[str]) -> Block:
    """The block without the figures that were not drawn."""
    parts = [_drawn(part, figures) for part in block.parts]
    return block._replace(figures=[name for name in block.figures if name in figures], parts=parts)


def render_page(template: str, values: Mapping[str, Any]) -> str:
    """A template of this folder with its values, every one of them escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def image(path: Path) -> Image:
    """The PNG file as a data address with its size.

    Raises:
        DataError: it cannot be read, or is no PNG file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"figure {path} cannot be read ({error.strerror}): the report needs it. Draw it again."
        ) from error
    if not content.startswith(_PNG) or len(content) < 24:
        raise DataError(f"figure {path} is not a PNG file: the report cannot show it. Draw it again.")
    width, height = struct.unpack(">II", content[16:24])  # of the IHDR chunk, always the first
    address = "data:image/png;base64," + base64.b64encode(content).decode("ascii")
    return Image(address, round(width / _DENSITY), round(height / _DENSITY))


def date(moment: str) -> str:
    """An ISO 8601 time as 21 November 2026, 01:30 UTC."""
    read = datetime.fromisoformat(moment)
    return f"{read.day} {read:%B %Y, %H:%M} {read.tzname() or ''}".strip()
