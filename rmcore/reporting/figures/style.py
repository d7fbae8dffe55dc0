"""The look that all figures share, and how a figure becomes a file.

Figures are built from `Figure()` alone: no pyplot, no global state, so stages may draw in threads, without a display.
Colours are from Okabe and Ito's palette (jfly.uni-koeln.de/color), distinguishable with every common colour blindness.
"""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.core.metrics import floored
from rmcore.reporting.figures import numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 144
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
INK, MUTED, GRID = "#1f2328", "#59636e", "#d8dee4"
TITLE, LABEL, SMALL = 11.5, 10.0, 9.0
SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
"""Colors of arms and runs: Okabe and Ito's, then two of Tol's muted ones (personal.sron.nl/~pault)."""
SERIES_MARKERS = ("o", "s", "^", "v", "P", "X", "<", ">")
_LONGEST_NAME = 26  # characters
_BELOW_FLOOR = 0.13  # of an axis, so that marks at a floor are whole
_CHARS_PER_INCH = 9.0  # of a bold title at TITLE points


def new_figure(width: float, height: float) -> "Figure":
    """An empty white figure, size in inches."""
    from matplotlib.figure import Figure  # takes a second, which reading the records of a cached run should not cost

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def headline(figure: "Figure", title: str) -> None:
    """The message of the figure, wrapped to its width."""
    lines = textwrap.wrap(title, max(16, int(figure.get_figwidth() * _CHARS_PER_INCH)))
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=TITLE, fontweight="bold", color=INK)


def dress(ax: "Axes", *, title: str, x: str, y: str) -> None:
    """Small title over the panel, axis labels and the common look."""
    ax.set_title(title, loc="left", fontsize=SMALL, color=MUTED, pad=6)
    ax.set_xlabel(x, fontsize=LABEL, color=INK)
    ax.set_ylabel(y, fontsize=LABEL, color=INK)
    ax.tick_params(labelsize=SMALL, colors=MUTED, which="both")
    ax.grid(visible=True, color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GRID)


def legend(ax: "Axes", **options: Any) -> None:
    """A legend in the common style, placed where it hides least unless `loc` says otherwise."""
    key = ax.legend(fontsize=SMALL, frameon=True, framealpha=0.9, edgecolor=GRID, labelcolor=INK, **options)
    for handle in key.legend_handles:
        if handle is not None and (handle.get_alpha() or 1.0) < 0.5:
            handle.set_alpha(0.9)  # a faint cloud of points has a visible key


def legend_below(ax: "Axes", columns: int = 2) -> None:
    """A legend below the panel, where it hides no line."""
    legend(ax, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=columns)


def shared_legend(
    figure: "Figure", columns: int, *, side: str = "center", handles: Sequence[Any] | None = None
) -> None:
    """One legend below all panels, of what is labelled in them unless `handles` are given."""
    location: Any = f"outside lower {side}"
    style: dict[str, Any] = {"ncols": columns, "fontsize": SMALL, "frameon": False, "labelcolor": INK}
    figure.legend(handles=handles, loc=location, **style)


def key_line(label: str, *, color: str = INK, **look: Any) -> Any:
    """A line or mark of a legend that stands for many in the panels."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, label=label, **look)


def round_ticks(axis: "Axis", most: int, least: int) -> None:
    """Ticks at round numbers, from `least` to about `most` of them."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, min_n_ticks=least, steps=[1, 2, 2.5, 5, 10]))


def name_rows(ax: "Axes", names: Sequence[str], bold: Collection[int] = ()) -> None:
    """Name the rows 0, 1, … of a panel from top to bottom."""
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.set_yticks(range(len(names)), names, fontsize=SMALL, color=INK)
    for row in bold:
        ax.get_yticklabels()[row].set_fontweight("bold")
    for row in range(len(names)):
        ax.axhline(row, color=GRID, linewidth=0.6, zorder=0)
    ax.set_ylim(len(names) - 0.4, -0.6)


def draw_interval(ax: "Axes", row: float, item: Mapping[str, Any], colour: str) -> None:
    """Draw the interval of an item in a row; nothing where it has none."""
    low, high = item.get("ci_low"), item.get("ci_high")
    if low is not None and high is not None:
        ax.plot([low, high], [row, row], color=colour, linewidth=2.5, solid_capstyle="round", alpha=0.75)


def whole_ticks(axis: "Axis", most: int = 5) -> None:
    """Ticks at whole numbers, for example optimizer steps: 1,000."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=most, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: numbers.count(value)))


def percent_ticks(axis: "Axis") -> None:
    """Fractions of an axis as whole percentages."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))


def note(ax: "Axes", message: str) -> None:
    """A sentence in the middle of a panel that has nothing to draw."""
    ax.text(0.5, 0.5, textwrap.fill(message, 42), transform=ax.transAxes, ha="center", va="center", color=MUTED)
    ax.grid(visible=False)
    ax.set_xticks([])
    ax.set_yticks([])


def short(name: str, longest: int = _LONGEST_NAME) -> str:
    """The name, its middle left out where it is long: names of one family often differ at the ends."""
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[-(longest - longest // 2 - 1) :]}"


def capital(label: str) -> str:
    """The label at the start of a sentence; its other capitals stay."""
    return f"{label[:1].upper()}{label[1:]}"


def axis_low(name: str, low: float, high: float) -> float:
    """The lower end of an axis: not so far below the floor of its metric that a tick would stand there."""
    floor = floored(name, -math.inf)
    return low if floor is None or math.isinf(floor) else max(low, floor - _BELOW_FLOOR * (high - floor))


def axis_label(label: str, unit: str, comparison: str = "level") -> str:
    """An axis title with its unit; percent signs stand at the ticks."""
    if comparison == "ratio":
        return f"{label} (ratio)"
    points = "percentage points"
    word = {"share": "%" if comparison == "level" else points, "points": points, "seconds": "s"}.get(unit, unit)
    return f"{label} ({word})" if word else label


def unit_ticks(axis: "Axis", unit: str, comparison: str = "level") -> None:
    """Ticks of an axis that holds raw values (fractions where the unit is share)."""
    from matplotlib.ticker import FuncFormatter

    def text(value: float, _: int) -> str:
        scaled = 100 * value if unit in numbers.FRACTIONS and comparison != "ratio" else value
        size = f"{abs(scaled):,.10g}"
        if comparison == "difference":
            return f"{numbers.sign(scaled, size)}{size}"
        return f"{'−' if scaled < 0 else ''}{size}{'×' if comparison == 'ratio' else ''}"

    axis.set_major_formatter(FuncFormatter(text))


def save(figure: "Figure", out: Path) -> Path:
    """Write `figure` as PNG to `out`, making its folder; the same figure gives the same bytes. Returns `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out
