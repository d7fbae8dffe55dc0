"""Reward heads fitted on frozen features: Bradley-Terry with a linear reward is a convex problem with one optimum.

Only chosen minus rejected enters, so an intercept cancels and nothing of it is fitted. Features are standardised inside
(divided by their root mean square over the pairs; a difference has no mean that could be taken off), so the penalty
does not depend on their units and the head comes back in the units of the features.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse.linalg import LinearOperator, cg
from scipy.special import expit

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError, ModelError

TOLERANCE = 1e-9
"""Largest gradient, in nats a pair and standardised unit, that counts as zero; float64 reaches about 1e-15."""


def fit_head(
    differences: npt.ArrayLike,
    *,
    start: npt.ArrayLike | None = None,
    l2: float | None = None,
    weights: npt.ArrayLike | None = None,
    steps: int = 100,
    tolerance: float = TOLERANCE,
) -> FloatArray:
    """The head that minimises the penalised Bradley-Terry loss of P pairs, exactly, whatever `start` is: (D,) float64.

    sum_p w_p softplus(-h x_p) + l2/2 sum_d (s_d h_d)^2,
    s_d = root mean square of feature d over the weighted pairs (1 where that is 0)

    Newton's method with conjugate gradients, in float64: no D x D matrix exists.

    Args:
        differences: (P, D) features of the chosen side minus those of the rejected side.
        start: (D,) first iterate; a near one saves time and changes nothing else.
        l2: precision of a Gaussian prior on the standardised head, in 1 / logits^2. None: D, under which the margins
            of the pairs have a mean square of 1 logit^2 before any label is seen, whatever D is and however features
            correlate: of the order that trained reward models have.
        weights: (P,) how often each pair counts, 0 or more; a weight of 2 equals two copies. None: once.
        steps: most Newton steps; about ten are taken.
        tolerance: of the gradient per pair.

    Raises:
        ConfigError: l2 is not above 0: without it separable pairs have no optimum.
        DataError: a feature or weight is not finite, shapes do not fit, or no pair has weight.
        ModelError: the tolerance was not reached.
    """
    x = np.asarray(differences, dtype=np.float64)
    w = np.ones(len(x)) if weights is None else np.asarray(weights, dtype=np.float64)
    _check_data(x, w)
    num_features = x.shape[1]
    penalty = float(num_features) if l2 is None else float(l2)
    if not penalty > 0:
        raise ConfigError(f"l2={l2}: the fit has one finite optimum for l2 > 0 only; choose such a value.")
    x, w = x[w > 0], w[w > 0]
    total = float(w.sum())
    # (D,) not centred: the sides of a pair may be swapped, so the mean difference is 0 by symmetry.
    scale = np.sqrt(np.einsum("p,pd,pd->d", w, x, x) / total)
    scale[scale == 0] = 1.0  # a feature that never differs keeps a head of 0, which the penalty alone decides
    problem = _Problem(x / scale, w / total, penalty / total)
    return problem.minimise(_scaled(start, scale), steps=steps, tolerance=tolerance) / scale


def bootstrap_heads(
    differences: npt.ArrayLike, prompt_ids: Sequence[str], num_members: int, seed: int, *, l2: float | None = None
) -> FloatArray:
    """Heads that differ by the pairs they were fitted on: (M, D) float64.

    Each member weights the prompts by how often they come up in as many draws with replacement; all pairs of a prompt
    go together, because they are not independent. No pair is copied.

    Args:
        differences: (P, D) as for `fit_head`.
        prompt_ids: (P,) which prompt each pair is of.
        num_members: M.
        seed: of the draws.
        l2: as for `fit_head`.

    Raises:
        ConfigError: num_members is below 1; see also `fit_head`.
        DataError: see `fit_head`, or there is one prompt only.
    Source:
        Field and Welsh 2007, Bootstrapping clustered data, JRSS B 69(3).
    """
    x = np.asarray(differences, dtype=np.float64)
    _check_data(x, np.ones(len(x)))
    if num_members < 1:
        raise ConfigError(f"num_members={num_members}: there is nothing to fit; ask for at least one head.")
    prompts, prompt = np.unique(np.asarray(prompt_ids), return_inverse=True)
    if len(prompt) != len(x) or len(prompts) < 2:
        raise DataError(
            f"bootstrap_heads got {len(x)} pairs, {len(prompt)} prompt ids and {len(prompts)} different prompts: what "
            "is drawn are prompts, one id a pair, so there must be several. Pass pairs of more prompts."
        )
    start = fit_head(x, l2=l2, tolerance=1e-4)
    rng = np.random.default_rng(seed)
    heads = []
    for _ in range(num_members):
        counts = rng.multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)))
        heads.append(fit_head(x, start=start, l2=l2, weights=counts[prompt]))
    return np.stack(heads)  # (M, D)


class _Problem:
    """Mean loss over weighted pairs plus penalty, as a function of the standardised head h (D,)."""

    def __init__(self, z: FloatArray, w: FloatArray, penalty: float) -> None:
        self.z, self.w, self.penalty = z, w, penalty

    def minimise(self, head: FloatArray, *, steps: int, tolerance: float) -> FloatArray:
        for _ in range(steps):
            margin = self.z @ head  # (P, D) @ (D,) -> (P,)
            gradient = self.gradient(head, margin)
            size = float(np.abs(gradient).max())
            if size <= tolerance:
                return head
            direction = self._newton(margin, gradient, accuracy=min(0.1, size))
            head = head - self._step(head, margin, gradient, direction) * direction
        raise ModelError(
            f"the head's gradient is still {size:.2g} after {steps} Newton steps (tolerance {tolerance:.2g}); allow "
            "more steps, or a larger l2."
        )

    def value(self, head: FloatArray, margin: FloatArray) -> float:
        return float(self.w @ np.logaddexp(0, -margin)) + self.penalty / 2 * float(head @ head)

    def gradient(self, head: FloatArray, margin: FloatArray) -> FloatArray:
        return self.z.T @ (self.w * (expit(margin) - 1)) + self.penalty * head

    def _newton(self, margin: FloatArray, gradient: FloatArray, *, accuracy: float) -> FloatArray:
        """Inverse Hessian times gradient. The accuracy follows the gradient, which keeps Newton's order 2."""
        # (P,): sigma (1 - sigma); the (D, D) Hessian is never formed, D may be thousands.
        curvature = self.w * expit(margin) * expit(-margin)

        def product(vector: FloatArray) -> FloatArray:
            return self.z.T @ (curvature * (self.z @ vector)) + self.penalty * vector

        size = len(gradient)
        return cg(LinearOperator((size, size), matvec=product, dtype=np.float64), gradient, rtol=accuracy)[0]

    def _step(self, head: FloatArray, margin: FloatArray, gradient: FloatArray, direction: FloatArray) -> float:
        """Halve until the loss falls; near the optimum its change is below rounding, and the whole step is right."""
        before, change, slope = self.value(head, margin), self.z @ direction, float(gradient @ direction)
        rounding, step = 1e-14 * abs(before), 1.0
        while self.value(head - step * direction, margin - step * change) > before - 1e-4 * step * slope + rounding:
            step /= 2
        return step


def _scaled(head: npt.ArrayLike | None, scale: FloatArray) -> FloatArray:
    if head is None:
        return np.zeros(len(scale))
    values = np.asarray(head, dtype=np.float64)
    if values.shape != scale.shape or not np.isfinite(values).all():
        raise DataError(f"start of shape {values.shape} is no finite head of {len(scale)} features; pass (D,) numbers.")
    return values * scale


def _check_data(x: FloatArray, w: FloatArray) -> None:
    if x.ndim != 2 or w.shape != x.shape[:1]:
        raise DataError(
            f"differences of shape {x.shape} with weights of shape {w.shape}: a head is fitted on (P, D) differences "
            "and (P,) weights."
        )
    if not np.isfinite(x).all() or not np.isfinite(w).all() or (w < 0).any() or not w.sum() > 0:
        raise DataError(
            f"of {len(x)} pairs {int((~np.isfinite(x).all(axis=1)).sum())} have features that are not finite, and "
            f"their weights add up to {w.sum():g}: no head can be fitted. Look for a diverged model, and pass weights "
            "of 0 or more with at least one above."
        )
