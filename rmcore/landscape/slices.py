"""The loss along straight lines and over a plane through the weights of a model.

Curvature describes the loss at one point. A slice shows how far that description holds: the loss is measured again at
weights theta + d * direction, for distances d on both sides. One point is one pass over all pairs without gradients.

A loss that is not finite far out is part of the picture: it is counted, and None in the record.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from rmcore.core.errors import ConfigError
from rmcore.core.progress import Report, silent
from rmcore.landscape.directions import Quadratic, split_direction
from rmcore.landscape.displaced import measure_at, undefined_points
from rmcore.landscape.operators import PairCurvature
from rmcore.landscape.vectors import dot, norm


@dataclass(frozen=True)
class LossSlice:
    """Mean loss and pairwise accuracy at G points of one line through the model.

    Attributes:
        name: what the direction is, for people.
        unit: what a distance of 1 is, for people.
        distances: (G,) d of theta + d * direction; 0 is this model.
        loss: (G,) nats a pair, at the operator's temperature; None where a margin is not finite.
        accuracy: (G,) share of pairs with margin > 0, ties half; None where the loss is.
        tie_rate: (G,) share of pairs with margin 0; None where the loss is.
        quadratic: (G,) the prediction from slope and curvature at the model, where these were given.
        slope: gradient . direction, nats per unit of distance.
        curvature: direction^T H direction, nats per squared unit.
        loss_at_model: nats a pair.
        length: Euclidean length of the direction: distance d moves the parameters by d * length.
        num_not_finite: points without a loss.
        reasons: name of each field that is undefined, or is so somewhere -> why.
    """

    name: str
    unit: str
    distances: tuple[float, ...]
    loss: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    tie_rate: tuple[float | None, ...]
    quadratic: tuple[float, ...] | None
    slope: float | None
    curvature: float | None
    loss_at_model: float
    length: float
    num_pairs: int
    temperature: float
    num_not_finite: int
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return {name: _plain(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class LossSurface:
    """Mean loss and pairwise accuracy on a grid of a plane through the model; other fields as in `LossSlice`.

    Attributes:
        xs: (Gx,) distances along the first direction.
        ys: (Gy,) distances along the part of the second direction that is orthogonal to the first.
        loss: (Gy, Gx) nats a pair.
        accuracy: (Gy, Gx).
        cosine: between the two directions as given, before the second was made orthogonal.
        length_x: Euclidean length of the first direction.
        length_y: Euclidean length of the second one, kept when it was made orthogonal.
    """

    name_x: str
    name_y: str
    unit: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    loss: tuple[tuple[float | None, ...], ...]
    accuracy: tuple[tuple[float | None, ...], ...]
    cosine: float
    loss_at_model: float
    length_x: float
    length_y: float
    num_pairs: int
    temperature: float
    num_not_finite: int
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def loss_slice(
    operator: PairCurvature,
    direction: Tensor,
    distances: Sequence[float],
    *,
    name: str,
    unit: str,
    quadratic: Quadratic | None = None,
    report: Report = silent,
) -> LossSlice:
    """Measure the loss along one direction. The weights come back bit by bit, also after an exception.

    Args:
        operator: the model, the pairs, the parameters that move, and the temperature.
        direction: (N,), in the order of `operator.names`.
        distances: (G,), in units of the direction; see `directions.symmetric_distances`.
        name: of the direction, for people.
        unit: of the distances, for people; directions.py has the words for each kind.
        quadratic: the polynomial to set beside the measured loss.
        report: called after each distance.

    Raises:
        ConfigError: a direction of another length, zero or not finite; no distance, or one that is not finite.
        CurvatureError: the loss of the model itself is not finite.
    """
    _check(distances, direction)
    center = operator.loss()
    pieces = split_direction(operator, direction)
    points = measure_at(operator, [[(distance, pieces)] for distance in distances], report)
    missing, reasons = undefined_points(points)
    if quadratic is None:
        reasons |= dict.fromkeys(("quadratic", "slope", "curvature"), "not asked for along this direction.")
    return LossSlice(
        name=name,
        unit=unit,
        distances=tuple(map(float, distances)),
        loss=tuple(point.loss for point in points),
        accuracy=tuple(point.accuracy for point in points),
        tie_rate=tuple(point.tie_rate for point in points),
        quadratic=None if quadratic is None else tuple(map(quadratic.at, distances)),
        slope=None if quadratic is None else quadratic.slope,
        curvature=None if quadratic is None else quadratic.curvature,
        loss_at_model=center,
        length=norm(direction),
        num_pairs=operator.num_pairs,
        temperature=operator.temperature,
        num_not_finite=missing,
        reasons=reasons,
    )


def loss_surface(
    operator: PairCurvature,
    direction_x: Tensor,
    direction_y: Tensor,
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    name_x: str,
    name_y: str,
    unit: str,
    report: Report = silent,
) -> LossSurface:
    """Measure the loss at theta + x * direction_x + y * direction_y: Gx * Gy passes over all pairs.

    Of direction_y only the part orthogonal to direction_x is used, brought back to the length of direction_y: then the
    picture has no shear. (Two random directions are nearly orthogonal anyway: the cosine is about 1 / sqrt(N).)

    Raises:
        ConfigError, CurvatureError: as `loss_slice`; also where the two directions are parallel.
    """
    _check(xs, direction_x)
    _check(ys, direction_y)
    center = operator.loss()
    pieces_x = split_direction(operator, direction_x)
    orthogonal, cosine = _orthogonal_part(direction_y, direction_x)
    pieces_y = split_direction(operator, orthogonal)
    points = measure_at(operator, [[(x, pieces_x), (y, pieces_y)] for y in ys for x in xs], report)
    missing, reasons = undefined_points(points)
    rows = [points[start : start + len(xs)] for start in range(0, len(points), len(xs))]
    return LossSurface(
        name_x=name_x,
        name_y=name_y,
        unit=unit,
        xs=tuple(map(float, xs)),
        ys=tuple(map(float, ys)),
        loss=tuple(tuple(point.loss for point in row) for row in rows),
        accuracy=tuple(tuple(point.accuracy for point in row) for row in rows),
        cosine=cosine,
        loss_at_model=center,
        length_x=norm(direction_x),
        length_y=norm(orthogonal),
        num_pairs=operator.num_pairs,
        temperature=operator.temperature,
        num_not_finite=missing,
        reasons=reasons,
    )


def _orthogonal_part(direction: Tensor, other: Tensor) -> tuple[Tensor, float]:
    """The part of `direction` orthogonal to `other`, at the length of `direction`; and their cosine."""
    length = norm(direction)
    along = other / norm(other)
    cosine = dot(along, direction) / length
    rest = direction - dot(along, direction) * along
    if norm(rest) <= math.sqrt(torch.finfo(direction.dtype).eps) * length:
        raise ConfigError(
            f"the two directions are parallel (cosine {cosine:.6f}): they span a line, not a plane. Choose another one."
        )
    rest -= dot(along, rest) * along  # once more, for what rounding left
    return rest * (length / norm(rest)), cosine


def _check(distances: Sequence[float], direction: Tensor) -> None:
    if len(distances) == 0 or not all(map(math.isfinite, distances)):
        raise ConfigError(f"distances={list(distances)} are no places on a line: give one finite number or more.")
    length = norm(direction)
    if not (length > 0 and math.isfinite(length)):
        raise ConfigError(f"the direction has length {length}: it leads nowhere. Choose a finite one that is not zero.")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
