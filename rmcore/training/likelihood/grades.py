"""The likelihood of grades: logistic, cumulative and Gaussian links.

    binary     P(y = 1) = sigmoid(eta - theta)
    ordinal    P(y <= l) = sigmoid(theta_l - eta), theta_0 < theta_1 < ...: the cumulative link (McCullagh 1980)
    real       y ~ Normal(eta - theta, sigma^2), y standardised over the training grades

eta is what the model says of the answer.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from rmcore.data.survey import Link, Scale

FAR = 1e4
"""A threshold that no grade is beyond."""


def thresholds(raw: Tensor) -> Tensor:
    """Turn T free numbers into T rising thresholds: the first, then logarithms of the gaps."""
    return torch.cat([raw[:1], raw[:1] + raw[1:].exp().cumsum(0)])


def free_thresholds(values: Tensor) -> Tensor:
    """Turn T rising thresholds into the T free numbers that `thresholds` makes them of."""
    return torch.cat([values[:1], values.diff().log()])


def grade_log_likelihood(eta: Tensor, codes: Tensor, rising: Tensor, log_sigma: Tensor, link: Link) -> Tensor:
    """Log-likelihood of M grades of one attribute, in nats; a density for real ones.

    Args:
        eta: (M,) what the model says.
        codes: (M,) see `rmcore.data.survey.Scale.code`.
        rising: (T,) thresholds.
        log_sigma: (1,) logarithm of the standard deviation of real grades.
        link: of the attribute.

    Returns:
        (M,)
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
