"""The loss at other weights than the model's, which come back bit by bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rmcore.core.progress import Report, silent
from rmcore.landscape.operators import PairCurvature


class LossPoint(NamedTuple):
    """Loss, accuracy and ties of all pairs at one place.

    loss: mean, nats a pair; None where a margin is not finite. accuracy: share of pairs with margin > 0,
    ties half. tie_rate: share of pairs with margin 0. Both are None where the loss is.
    """

    loss: float | None
    accuracy: float | None
    tie_rate: float | None


Step = tuple[float, list[Tensor]]
"""A distance, and the direction as one tensor a parameter."""


def measure_at(operator: PairCurvature, places: Sequence[Sequence[Step]], report: Report = silent) -> list[LossPoint]:
    """Measure the pairs at each place, one pass without gradients each; a place is a sum of steps from the model.

    Weights are changed in place and put back bit by bit, also after an exception. That takes one copy of them.

    Args:
        operator: the model, the pairs, the parameters that move, and the temperature.
        places: each a list of steps; an empty one is the model itself.
        report: called after each place.
    """
    return [_point(margins, operator.temperature) for margins in margins_at(operator, places, report)]


def margins_at(operator: PairCurvature, places: Sequence[Sequence[Step]], report: Report = silent) -> list[Tensor]:
    """Margins of all pairs at each place, (n,) float64 on the CPU, in the order of the micro-batches.

    Weights, arguments and costs are those of `measure_at`, which keeps less of each place.
    """
    found = []
    with _restored(operator) as originals:
        for done, steps in enumerate(places, start=1):
            for index, (p, original) in enumerate(zip(operator.parameters, originals, strict=True)):
                # .data: graphs kept for products stay valid, because the weights they saved come back unchanged.
                p.data.copy_(original)
                for distance, pieces in steps:
                    p.data.add_(pieces[index], alpha=distance)
            found.append(operator.margins().cpu().double())
            report(done, len(places), "places")
    return found


@contextmanager
def _restored(operator: PairCurvature) -> Iterator[list[Tensor]]:
    with torch.inference_mode(False), torch.no_grad():
        originals = [p.detach().clone() for p in operator.parameters]
        try:
            yield originals
        finally:
            for p, original in zip(operator.parameters, originals, strict=True):
                p.data.copy_(original)


def _point(margins: Tensor, temperature: float) -> LossPoint:
    if not bool(torch.isfinite(margins).all()):
        return LossPoint(None, None, None)
    loss = float(softplus(-margins / temperature).mean())
    right, tied = int((margins > 0).sum()), int((margins == 0).sum())
    return LossPoint(loss, (right + tied / 2) / len(margins), tied / len(margins))


def undefined_points(points: Sequence[LossPoint]) -> tuple[int, dict[str, str]]:
    """Number of points without a loss, and the reasons for what is undefined."""
    missing = sum(point.loss is None for point in points)
    if not missing:
        return 0, {}
    overflow = f"at {missing} of {len(points)} points a reward is not finite: the weights are too far out."
    return missing, dict.fromkeys(("loss", "accuracy", "tie_rate"), overflow)
