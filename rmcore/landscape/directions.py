"""Directions through the weights of a model, and how far to look along one.

What a line through the loss shows depends on its direction, so there are three kinds with a meaning: eigenvectors of
the Hessian (eigensolvers.py), random directions scaled to the filters of the model, and the way to another checkpoint.
Compare two models along filter-normalised directions only: any other length can be changed at will by rescaling layers,
without changing one reward (Dinh et al. 2017, arXiv:1703.04933).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rmcore.core.errors import ConfigError, CurvatureError, ModelError
from rmcore.landscape.operators import PairCurvature
from rmcore.landscape.parameters import reward_module

LENGTH_UNIT = "Euclidean length of the step in the weights"
FILTER_UNIT = "step relative to the norm of each filter"
PATH_UNIT = "share of the way: 0 this model, 1 the other"


class Quadratic(NamedTuple):
    """Second-order Taylor polynomial of the loss along a direction v: loss + d slope + d^2 curvature / 2.

    loss: nats a pair. slope: gradient . v. curvature: v^T H v, the eigenvalue of an eigenvector of length 1.
    """

    loss: float
    slope: float
    curvature: float

    def at(self, distance: float) -> float:
        """Predicted loss, nats a pair."""
        return self.loss + distance * self.slope + 0.5 * distance**2 * self.curvature

    def doubling_distance(self) -> float:
        """Distance at which slope and curvature, by their magnitudes, add the loss once more: how far to look.

        Raises:
            CurvatureError: loss, or slope and curvature, are zero, so that no distance is singled out.
        """
        slope, curvature = abs(self.slope), abs(self.curvature)
        reach = slope + math.sqrt(slope**2 + 2 * curvature * self.loss)
        if not (reach > 0 and self.loss > 0):
            raise CurvatureError(
                f"the loss {self.loss} has slope {self.slope} and curvature {self.curvature} along this direction: "
                "no distance doubles it. Give the distances yourself."
            )
        return 2 * self.loss / reach


def symmetric_distances(half_width: float, num: int) -> tuple[float, ...]:
    """`num` evenly spaced distances from -half_width to half_width, with exactly 0 in the middle.

    Args:
        half_width: 1 for filter-normalised directions (Li et al. 2018 draw [-1, 1]), `Quadratic.doubling_distance`
            along an eigenvector.
        num: odd, at least 3.

    Raises:
        ConfigError: num is even or too small, or half_width is not a positive number.
    """
    if num < 3 or num % 2 == 0:
        raise ConfigError(f"num={num} distances have no middle one at the model itself: use an odd number from 3 on.")
    if not (half_width > 0 and math.isfinite(half_width)):
        raise ConfigError(f"half_width={half_width} spans no line: give a positive number.")
    half = num // 2
    return tuple(half_width * (step / half) for step in range(-half, half + 1))


def random_direction(operator: PairCurvature, seed: int) -> Tensor:
    """(N,) independent standard normal entries, the same on every device. Normalise it before use."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(operator.num_parameters, generator=generator, dtype=operator.dtype).to(operator.device)


def filter_normalized(operator: PairCurvature, direction: Tensor) -> Tensor:
    """Scale each filter of a direction to the norm of the model's own filter: d_ij <- d_ij ||theta_ij|| / ||d_ij||.

    A filter is a row of a matrix (all entries with the same first index): the weights of one neuron of a linear layer,
    the vector of one token of an embedding. Biases and normalisation weights (parameters with one axis) get 0, as with
    `ignore='biasbn'` in the authors' code: they have no filters. A filter that is zero in the model or in the
    direction gets 0 too.

    Args:
        operator: the model and the parameters that move.
        direction: (N,), in the order of `operator.names`.

    Returns:
        (N,), in the operator's dtype.

    Raises:
        ConfigError: the direction has another length.
        ModelError: nothing is left, because there is no matrix among the parameters or each one is zero.

    Source:
        Li et al. 2018, arXiv:1712.09913, section 4.
    """
    pieces = [
        _scaled_rows(piece, p.detach()) if p.ndim >= 2 else torch.zeros_like(piece)
        for piece, p in zip(split_direction(operator, direction), operator.parameters, strict=True)
    ]
    found = torch.cat([piece.reshape(-1).to(operator.dtype) for piece in pieces])
    if not bool(found.any()):
        raise ModelError(
            f"the {len(pieces)} parameters chosen ({operator.subset!r}) have no filter with a norm: a "
            "filter-normalised direction is zero. Choose parameters with a matrix that is not zero, such as 'all'."
        )
    return found


def _scaled_rows(piece: Tensor, weight: Tensor) -> Tensor:
    rows, targets = piece.flatten(1), weight.flatten(1).norm(dim=1, keepdim=True)
    norms = rows.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, rows / norms * targets, 0.0).view_as(piece)


def checkpoint_direction(operator: PairCurvature, other: Any) -> Tensor:
    """theta_other - theta, (N,): distance 0 is this model, 1 the other (up to rounding), 0.5 the mean of their weights.

    With `parameters` other than 'all', the rest of the model stays this model's, and 1 is a mixture of the two.

    Args:
        operator: this model and the parameters that move.
        other: another checkpoint of the same architecture, as a module or with one as `.model`.

    Raises:
        ModelError: a parameter is missing or has another shape; or, with 'all', frozen weights or buffers differ.
        CurvatureError: the other model is compiled or narrower than float32.
    """
    module = reward_module(other)
    theirs = dict(module.named_parameters())
    for name, p in zip(operator.names, operator.parameters, strict=True):
        if name not in theirs or theirs[name].shape != p.shape:
            found = f"the shape {tuple(theirs[name].shape)}" if name in theirs else "no such parameter"
            raise ModelError(
                f"{name} has the shape {tuple(p.shape)} in this model and {found} in the other: no straight line leads "
                "from one to the other. Give two checkpoints of the same architecture, tokenizer and adapters."
            )
    if operator.subset == "all":
        _check_rest(operator, module)
    pairs = zip(operator.names, operator.parameters, strict=True)
    return torch.cat([(theirs[name].detach().to(p) - p.detach()).reshape(-1).to(operator.dtype) for name, p in pairs])


def _check_rest(operator: PairCurvature, other: nn.Module) -> None:
    """Refuse two models whose unmoved parts differ: distance 1 would be neither model."""
    ours, theirs = operator.module.state_dict(keep_vars=True), other.state_dict(keep_vars=True)
    moved = {id(p) for p in operator.parameters}
    differing = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        same = ours[name].shape == theirs[name].shape and torch.equal(ours[name], theirs[name].to(ours[name]))
        if id(ours[name]) not in moved and not same:
            differing.append(name)
    if differing:
        raise ModelError(
            f"{len(differing)} weights or buffers that are frozen or not shared differ between the two models, such as "
            f"{min(differing)}: a line through the trained parameters does not end at the other model. Unfreeze them "
            "with requires_grad_(True), or choose a part of the model as parameters."
        )


def split_direction(operator: PairCurvature, direction: Tensor) -> list[Tensor]:
    """A flat (N,) direction as one tensor a parameter, with its shape, dtype and device.

    Raises:
        ConfigError: another length.
    """
    if direction.shape != (operator.num_parameters,):
        raise ConfigError(
            f"got a direction {tuple(direction.shape)} for {operator.num_parameters} parameters: pass a flat one of "
            "that length, in the order of `operator.names`."
        )
    pieces = direction.split(operator.sizes)
    return [piece.view_as(p).to(p) for piece, p in zip(pieces, operator.parameters, strict=True)]
