"""Few seeds know their own variance badly: what the other arms of the experiment say about it.

Three seeds give a variance with two degrees of freedom, and Student's t pays for that with intervals twice as wide as
a known variance would need. Other arms were trained under the same seeds. What is borrowed from them is not the
variance itself, which differs between arms as much as their answers do, but its ratio to the noise of seed and prompt
together, which is known from thousands of answers: a ratio of 1 says that seeds differ by nothing else.

How alike the arms' ratios are is itself badly known from a handful of arms. Taking the likeliest answer, as limma does
for thousands of genes, claims effects too often where one arm is unlike the others; so all answers are kept, each with
its likelihood.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.verdicts.intervals import Component, ModeratedComponent

MODERATED_BELOW_SEEDS = 5
"""From five seeds on a variance of one's own is as good: moderation gains nothing, and costs coverage of an arm unlike
the others (benchmarks/verdict_coverage.py)."""
MODERATED_FROM_ARMS = 3
"""Two arms have one difference, and nothing to borrow from."""

_PRIOR_DF = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1e4])  # from "hardly alike" to "all the same"
_LOG_SCALES = np.linspace(-2.5, 2.5, 21)  # of the common ratio, around the arms' geometric mean
_SMALLEST_RATIO = 1e-9


@dataclass(frozen=True, slots=True)
class RatioPrior:
    """Posterior, from all arms, of the ratio of the seed variance to the noise of seed and prompt together.

    Each of M states of the world says: ratios scatter around `scales` like an inverse chi-square with `dfs` degrees of
    freedom.
    """

    weights: FloatArray
    """(M,), sum 1."""
    scales: FloatArray
    """(M,)."""
    dfs: FloatArray
    """(M,)."""
    pooled_df: float
    """Degrees of freedom of all arms together: no variance is known better than that."""

    def moderate(self, own: Component, noise: float) -> ModeratedComponent:
        """A difference's seed variance, from its own estimate and the arms'.

        In each state the ratio is (d0 s0 + d r) / (d0 + d) with d0 + d degrees of freedom, the posterior of Smyth 2004,
        and at least 1: the noise of seed and prompt is part of what seeds differ by.

        Args:
            own: the variance of the mean over seeds as its seeds alone show it.
            noise: the part of it that comes from seed and prompt together, above 0.
        """
        ratio = own.variance / noise
        ratios = np.maximum((self.dfs * self.scales + own.df * ratio) / (self.dfs + own.df), 1.0)  # (M,)
        return ModeratedComponent(self.weights, ratios * noise, np.minimum(self.dfs + own.df, self.pooled_df))


def fit_ratios(ratios: Sequence[float], df: float) -> RatioPrior:
    """The posterior over how large the arms' ratios are, and how alike.

    With prior degrees of freedom d0 and scale s0, a ratio r that was estimated with d degrees of freedom has
    r / s0 ~ F(d, d0). Flat over `_PRIOR_DF` and over log s0.

    Args:
        ratios: (A,) one an arm: its seed variance over its noise of seed and prompt, of its difference from the mean of
            all arms.
        df: d, seeds less one.

    Source:
        Smyth 2004, Linear models and empirical Bayes methods for assessing differential expression in microarray
        experiments, Statistical Applications in Genetics and Molecular Biology 3(1), section 6; integrated over d0
        and s0 in place of its moment estimate, which for 3 to 9 arms is hardly more than a guess.
    """
    values = np.maximum(np.asarray(ratios, dtype=np.float64), _SMALLEST_RATIO)  # (A,)
    scales = np.exp(np.log(values).mean() + _LOG_SCALES)  # (L,)
    d0 = _PRIOR_DF[:, None, None]  # (J, 1, 1) next to scales (L, 1) and values (A,)
    ratio = values / scales[:, None]  # (L, A)
    log_density = (
        special.gammaln((df + d0) / 2)
        - special.gammaln(df / 2)
        - special.gammaln(d0 / 2)
        + df / 2 * np.log(df / d0 * ratio)
        - (df + d0) / 2 * np.log1p(df / d0 * ratio)
    ).sum(axis=2)  # (J, L); 1 / r is the same for all of them
    weights = np.exp(log_density - log_density.max())
    return RatioPrior(
        weights=(weights / weights.sum()).ravel(),
        scales=np.broadcast_to(scales, weights.shape).ravel(),
        dfs=np.broadcast_to(_PRIOR_DF[:, None], weights.shape).ravel(),
        pooled_df=df * (len(values) - 1),
    )
