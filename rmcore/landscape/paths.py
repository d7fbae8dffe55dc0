"""The loss along the straight ways from the average of several models' weights to each of them.

If weights may be averaged, the loss on these ways stays near that of the models; if they lie in different basins, there
is a barrier between. How high a place lies is told against the same mixture of the models' own losses: at the weights
sum_j c_j theta_j with loss L,

    height = L - sum_j c_j L_j

which for two models is the barrier of linear mode connectivity (Frankle et al. 2020, arXiv:1912.05671, section 2). The
ends are the models, not the average: against a way's own end, a bad average would hide the barrier that it lies on.
For two models the two ways together are the line between them; for more they are lines from the middle to the corners.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rmcore.core.arrays import FloatArray
from rmcore.core.progress import Report, prefixed, silent
from rmcore.evaluation.ranking import PairMean, correctness, mean_statistic
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap, metric_value
from rmcore.landscape.directions import checkpoint_direction, split_direction
from rmcore.landscape.displaced import margins_at
from rmcore.landscape.operators import LossGaussNewton
from rmcore.landscape.sample import CurvatureSample
from rmcore.landscape.vectors import norm

DISTANCES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Places on each way: 0 is the average, 1 the member."""
UNIT = "share of the way: 0 the average, 1 the member"
NOT_FINITE = "a reward is not finite at these weights"


@dataclass(frozen=True, slots=True)
class MemberPath:
    """Measurements on the way to one member, with intervals over prompts; (G,) each, G places.

    Attributes:
        name: of the member.
        length: Euclidean distance of its weights from the average.
        loss: nats a pair, at the model's own temperature.
        accuracy: share of pairs with margin > 0, ties half.
        height: nats a pair above the mixture of the members' losses, paired; 0 at the member itself.
    """

    name: str
    length: float
    loss: tuple[MetricValue, ...]
    accuracy: tuple[MetricValue, ...]
    height: tuple[MetricValue, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        measured = {"loss": self.loss, "accuracy": self.accuracy, "height": self.height}
        listed = {name: [value.to_dict() for value in values] for name, values in measured.items()}
        return {"name": self.name, "length": self.length, **listed}


def paths_from_average(
    average: Any,
    members: Iterable[tuple[str, Any]],
    sample: CurvatureSample,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
    report: Report = silent,
) -> list[MemberPath]:
    """Measure the ways from the mean of M models' weights to each; 1 + 4 M passes over the pairs, without gradients.

    Args:
        average: whose weights are the mean, with equal shares, of those of `members`. They come back bit by bit.
        members: name and model of each, asked for one after the other, so that an iterator holds one at a time.
        sample: the pairs; its prompts are what intervals are drawn over.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.
        report: told of the places of each way.

    Raises:
        ModelError: a member is no model of the same architecture; see `checkpoint_direction`.
    """
    operator = LossGaussNewton(average, sample.batches)
    center = _losses(margins_at(operator, [[]])[0], operator.temperature)
    names, lengths, found = [], [], []
    for name, member in members:
        direction = checkpoint_direction(operator, member)
        pieces = split_direction(operator, direction)
        steps = [[(distance, pieces)] for distance in DISTANCES[1:]]
        measured = margins_at(operator, steps, prefixed(report, name))
        names.append(name)
        lengths.append(norm(direction))
        found.append([center, *(_losses(margins, operator.temperature) for margins in measured)])
    mixture = np.mean([places[-1].loss for places in found], axis=0)
    _, prompt = np.unique(sample.batch_prompts, return_inverse=True)
    means: dict[tuple[int, int, str], PairMean] = {}
    for number, places in enumerate(found):
        for place, (distance, one) in enumerate(zip(DISTANCES, places, strict=True)):
            chord = (1 - distance) * mixture + distance * places[-1].loss
            for mean in one.means(chord):
                means[number, place, mean.name] = mean
    values = _intervals(means, prompt, num_resamples, seed)
    return [
        MemberPath(name, length, *(
            tuple(values[number, place, what] for place in range(len(DISTANCES)))
            for what in ("loss", "accuracy", "height")
        ))
        for number, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Margins (n,) of all pairs at one place, and their losses (n,) in nats."""

    margins: FloatArray
    loss: FloatArray

    def means(self, chord: FloatArray) -> list[PairMean]:
        """The three means of this place; `chord` (n,) is the mixture of the members' losses at it."""
        known = np.full(len(self.loss), bool(np.isfinite(self.loss).all() and np.isfinite(chord).all()))
        with np.errstate(invalid="ignore"):
            height = self.loss - chord
        return [
            PairMean("loss", self.loss, known, False, NOT_FINITE),
            PairMean("accuracy", correctness(self.margins), known, True, NOT_FINITE),
            PairMean("height", height, known, False, NOT_FINITE),
        ]


def _losses(margins: Tensor, temperature: float) -> _Pairs:
    values = margins.numpy()
    with np.errstate(invalid="ignore"):  # rewards that are not finite are told by `means`
        return _Pairs(values, np.logaddexp(0, -values / temperature))


def _intervals(
    means: dict[tuple[int, int, str], PairMean], prompt: Any, num_resamples: int, seed: int
) -> dict[tuple[int, int, str], MetricValue]:
    """All means over one set of resamples; what is undefined says why."""
    num_prompts = int(prompt.max()) + 1
    keys = {str(key): key for key, mean in means.items() if mean.mask.any()}

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        return {name: mean_statistic(means[key], prompt, weights) for name, key in keys.items()}

    drawn = cluster_bootstrap(compute, num_prompts, num_resamples=num_resamples, seed=seed)
    values = {key: MetricValue(None, None, None, 0, mean.undefined) for key, mean in means.items()}
    for name, key in keys.items():
        mask = means[key].mask
        values[key] = metric_value(
            drawn.point[name],
            drawn.replicates.get(name),
            num_prompts=len(np.unique(prompt[mask])),
            num_pairs=int(mask.sum()),
            is_share=means[key].is_share,
        )
    return values


def paths_record(paths: Sequence[MemberPath], sample: CurvatureSample) -> dict[str, Any]:
    """Ways, measured on `sample`, as a JSON-ready record, which the figure takes."""
    counts = {"num_pairs": len(sample.pairs), "num_prompts": len(set(sample.prompts))}
    return {"unit": UNIT, **counts, "distances": list(DISTANCES), "members": [path.to_dict() for path in paths]}
