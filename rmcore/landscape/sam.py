"""Sharpness in the sense of SAM: how far the loss rises within a small step of the weights."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from rmcore.core.errors import ConfigError
from rmcore.landscape.directions import Quadratic, split_direction
from rmcore.landscape.displaced import measure_at, undefined_points
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.vectors import dot, norm

SAM_RADIUS = 0.05
"""rho of Foret et al. 2021, arXiv:2010.01412, for CIFAR (the best of their grid there) and ImageNet."""


@dataclass(frozen=True)
class SamSharpness:
    """Rise of the loss after one step of length `radius` along its own gradient g, in nats a pair.

    Attributes:
        radius: rho, Euclidean length of the step.
        loss_at_radius: L(theta + rho g / ||g||); None where it is not finite or the gradient is zero.
        sharpness: loss_at_radius - loss.
        first_order: rho ||g||: what the slope alone predicts.
        second_order: rho ||g|| + rho^2 g^T H g / (2 ||g||^2): with the curvature; None where the gradient is zero.
        reasons: name of each undefined field -> why.
    """

    radius: float
    loss: float
    loss_at_radius: float | None
    sharpness: float | None
    gradient_norm: float
    first_order: float
    second_order: float | None
    num_pairs: int
    temperature: float
    reasons: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return asdict(self)


def sam_sharpness(operator: LossHessian, radius: float = SAM_RADIUS) -> SamSharpness:
    """L(theta + rho g / ||g||) - L(theta), with what slope and curvature predict: a gradient, a product and two passes.

    The step is the first-order solution of max L(theta + e) over ||e|| <= rho, so the worst case is at least this bad.
    Here g is over all pairs of the operator; SAM in training takes it over one batch, where it is larger.

    Raises:
        ConfigError: the radius is not a positive number.
        CurvatureError: the loss or the product at the model is not finite.

    Source:
        Foret et al. 2021, arXiv:2010.01412, equations 1 and 2.
    """
    if not (radius > 0 and math.isfinite(radius)):
        raise ConfigError(f"radius={radius} is no length of a step: give a positive number, such as {SAM_RADIUS}.")
    loss, gradient = operator.loss(), operator.gradient()
    slope = norm(gradient)
    reached, second_order = None, None
    reasons = dict.fromkeys(("loss_at_radius", "sharpness", "second_order"), "the gradient is zero: no way leads up.")
    if slope > 0:
        unit = gradient / slope
        second_order = Quadratic(0.0, slope, dot(unit, operator.product(unit))).at(radius)
        points = measure_at(operator, [[(radius, split_direction(operator, unit))]])
        reached, reasons = points[0].loss, undefined_points(points)[1]
        if reached is None:
            reasons = dict.fromkeys(("loss_at_radius", "sharpness"), reasons["loss"])
    return SamSharpness(
        radius=radius,
        loss=loss,
        loss_at_radius=reached,
        sharpness=None if reached is None else reached - loss,
        gradient_norm=slope,
        first_order=radius * slope,
        second_order=second_order,
        num_pairs=operator.num_pairs,
        temperature=operator.temperature,
        reasons=reasons,
    )
