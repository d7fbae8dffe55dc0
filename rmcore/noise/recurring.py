"""Margins that take the other labels of a prompt into account, the label itself left out.

Where answers recur, an answer that won elsewhere is the likelier winner here. Answer j of a prompt has a strength
s_j ~ N(b r_j, tau^2), with r_j the rewards behind the cross-fitted margins m, and i beats j with sigma(s_i - s_j). One
Newton step from the rewards, over all labels l of an answer but the one that is looked at, gives

    d_j = sum_l (won_l - p_l) / (1 / tau^2 + sum_l p_l (1 - p_l)),    p_l = sigma(b m_l) that the answer wins l

and the margin with the others is m + (d_chosen - d_rejected) / b. The label itself is in no part of it, so it is no
evidence for itself. b, tau, a scale and the rate of wrong labels are those under which the labels, each given the
others, are likeliest. A pair none of whose answers recurs keeps its margin. Copies of a row count as labels of their
own: remove them first. `rmcore.noise.rate` reads the result as it reads any margin.

Source:
    One step from a good start is enough for a smooth likelihood: Le Cam 1956; the leave-one-out likelihood of all
    labels is a pseudo-likelihood (Besag 1975, Statistical analysis of non-lattice data, The Statistician 24).
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from rmcore.core.arrays import FloatArray, IntArray

Couple = tuple[str, str, str]
"""Prompt, chosen and rejected text, normalized."""
STARTS = (0.0, 0.0, 0.0, -3.0)
BOUNDS = ((-4.0, 4.0), (-6.0, 6.0), (-4.0, 2.0), (-5.5, 3.0))
"""Ranges of the logarithms of b (margins in units of their size), tau squared and the scale, and of the logit."""


def with_other_labels(margins: FloatArray, texts: Sequence[Couple]) -> FloatArray:
    """Margins of P pairs, (P,), given the other labels of their answers too.

    Args:
        margins: (P,) cross-fitted.
        texts: (P,) of the pairs, equal where answers are the same.
    """
    numbers: dict[tuple[str, str], int] = {}
    better = np.array([numbers.setdefault((prompt, text), len(numbers)) for prompt, text, _ in texts], dtype=np.int64)
    worse = np.array([numbers.setdefault((prompt, text), len(numbers)) for prompt, _, text in texts], dtype=np.int64)
    size = float(np.sqrt(np.mean(margins**2))) or 1.0

    def loss(free: FloatArray) -> float:
        slope, spread, scale = np.exp(free[:3])
        rate = expit(free[3]) / 2
        logits = scale * (slope / size * margins + _learned(slope / size * margins, better, worse, spread))
        return -float(np.log(rate + (1 - 2 * rate) * expit(logits)).sum())

    found = minimize(loss, STARTS, method="Nelder-Mead", bounds=BOUNDS, options={"xatol": 0.01, "fatol": 0.01})
    slope, spread = np.exp(found.x[:2])
    return margins + _learned(slope / size * margins, better, worse, spread) / (slope / size)


def _learned(logits: FloatArray, better: IntArray, worse: IntArray, spread: float) -> FloatArray:
    """Learn from the other labels by how much the chosen answer is stronger than its margin says, (P,), in logits."""
    differ = better != worse  # a label between equal texts says nothing
    surprise, curve = differ * expit(-logits), differ * expit(logits) * expit(-logits)
    num = int(max(better.max(), worse.max())) + 1
    gained = np.bincount(better, surprise, num) - np.bincount(worse, surprise, num)
    curvature = np.bincount(better, curve, num) + np.bincount(worse, curve, num)
    one = (gained[better] - surprise) / (1 / spread + curvature[better] - curve)
    other = (gained[worse] + surprise) / (1 / spread + curvature[worse] - curve)
    return np.asarray(differ * (one - other))
