"""Labels that do not cover one another: spread along an axis, or placed around points."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from scipy.optimize import isotonic_regression

from rmcore.core.arrays import FloatArray
from rmcore.reporting.figures.style import SMALL

_RADII = (9.0, 16.0, 26.0, 40.0, 58.0, 80.0, 110.0)  # points between a marker and its label
_ANGLES = (45, 0, -45, 90, -90, 135, -135, 180, 22, -22, 67, -67, 112, -112, 157, -157)  # degrees, best first
_HARD, _SOFT, _FAR = 1000.0, 1.0, 1.5  # cost of a square point covered, of one of a faint point, of a point of distance
_TIE_FROM = 20.0  # points of distance from which a line ties a label to its point
_MARKER = 5.0  # points, half the side of the square that a marker takes; a faint one takes half
_AIR = 1.5  # points on either side of a label


def spread(wanted: FloatArray, gap: float, low: float, high: float) -> FloatArray:
    """Positions at least `gap` apart, closest to the wanted ones (least squares), inside [low, high] where they fit.

    Args:
        wanted: (n,) positions in any order.
        gap: smallest distance of two neighbours.
        low: lower bound.
        high: upper bound; where n · gap does not fit, positions begin at `low` and leave at `high`.
    """
    if len(wanted) == 0:
        return wanted
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    # Without its share of the gaps each position need only be ordered: isotonic regression gives the closest ones.
    room = max(high - steps[-1], low)
    places = np.clip(isotonic_regression(wanted[order] - steps).x, low, room) + steps
    found = np.empty_like(places)
    found[order] = places
    return found


def place_labels(
    ax: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    colours: Sequence[str],
    avoid: FloatArray,
) -> list[Annotation]:
    """Name points by labels that cover neither one another nor a point, each as near as possible; inside the axes.

    Call it last: the layout and the limits must be final. A distant label gets a thin line to its point.

    Args:
        ax: axes whose figure is laid out.
        points: (x, y) in data coordinates.
        texts: one a point.
        colours: one a point.
        avoid: (n, 2) further, faint points in data coordinates; covered only where that brings a label much nearer.
    """
    scale = float(ax.figure.dpi) / 72  # pixels a point
    centres = ax.transData.transform(np.asarray(points, dtype=np.float64).reshape(-1, 2)) / scale
    faint = _squares(ax.transData.transform(avoid.reshape(-1, 2)) / scale, _MARKER / 2)
    taken = _squares(centres, _MARKER)
    frame = np.array([ax.bbox.extents]) / scale
    labels = []
    for centre, point, text, colour in zip(centres, points, texts, colours, strict=True):
        style: dict[str, Any] = {"fontsize": SMALL, "color": colour, "fontweight": "bold", "annotation_clip": False}
        label = ax.annotate(text, point, xytext=(0, 0), textcoords="offset points", ha="center", va="center", **style)
        label.set_in_layout(False)
        extent = label.get_window_extent()
        size = np.array([extent.width / scale + 2 * _AIR, extent.height / scale])
        offsets, distances = _candidates(size)
        boxes = np.hstack([centre + offsets - size / 2, centre + offsets + size / 2])
        hidden = _overlaps(boxes, taken).sum(axis=1) + size.prod() - _overlaps(boxes, frame)[:, 0]
        cost = _HARD * hidden.round(6) + _SOFT * _overlaps(boxes, faint).sum(axis=1) + _FAR * distances
        best = int(cost.argmin())
        label.set_position((float(offsets[best, 0]), float(offsets[best, 1])))
        taken = np.vstack([taken, boxes[best]])
        if distances[best] > _TIE_FROM:
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6}
            tie = ax.annotate("", point, xytext=label.get_position(), textcoords="offset points", arrowprops=line)
            tie.set_in_layout(False)
        labels.append(label)
    return labels


def _candidates(size: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(n, 2) offsets of a label's centre whose nearest side or corner is (n,) points away from its point."""
    angles = np.radians(np.tile(_ANGLES, len(_RADII)))
    distances = np.repeat(_RADII, len(_ANGLES))
    directions = np.column_stack([np.cos(angles), np.sin(angles)]).round(6)
    return directions * distances[:, None] + np.sign(directions) * size / 2, distances


def _overlaps(boxes: FloatArray, others: FloatArray) -> FloatArray:
    """(n, m) common areas of (n, 4) and (m, 4) boxes, each x0, y0, x1, y1."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return np.clip(high - low, 0, None).prod(axis=2)


def _squares(centres: FloatArray, half: float) -> FloatArray:
    return np.hstack([centres - half, centres + half])
