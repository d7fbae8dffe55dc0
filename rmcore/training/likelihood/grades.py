"""The likelihood of grades: logistic, cumulative and Gaussian links, with an optional offset for each prompt.

    binary     P(y = 1) = sigmoid(eta - theta)
    ordinal    P(y <= l) = sigmoid(theta_l - eta), theta_0 < theta_1 < ...: the cumulative link (McCullagh 1980)
    real       y ~ Normal(eta - theta, sigma^2), y standardised over the training grades

eta is what the model says of the answer. Graders differ from prompt to prompt; an offset b ~ Normal(0, tau^2), shared
by the grades of one prompt and integrated out, keeps that from being read as quality.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rmcore.data.survey import Link, Scale

FAR = 1e4
"""A threshold that no grade is beyond."""
NODES = 61
"""Nodes of the Gauss-Hermite rule that integrates an offset out: for 8 grades of one prompt off by 2e-6 nats at tau = 2
and by 2e-3 at tau = 3."""


def thresholds(raw: Tensor) -> Tensor:
    """Turn T free numbers into T rising thresholds: the first, then logarithms of the gaps."""
    return torch.cat([raw[:1], raw[:1] + raw[1:].exp().cumsum(0)])


def free_thresholds(values: Tensor) -> Tensor:
    """Turn T rising thresholds into the T free numbers that `thresholds` makes them of."""
    return torch.cat([values[:1], values.diff().log()])


def grade_log_likelihood(eta: Tensor, codes: Tensor, rising: Tensor, log_sigma: Tensor, link: Link) -> Tensor:
    """Log-likelihood of M grades of one attribute, in nats; a density for real ones.

    Args:
        eta: (..., M) what the model says.
        codes: (M,) see `rmcore.data.survey.Scale.code`.
        rising: (T,) thresholds.
        log_sigma: (1,) logarithm of the standard deviation of real grades.
        link: of the attribute.

    Returns:
        (..., M)
    """
    if link == "real":
        residual = (codes - eta + rising) / log_sigma.exp()
        return -0.5 * residual.square() - log_sigma - 0.5 * math.log(2 * math.pi)
    edges = torch.cat([rising.new_full((1,), -FAR), rising, rising.new_full((1,), FAR)])  # (L + 1,)
    level = codes.long()
    below, above = edges[level], edges[level + 1]  # (M,)
    # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)), without the cancellation of the difference.
    gap = torch.log(-torch.expm1(below - above))
    return functional.logsigmoid(above - eta) + functional.logsigmoid(eta - below) + gap


def marginal_log_likelihood(codes: Tensor, scale: Scale) -> Tensor:
    """Log-likelihood of M grades for one who knows only how often each is given in training: (M,) nats.

    A standard normal density for real ones.
    """
    if scale.link == "real":
        return -0.5 * codes.square() - 0.5 * math.log(2 * math.pi)
    return codes.new_tensor(scale.shares).log()[codes.long()]


def gaussian_with_offset(eta: Tensor, codes: Tensor, groups: Tensor, rising: Tensor, log_sigma: Tensor,
                         log_tau: Tensor, num_groups: int) -> Tensor:  # fmt: skip
    """Log-density of the real grades of each of G prompts, offsets integrated out in closed form: (G,) nats.

    The grades of a prompt are then jointly normal with variance sigma^2 + tau^2 and covariance tau^2.

    Args:
        eta: (M,)
        codes: (M,) standardised grades.
        groups: (M,) long, the prompt of each grade, below G.
        rising: (1,) threshold.
        log_sigma: (1,)
        log_tau: (1,) logarithm of the standard deviation of the offsets.
        num_groups: G.
    """
    residual = codes - eta + rising
    zeros = residual.new_zeros(num_groups)
    counts = zeros.index_add(0, groups, torch.ones_like(residual))
    sums = zeros.index_add(0, groups, residual)
    squares = zeros.index_add(0, groups, residual.square())
    noise, spread = (2 * log_sigma).exp(), (2 * log_tau).exp()
    total = noise + counts * spread
    quadratic = (squares - spread / total * sums.square()) / noise
    log_determinant = (counts - 1) * 2 * log_sigma + total.log()
    return -0.5 * (quadratic + log_determinant + counts * math.log(2 * math.pi))


def hermite_rule(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and logarithms of the weights of an expectation over a standard normal: two (Q,) tensors like `like`.

    Source: Gauss-Hermite quadrature for probabilists, as in numpy.polynomial.hermite_e.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return like.new_tensor(nodes), like.new_tensor(np.log(weights / weights.sum()))
