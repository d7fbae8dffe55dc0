"""Margins that take the other labels of a prompt into account, the label itself left out.

Where answers recur, an answer that won elsewhere is the likelier winner here. Answer j of a prompt has a strength s_j,
of which the cross-fitted margins say something and the labels the rest:

    s_j ~ N(a' r_j, tau^2),   P(i over j) = eps + (1 - 2 eps) sigma(s_i - s_j)

with r_j the rewards behind the margins, up to a constant that cancels. a', tau and eps are those under which all labels
are likeliest; tau is how much the model of other prompts does not know. Expectation propagation over all labels but one
gives N(mu, v) of its s_i - s_j. The margin is then what a pair that shares no answer would need to be as sure,

    mu / (a sqrt(1 + pi v / 8)),   a = a' / sqrt(1 + pi tau^2 / 4)

so a pair none of whose answers recurs keeps its own. `rmcore.noise.rate` reads the result as it reads any margin: its
likelihood of a label given what was learned without it is then a conditional one, and its interval, over prompts, has
the dependence among labels of a prompt in it. It treats tau as known. The work for a label is cubic in how many answers
labels connect to its own. Copies of a row count as labels of their own.

Source:
    Expectation propagation with labels that may be turned: Kim and Ghahramani 2006, Bayesian Gaussian process
    classification with the EM-EP algorithm, IEEE PAMI 28(12). The mean of a logistic under a Gaussian: MacKay 1992, The
    evidence framework applied to classification networks, Neural Computation 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.special import expit

from rmcore.core.arrays import BoolArray, FloatArray, IntArray
from rmcore.core.errors import ModelError
from rmcore.noise.contradictions import Couple, answers_of

SPREADS = (0.01, 20.0)
"""Range of tau that is searched, in logits: from a model that knows all to one for which no call is close."""
SWEEPS, DAMPING = 200, 0.7
TOLERANCE, UNSETTLED = 1e-3, 0.3
"""Changes of a margin, in logits, at which sweeps end, and that are too many after the last of them. In between, labels
contradict one another back and forth, by about what the approximation is off."""
_NUMBERS = 2_000_000
"""Numbers in the matrices that are held at a time."""
Sites = tuple[FloatArray, FloatArray]
"""Precision and precision times mean of what each label of a block adds, (L,) each."""


@dataclass(frozen=True, slots=True)
class Strengths:
    """How labels come about where answers recur.

    Attributes:
        scale: a, of a pair that shares no answer: logits a unit of margin.
        spread: tau, in logits.
        rate: eps. That of `rmcore.noise.rate` has an interval.
    """

    scale: float
    spread: float
    rate: float


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """G groups of n answers that their L labels connect; answers are numbered through the block, (G n).

    Attributes:
        places: (L,) which pairs the labels are.
        group: (L,) which group each is of.
        better, worse: (L,) answers, from 0 to n - 1.
        rewards: (G, n) behind the margins, with a mean of 0.
    """

    places: IntArray
    group: IntArray
    better: IntArray
    worse: IntArray
    rewards: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Posterior:
    """Strengths of G groups of answers given their labels, and the evidence of all labels.

    The sites are where the propagation of nearly the same labels, or under a nearby model, begins.
    """

    strengths: FloatArray  # (G, n)
    covariance: FloatArray  # (G, n, n)
    evidence: float
    sites: Sites


def with_other_labels(margins: FloatArray, texts: Sequence[Couple]) -> tuple[FloatArray, Strengths | None]:
    """Margins of P pairs, (P,), given the other labels of their answers too; and the model, None where none recur.

    Args:
        margins: (P,) cross-fitted; those of a prompt are of one model.
        texts: (P,) normalized, as `rmcore.noise.contradictions.couples` gives them.

    Raises:
        ModelError: the approximation does not settle.
    """
    blocks = _blocks(margins, texts)
    if not blocks:
        return margins, None
    alone = np.ones(len(margins), dtype=bool)
    for block in blocks:
        alone[block.places] = False
    model = _fit(blocks, margins, alone)
    found = np.array(margins, dtype=np.float64)
    for block in blocks:
        found[block.places] = _left_out(block, model) / model.scale
    return found, model


def _blocks(margins: FloatArray, texts: Sequence[Couple]) -> list[_Block]:
    """All labels that share an answer with another one, by how many answers are connected."""
    better, worse, size = answers_of(texts)
    differ = better != worse  # a label between equal texts says nothing
    graph = coo_array((differ.astype(float), (better, worse)), shape=(size, size)).tocsr()
    _, component = connected_components(graph, directed=False)
    of_label = component[better]
    labels = np.bincount(of_label[differ], minlength=size)
    answers = np.bincount(component, minlength=size)
    first = np.full(size, size)
    np.minimum.at(first, component, np.arange(size))
    order = np.lexsort((np.arange(size), component))
    number = np.empty(size, dtype=np.int64)  # within its component
    number[order] = np.arange(size) - np.repeat(np.cumsum(answers) - answers, answers)
    used = differ & (labels[of_label] > 1)
    found = []
    for n in np.unique(answers[of_label[used]]):
        places = np.flatnonzero(used & (answers[of_label] == n))
        names, group = np.unique(of_label[places], return_inverse=True)
        block = _Block(places, group, number[better[places]], number[worse[places]], np.zeros((len(names), n)))
        # Margins of a group are differences of its rewards; texts that are equal but for case may differ a little.
        laplacian = _laplacian(block, np.ones(len(places))) + 1 / n
        rewards = np.linalg.solve(laplacian, _by_answer(block, margins[places])[..., None])[..., 0]
        found.append(_Block(places, group, block.better, block.worse, rewards))
    return found


def _laplacian(block: _Block, weights: FloatArray) -> FloatArray:
    """Sum of w x x' over labels, x having 1 at the better and -1 at the worse answer, (G, n, n)."""
    groups, n = block.rewards.shape
    total = np.zeros(groups * n * n)
    for one, other, sign in ((0, 0, 1), (1, 1, 1), (0, 1, -1), (1, 0, -1)):
        sides = (block.better, block.worse)
        where = (block.group * n + sides[one]) * n + sides[other]
        total += sign * np.bincount(where, weights, groups * n * n)
    return total.reshape(groups, n, n)


def _by_answer(block: _Block, values: FloatArray) -> FloatArray:
    """Sum of v x over labels, (G, n)."""
    groups, n = block.rewards.shape
    total = np.zeros(groups * n)
    total += np.bincount(block.group * n + block.better, values, groups * n)
    total -= np.bincount(block.group * n + block.worse, values, groups * n)
    return total.reshape(groups, n)


def _shrunk(variance: FloatArray | float) -> FloatArray:
    """By how much the logit of the mean of a logistic is nearer to 0 than the mean, under a Gaussian's variance."""
    return np.asarray(1 / np.sqrt(1 + np.pi * np.asarray(variance) / 8))


def _left_out(block: _Block, model: Strengths) -> FloatArray:
    """Logit that each label is what it is, given all others of its group and neither itself nor any mistake, (L,).

    Each group is there once for each of its labels, without it. The cavities of one propagation would be cheaper, but
    the other sites have seen the label: it would speak for itself, and rates come out too high.
    """
    sites = _propagate(block, model).sites
    n = block.rewards.shape[1]
    order = np.argsort(block.group, kind="stable")
    labels = np.bincount(block.group)
    first = np.cumsum(labels) - labels
    found = np.zeros(len(block.places))
    most = max(1, _NUMBERS // n**2)
    for start in range(0, len(found), most):
        left = np.arange(start, min(start + most, len(found)))
        group = block.group[left]
        copy = np.repeat(np.arange(len(left)), labels[group])
        within = np.arange(len(copy)) - np.repeat(np.cumsum(labels[group]) - labels[group], labels[group])
        label = order[first[group][copy] + within]
        stays = label != left[copy]
        copy, label = copy[stays], label[stays]
        others = _Block(block.places[label], copy, block.better[label], block.worse[label], block.rewards[group])
        given = _propagate(others, model, (sites[0][label], sites[1][label]))
        at, one, two = np.arange(len(left)), block.better[left], block.worse[left]
        mean = given.strengths[at, one] - given.strengths[at, two]
        variance = given.covariance[at, one, one] + given.covariance[at, two, two] - 2 * given.covariance[at, one, two]
        found[left] = mean * _shrunk(variance)
    return found


def _propagate(block: _Block, model: Strengths, start: Sites | None = None) -> _Posterior:
    """Expectation propagation over the labels of all groups of a block at once.

    Raises:
        ModelError: it does not settle.
    """
    variance = model.spread**2
    prior = model.scale / float(_shrunk(2 * variance)) * block.rewards / variance  # (G, n) precision times mean
    n = block.rewards.shape[1]
    eye = np.eye(n) / variance
    precision, shift = start or (np.zeros(len(block.places)), np.zeros(len(block.places)))
    logits: FloatArray = np.full(len(block.places), np.inf)
    for sweep in range(SWEEPS):
        covariance: FloatArray = np.asarray(np.linalg.inv(eye + _laplacian(block, precision)), dtype=np.float64)
        linear = prior + _by_answer(block, shift)
        strengths = np.einsum("gij,gj->gi", covariance, linear)
        one, two = (block.group, block.better), (block.group, block.worse)
        mean = strengths[one] - strengths[two]
        own = covariance[(*one, block.better)] + covariance[(*two, block.worse)]
        own -= 2 * covariance[(*one, block.worse)]
        cavity_variance = 1 / (1 / own - precision)
        cavity_mean = cavity_variance * (mean / own - shift)
        chance, slope, curve = _tilted(cavity_mean, cavity_variance, model.rate)
        # A label that goes against all others would push the rest apart (below 0); it is left to say nothing instead.
        new = np.maximum(-curve / (1 + cavity_variance * curve), 0.0)
        tilted_mean = cavity_mean + cavity_variance * slope
        new_shift = tilted_mean * (new + 1 / cavity_variance) - cavity_mean / cavity_variance
        step = DAMPING / (1 + sweep / 50)  # shorter in the end, where labels contradict one another back and forth
        before, logits = logits, cavity_mean * _shrunk(cavity_variance)
        change = np.abs(logits - before).max() / step
        if change < TOLERANCE:
            break
        precision = precision + step * (new - precision)
        shift = shift + step * (new_shift - shift)
    if change > UNSETTLED:
        raise ModelError(
            f"the strengths of {len(block.rewards)} groups of {n} answers still change by {change:.2g} logits after "
            f"{SWEEPS} sweeps: look for a few pairs with very large margins, or for very many labels of one prompt."
        )
    together = 1 / cavity_variance + precision
    sites = np.log(chance) + 0.5 * np.log(together * cavity_variance)
    sites -= 0.5 * ((cavity_mean / cavity_variance + shift) ** 2 / together - cavity_mean**2 / cavity_variance)
    _, determinant = np.linalg.slogdet(covariance / variance)
    evidence = sites.sum() + 0.5 * (np.sum(linear * strengths) - variance * np.sum(prior**2) + determinant.sum())
    return _Posterior(strengths, covariance, float(evidence), (precision, shift))


def _tilted(mean: FloatArray, variance: FloatArray, rate: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Chance of each label under N(mean, variance) of its difference, and two derivatives of its logarithm, (L,)."""
    shrunk = _shrunk(variance)
    agrees, against = expit(shrunk * mean), expit(-shrunk * mean)
    chance = rate + (1 - 2 * rate) * agrees
    slope = (1 - 2 * rate) * shrunk * agrees * against / chance
    return chance, slope, slope * shrunk * (against - agrees) - slope**2


def _fit(blocks: Sequence[_Block], margins: FloatArray, alone: BoolArray) -> Strengths:
    """The model under which all labels are likeliest."""
    size = float(np.sqrt(np.mean(margins**2))) or 1.0
    sites: list[Sites | None] = [None] * len(blocks)

    def loss(free: FloatArray) -> float:
        model = _model(free, size)
        separate = np.log(model.rate + (1 - 2 * model.rate) * expit(model.scale * margins[alone]))
        evidence = float(separate.sum())
        for place, block in enumerate(blocks):
            try:
                posterior = _propagate(block, model, sites[place])
            except ModelError:
                return np.inf  # the search passes such a model over
            evidence, sites[place] = evidence + posterior.evidence, posterior.sites
        return -evidence

    bounds = [(np.log(0.02), np.log(50)), (np.log(SPREADS[0]), np.log(SPREADS[1])), (-5.5, 5.5)]
    starts = np.array([[0.0, 0.0, -1.4], [0.7, 0.0, -1.4], [0.0, 1.0, -1.4], [0.0, 0.0, -2.8]])
    found = minimize(
        loss,
        starts[0],
        method="Nelder-Mead",
        bounds=bounds,
        options={"initial_simplex": starts, "xatol": 0.01, "fatol": 0.01, "maxfev": 300},
    )
    return _model(found.x, size)


def _model(free: FloatArray, size: float) -> Strengths:
    return Strengths(float(np.exp(free[0])) / size, float(np.exp(free[1])), float(expit(free[2])) / 2)
