"""How many labels are wrong, and which: a model of labels given the margins of a reward model that never saw them.

A label against a margin is either a close call or a mistake. Close calls become rarer as margins grow; mistakes do not:

    P(label | margin m) = eps + (1 - 2 eps) sigma(a m)

where eps is the share of labels turned round, and a says how much a unit of margin means. So eps is read off the labels
that go against large margins, and from nowhere else: a model that is confidently wrong looks the same, and mistakes
that are rarer or more frequent among close calls are not seen. The interval of the rate allows for that. What is
estimated is the share of labels that contradict what is learned from the others, which is the share of wrong labels
where the model's own errors become rarer as its margins grow. docs/label-noise.md shows where that holds.

Source:
    The likelihood is that of Rasch models with a guessing rate, and of "conservative DPO" (Mitchell 2023) with eps and
    a estimated; the interval is the profile likelihood's, tempered by a design effect over prompts (Varin, Reid and
    Firth 2011, An overview of composite likelihood methods, Statistica Sinica 21). A bootstrap is not used, because it
    is inconsistent where the rate is 0, which is the case that matters most here (Andrews 2000, Econometrica 68).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit, stdtrit

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.core.errors import DataError

RATES: FloatArray = np.linspace(0, 0.495, 100)
"""(E,) rates that are tried. At one half a label says nothing."""
SCALES: FloatArray = np.geomspace(0.02, 50, 60)
"""(A,) scales that are tried, in units of 1 / (root mean square of the margins): from "knows nothing" to a step."""
ANY_RATE = 0.45
"""An interval from 0 to above this says nothing."""
SMALLEST_PART = 1 / 3
"""Where mistakes depend on the margin, they are taken to occur in no smaller part of the pairs, the clearest."""
TINY = 1e-300
FEWEST_PAIRS = 50
"""Fewer pairs say nothing of a rate: with none wrong of 50, one in 14 may be."""
_CHUNK = 20_000


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of wrong labels, over `num_pairs` pairs of `num_prompts` prompts.

    Its 95 % interval holds however likely mistakes are at each margin.
    """

    value: float
    low: float
    high: float
    num_pairs: int
    num_prompts: int


@dataclass(frozen=True, slots=True)
class LabelModel:
    """A fitted model of labels given margins.

    Attributes:
        scale: a, per logit of margin.
        rate: eps, over all pairs.
        fitting: the lowest and the highest eps of the model that fit: its 95 % interval where mistakes are as likely at
            every margin, as the model has them.
        scale_at_low: a, where eps is the lowest that fits.
    """

    scale: float
    rate: Rate
    fitting: tuple[float, float]
    scale_at_low: float

    @property
    def says_nothing(self) -> bool:
        """Whether every rate fits the labels about as well, from 0 to nearly one half."""
        return self.fitting[0] == 0 and self.fitting[1] >= ANY_RATE

    @property
    def is_shown(self) -> bool:
        """Whether the rate is shown to be above 0."""
        return self.fitting[0] > 0

    def posterior(self, margins: FloatArray) -> FloatArray:
        """Probability that each label was turned round, (P,)."""
        return flipped(margins, self.scale, self.rate.value)

    def cautious(self, margins: FloatArray) -> FloatArray:
        """The same under the lowest rate that fits, (P,): 0 where the rate is not shown to be above 0."""
        return flipped(margins, self.scale_at_low, self.fitting[0])


def flipped(margins: FloatArray, scale: float, rate: float) -> FloatArray:
    """Probability that a label was turned round, given its margin, (P,)."""
    against = rate * expit(-scale * margins)
    return np.asarray(against / np.maximum(against + (1 - rate) * expit(scale * margins), TINY))


def fit_labels(margins: npt.ArrayLike, prompts: Sequence[str]) -> LabelModel:
    """Fit the model by maximum likelihood on a grid, with an interval over prompts.

    Args:
        margins: (P,) learned without the pair's own label: of models of other prompts, with the other labels of the
            prompt or without them (`rmcore.noise.recurring`); above 0 where they agree with the label.
        prompts: (P,) which prompt each pair is of: pairs of one are not independent.

    Raises:
        DataError: fewer than `FEWEST_PAIRS` pairs, one prompt only, or a margin that is not finite.
    """
    m = np.asarray(margins, dtype=np.float64)
    require_enough(len(m), len(set(prompts)))
    broken = int((~np.isfinite(m)).sum())
    if broken:
        raise DataError(f"{broken} of {len(m)} margins are not finite: look for a model whose features are not.")
    _, prompt = np.unique(np.asarray(prompts), return_inverse=True)
    num_prompts = int(prompt.max()) + 1
    size = float(np.sqrt(np.mean(m**2))) or 1.0
    table = _table(m, SCALES / size)  # (A, E) log likelihood
    profile, best = table.max(axis=0), table.argmax(axis=0)
    at = int(profile.argmax())
    scale = float(SCALES[best[at]] / size)
    design = _design_effect(m, prompt, num_prompts, scale, float(RATES[at]))
    bound = stdtrit(num_prompts - 1, 0.975) ** 2 * design / 2
    inside = np.flatnonzero(profile >= profile[at] - bound)
    fitting = float(RATES[inside[0]]), float(RATES[inside[-1]])
    rate = Rate(float(RATES[at]), *_bounds(m, prompt, num_prompts, fitting), len(m), num_prompts)
    return LabelModel(scale, rate, fitting, float(SCALES[best[inside[0]]] / size))


def _bounds(m: FloatArray, prompt: IntArray, num_prompts: int, fitting: tuple[float, float]) -> tuple[float, float]:
    """95 % interval of the share of wrong labels, however likely mistakes are at each margin.

    Mistakes among close calls cannot be told from a model that knows less, so labels do not identify the rate; they
    bound it. Upper end: that of the share of labels against their margin, over prompts. With s the chance that the
    margin's side is the better one and e that a label is wrong, a label is against it with (1 - s) + e (2 s - 1), which
    is at least e where e is at most one half. Lower end: eps is read off the clear pairs, and if these are only
    `SMALLEST_PART` of all and no other label is wrong, the rate is as small a part of it.
    """
    against = (1 - np.sign(m)) / 2
    share = float(against.mean())
    residuals = np.bincount(prompt, against - share, num_prompts)
    error = float(np.sqrt((residuals**2).sum() * num_prompts / (num_prompts - 1))) / len(m)
    high = max(share + float(stdtrit(num_prompts - 1, 0.975)) * error, 1 - 0.025 ** (1 / num_prompts), fitting[1])
    return SMALLEST_PART * fitting[0], min(high, 1.0)


def called(posterior: npt.ArrayLike, false_share: float) -> BoolArray:
    """Call the largest set of labels wrong of which, by the posterior, at most `false_share` are right, (P,).

    Labels are taken in the order of their posterior while the mean of (1 - posterior) over those taken is at most
    `false_share`: the posterior expected share of false discoveries.

    Args:
        posterior: (P,) probability that a label is wrong. To be on the safe side it is that under the lower end of the
            rate's interval: then none is called where the rate is not shown to be above 0.
        false_share: between 0 and 1.

    Source:
        Müller, Parmigiani and Rice 2006, FDR and Bayesian multiple comparisons rules.
    """
    wrong = np.asarray(posterior, dtype=np.float64)
    order = np.argsort(-wrong, kind="stable")
    expected = np.cumsum(1 - wrong[order]) / np.arange(1, len(order) + 1)
    taken = int((expected <= false_share).sum())  # `expected` ascends
    found = np.zeros(len(wrong), dtype=bool)
    found[order[:taken]] = True
    return found


def require_enough(num_pairs: int, num_prompts: int) -> None:
    """Refuse pairs too few to tell a rate of.

    Raises:
        DataError: there are fewer than `FEWEST_PAIRS`, or they are of one prompt.
    """
    if num_pairs < FEWEST_PAIRS or num_prompts < 2:
        raise DataError(
            f"{num_pairs} pairs of {num_prompts} prompts: the rate of wrong labels needs at least {FEWEST_PAIRS} pairs "
            "of several prompts. Pass more."
        )


def _table(m: FloatArray, scales: FloatArray) -> FloatArray:
    """Log likelihood of all labels for each scale and rate, (A, E)."""
    found = np.zeros((len(scales), len(RATES)))
    for start in range(0, len(m), _CHUNK):
        for row, scale in enumerate(scales):
            found[row] += _by_rate(m[start : start + _CHUNK], float(scale)).sum(axis=0)
    return found


def _by_rate(m: FloatArray, scale: float) -> FloatArray:
    """Log likelihood of each label for each rate, (P, E)."""
    agrees = expit(scale * m)[:, None]  # (P, 1)
    return np.asarray(np.log(np.maximum(RATES + (1 - 2 * RATES) * agrees, TINY)))


def _design_effect(m: FloatArray, prompt: IntArray, num_prompts: int, scale: float, rate: float) -> float:
    """Variance of the rate over prompts, relative to that over pairs (sandwich estimators); at least 1."""
    agrees = expit(scale * m)
    chance = np.maximum(rate + (1 - 2 * rate) * agrees, TINY)
    scores = np.stack([(1 - 2 * rate) * agrees * (1 - agrees) * scale * m, 1 - 2 * agrees]) / chance  # (2, P)
    together = np.stack([np.bincount(prompt, one, num_prompts) for one in scores])  # (2, C)
    inverse = np.linalg.pinv(scores @ scores.T)
    over_prompts = inverse @ (together @ together.T) @ inverse * num_prompts / (num_prompts - 1)
    return max(1.0, float(over_prompts[1, 1] / inverse[1, 1])) if inverse[1, 1] > 0 else 1.0
