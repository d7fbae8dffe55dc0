"""A reward model as its linearisation: what training on n pairs does to a margin, by inner products of gradients alone.

Near its weights a margin is linear in them, m_x(theta + d) = m_x + g_x d, with the margin's gradient g_x. Trained on n
pairs with the loss l and a penalty on the distance gone,

    (1/n) sum_i l(m_i) + lambda/2 |d|^2,      l(m) = (1 - eps/2) softplus(-beta m) + (eps/2) softplus(beta m),

the weights enter by K_xi = g_x g_i alone: the Hessian H = (1/n) J^T W J + lambda I over N weights, with W = diag(l''),
becomes a matrix of pairs by Woodbury's identity,

    g_x H^-1 J^T = n K_x (n lambda I + W K)^-1.

The damping lambda stands for how far training went: a short training has moved along few directions, as a strong
penalty would have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import lu_factor, lu_solve
from scipy.special import expit

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import CurvatureError

DAMPINGS = tuple(float(10.0**power) for power in np.arange(1.0, -4.75, -0.5))
"""Dampings that are tried, as multiples of the mean squared norm of a training pair's gradient; from strong to weak,
since each solution starts from the one before. 10 leaves the margins all but unfitted, 1e-4 fits the pairs."""
NEWTON_STEPS = 50
TOLERANCE = 1e-9
"""Largest derivative of the objective, in nats a pair and unit of a coefficient, that counts as zero."""


@dataclass(frozen=True, slots=True)
class MarginLoss:
    """The loss of one pair by its margin, and its derivatives.

    Attributes:
        beta: scale of the margins inside the loss.
        label_smoothing: eps.
    """

    beta: float = 1.0
    label_smoothing: float = 0.0

    def value(self, margins: FloatArray) -> FloatArray:
        """Nats."""
        half, scaled = self.label_smoothing / 2, self.beta * margins
        return (1 - half) * np.logaddexp(0, -scaled) + half * np.logaddexp(0, scaled)

    def slope(self, margins: FloatArray) -> FloatArray:
        """First derivative, nats a logit: negative where the loss asks for a larger margin."""
        return self.beta * (expit(self.beta * margins) - (1 - self.label_smoothing / 2))

    def curvature(self, margins: FloatArray) -> FloatArray:
        """Second derivative, nats a squared logit, whatever the smoothing."""
        scaled = self.beta * margins
        return self.beta**2 * expit(scaled) * expit(-scaled)  # 1 - sigmoid(x) has no digits for large x


def resolvent(
    kernel: FloatArray, across: FloatArray, margins: FloatArray, damping: float, loss: MarginLoss
) -> FloatArray:
    """The matrix g_t H^-1 J^T / n, (T, n) logits: what a push of each training pair's margin does to others.

    Args:
        kernel: K, (n, n) of the training pairs.
        across: (T, n) inner products of the other pairs' gradients with the training pairs'.
        margins: (n,) of the training pairs, at which the curvature of the loss is taken.
        damping: lambda.
        loss: of a pair.
    """
    n = len(kernel)
    system = loss.curvature(margins)[:, None] * kernel
    system[np.diag_indices(n)] += n * damping
    # x A = b is A^T x^T = b^T.
    return lu_solve(lu_factor(system, overwrite_a=True), across.T, trans=1).T


def left_out_together(response: FloatArray, own: FloatArray, slope: FloatArray, curvature: FloatArray) -> FloatArray:
    """Change of T margins if R training pairs are left out at once: (T,) logits.

    One Newton step of the loss without them, whose curvature lacks theirs: exact where the loss is quadratic. By
    Woodbury's identity g (H - J_R^T W_R J_R / n)^-1 J_R^T = g H^-1 J_R^T (1 - W_R J_R H^-1 J_R^T / n)^-1.

    Args:
        response: (T, R) columns of `resolvent` of the T pairs.
        own: (R, R) rows and columns of `resolvent` of the training pairs themselves.
        slope: (R,) first derivatives of the loss of the pairs.
        curvature: (R,) second ones.
    """
    return response @ np.linalg.solve(np.eye(len(own)) - curvature[:, None] * own, slope)


@dataclass(frozen=True, slots=True)
class Damped:
    """One damping that was tried.

    Attributes:
        damping: lambda.
        coefficients: (n,) of the linearised model that was trained from margins of 0: its weights have moved by
            J^T times them, so its margins are K times them.
        error: see `choose_damping`.
        correlation: of its margins on held-out pairs with the model's own; NaN where either does not vary.
    """

    damping: float
    coefficients: FloatArray
    error: float
    correlation: float


def choose_damping(
    kernel: FloatArray,
    across: FloatArray,
    margins: FloatArray,
    loss: MarginLoss,
    *,
    multiples: Sequence[float] = DAMPINGS,
) -> tuple[Damped, ...]:
    """Train the linearised model under each damping and compare with the model on held-out pairs; the nearest first.

    The linearised model starts from margins of 0, as a fresh reward head gives, and is trained on the same pairs to
    the optimum. What counts is the mean squared difference of its margins from the model's own on held-out pairs, as a
    share of the mean square of the latter: 0 is the same model there, 1 is no better than saying 0.

    Args:
        kernel: K, (n, n) of the training pairs.
        across: (V, n) of the held-out pairs with the training pairs.
        margins: (V,) the model's own margins of the held-out pairs.
        loss: of a pair.
        multiples: dampings to try, as multiples of the mean of the diagonal of K; from strong to weak.

    Raises:
        CurvatureError: no training pair has a gradient, or a solution is not found.
    """
    unit = float(kernel.diagonal().mean())
    if not unit > 0:
        raise CurvatureError(
            "no training pair's margin has a gradient in these parameters, so none of them can move a margin: choose "
            "other parameters."
        )
    square = float(margins @ margins)
    tried, coefficients = [], np.zeros(len(kernel))
    for multiple in multiples:
        coefficients = fit_coefficients(kernel, multiple * unit, loss, start=coefficients)
        predicted = across @ coefficients
        error = float(np.square(predicted - margins).sum()) / square if square > 0 else np.nan
        tried.append(Damped(multiple * unit, coefficients, error, correlation(predicted, margins)))
    return tuple(sorted(tried, key=lambda one: one.error))


def fit_coefficients(
    kernel: FloatArray, damping: float, loss: MarginLoss, *, start: FloatArray | None = None
) -> FloatArray:
    """The optimum of the linearised training from margins of 0: coefficients a (n,) with a_i = -l'(m_i) / (n lambda).

    Newton's method on (1/n) sum_i l((K a)_i) + lambda/2 a K a, halving steps until it falls.

    Raises:
        CurvatureError: the tolerance was not reached.
    """
    n = len(kernel)
    a = np.zeros(n) if start is None else start
    margins = kernel @ a
    for _ in range(NEWTON_STEPS):
        left = loss.slope(margins) + n * damping * a
        if float(np.abs(left).max()) <= TOLERANCE:
            return a
        system = loss.curvature(margins)[:, None] * kernel
        system[np.diag_indices(n)] += n * damping
        step = np.linalg.solve(system, left)
        change = kernel @ step
        before, share = _objective(a, margins, damping, loss), 1.0
        slope = float(change @ left) / n
        while (
            _objective(a - share * step, margins - share * change, damping, loss)
            > before - 1e-4 * share * slope + 1e-14
        ):
            share /= 2
        a, margins = a - share * step, margins - share * change
    raise CurvatureError(
        f"training the linearised model with damping {damping:.3g} leaves a derivative of "
        f"{float(np.abs(loss.slope(margins) + n * damping * a).max()):.2g} after {NEWTON_STEPS} steps: the gradients' "
        "inner products are not accurate enough. Use float32 weights or wider, or other parameters."
    )


def _objective(a: FloatArray, margins: FloatArray, damping: float, loss: MarginLoss) -> float:
    return float(loss.value(margins).mean()) + damping / 2 * float(a @ margins)


def correlation(first: FloatArray, second: FloatArray) -> float:
    """Pearson's; NaN where one of them does not vary."""
    a, b = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else float("nan")
