"""The order in which pairs are trained on: easy ones first, hard ones first, or at random.

How easy a pair is, is its margin: annotated, or predicted by a model that was not fitted on the pair. The schedules
say with what chance the next pair comes from the easy, medium and hard ones as training continues. Without repetition
every pair still comes once in an epoch, so schedules differ in order alone.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.ensembles.linear_probes import fit_head

Schedule = Literal["easy_first", "hard_first", "random"]
Bucket = Literal["easy", "medium", "hard"]
BUCKETS: tuple[Bucket, ...] = get_args(Bucket)

EASY_ABOVE, HARD_BELOW = 0.7, 0.2
"""Margins in [0, 1], else ranks among the pairs as shares."""
WEIGHTS = ((0.3, (0.5, 0.4, 0.1)), (0.7, (0.2, 0.6, 0.2)), (float("inf"), (0.1, 0.5, 0.4)))
"""(progress below which they hold, weights of easy, medium and hard), as `easy_first` means them."""
WITHOUT_PROGRESS = (0.2, 0.6, 0.2)
NUM_FOLDS = 5
"""Heads that predict margins; with fewer prompts, one a prompt."""


def weights_at(progress: float | None, schedule: Schedule = "easy_first") -> FloatArray:
    """Weights of easy, medium and hard, (3,), at a progress in [0, 1]; the reverse schedule runs them backwards.

    >>> weights_at(0.1), weights_at(0.1, "hard_first")
    (array([0.5, 0.4, 0.1]), array([0.1, 0.5, 0.4]))
    """
    if progress is None:
        return np.array(WITHOUT_PROGRESS)
    at = 1 - progress if schedule == "hard_first" else progress
    return np.array(next(weights for below, weights in WEIGHTS if at < below))


class CurriculumSampler:
    """Draws pairs by difficulty.

    Args:
        margins: (P,) one a pair, higher is easier. If all lie in [0, 1] the thresholds are 0.7 and 0.2 (easy above,
            hard below); otherwise the same shares of the pairs by rank, equal margins together.
        schedule: easy_first as in `WEIGHTS`, hard_first its reverse, random takes no notice of margins.
        seed: the same seed gives the same order.

    Raises:
        ConfigError: no such schedule.
        DataError: there are no margins, or one is not finite.

    Example:
        >>> sampler = CurriculumSampler([0.9, 0.5, 0.1, 0.8], seed=0)
        >>> sorted(sampler.sample(4, epoch=0, total_epochs=3))
        [0, 1, 2, 3]
    """

    def __init__(self, margins: npt.ArrayLike, *, schedule: Schedule = "easy_first", seed: int = 0) -> None:
        values = np.asarray(margins, dtype=np.float64)
        if schedule not in get_args(Schedule):
            raise ConfigError(f"no schedule {schedule!r}; there are {', '.join(get_args(Schedule))}.")
        broken = int((~np.isfinite(values)).sum())
        if values.ndim != 1 or len(values) == 0 or broken:
            raise DataError(
                f"margins of shape {values.shape} with {broken} values not finite say nothing of how easy pairs are; "
                "pass (P,) numbers, one a pair, or leave pairs without a margin out."
            )
        self.schedule, self.seed = schedule, seed
        from scipy.stats import rankdata  # here: scipy.stats takes a second to import, and few commands need it

        bounded = values.min() >= 0 and values.max() <= 1
        # Mid-ranks in (0, 1): equal margins have one rank, so they are in one bucket.
        level = values if bounded else (rankdata(values) - 0.5) / len(values)
        names: npt.NDArray[np.str_] = np.select([level > EASY_ABOVE, level < HARD_BELOW], ["easy", "hard"], "medium")
        self.buckets: dict[Bucket, list[int]] = {name: np.flatnonzero(names == name).tolist() for name in BUCKETS}
        """Positions by bucket; some may be empty, and the others then share its weight."""
        self._num_pairs = len(values)

    def __len__(self) -> int:
        """P."""
        return self._num_pairs

    def sample(
        self, n: int, epoch: int | None = None, total_epochs: int | None = None, *, replace: bool = False
    ) -> list[int]:
        """Positions of n pairs of one epoch, in the order in which they come.

        The same arguments give the same pairs; n = P is the whole epoch, a smaller n its beginning.

        Args:
            n: how many; without `replace` at most P.
            epoch: from 0; with `total_epochs` it gives the progress, epoch / total_epochs.
            total_epochs: epochs in all; without it the weights are those without progress.
            replace: let pairs come more than once, so that the weights hold to the end.

        Raises:
            ConfigError: n is negative or, without `replace`, above P; or the epoch is not one of the epochs.
        """
        if n < 0 or (n > len(self) and not replace):
            raise ConfigError(
                f"{n} pairs of {len(self)} are asked for in one epoch; ask for fewer, or let pairs repeat with "
                "replace=True."
            )
        progress = None
        if total_epochs is not None:
            if epoch is None or not 0 <= epoch < total_epochs:
                raise ConfigError(f"epoch={epoch} is none of {total_epochs} epochs; they are counted from 0.")
            progress = epoch / total_epochs
        drawing = _Epoch(self, epoch or 0, replace=replace)
        return drawing.take(n, weights_at(progress, self.schedule))

    def steps(self, pairs_per_step: int, num_steps: int) -> Iterator[list[int]]:
        """The pairs of each optimizer step of a training, with the progress moving on at every step.

        No pair is lost or repeated within an epoch, and the last step of an epoch may be smaller, as in
        `rmcore.models.batching.StepOrder`, which is what the schedule `random` gives.
        """
        done = 0
        for epoch in count():
            drawing = _Epoch(self, epoch, replace=False)
            for start in range(0, len(self), pairs_per_step):
                if done == num_steps:
                    return
                room = min(pairs_per_step, len(self) - start)
                yield drawing.take(room, weights_at(done / num_steps, self.schedule))
                done += 1


class _Epoch:
    """Pairs that are left of one epoch."""

    def __init__(self, sampler: CurriculumSampler, epoch: int, *, replace: bool) -> None:
        self.replace = replace
        self.rng = np.random.default_rng((sampler.seed, epoch))
        if sampler.schedule == "random":
            self.left = [self.rng.permutation(len(sampler)).tolist()]
        else:
            self.left = [self.rng.permutation(sampler.buckets[name]).astype(int).tolist() for name in BUCKETS]
        for places in self.left:
            places.reverse()  # taken from the end

    def take(self, n: int, weights: FloatArray) -> list[int]:
        """The next n pairs; an empty bucket's weight goes to the others in proportion."""
        taken = []
        for chance in self.rng.random(n) if len(self.left) > 1 or self.replace else np.zeros(n):
            open_weights = np.where([bool(places) for places in self.left], weights[: len(self.left)], 0)
            shares = np.cumsum(open_weights) / open_weights.sum()
            places = self.left[int(np.searchsorted(shares, chance, side="right"))]
            if self.replace:
                taken.append(places[int(self.rng.integers(len(places)))])
            else:
                taken.append(places.pop())
        return taken


def predicted_margins(differences: npt.ArrayLike, prompt_ids: Sequence[str], *, seed: int) -> FloatArray:
    """Margin of each of P pairs by a head that was fitted on the other pairs, (P,), in logits; below 0 if it is wrong.

    A head would find the pairs that it was fitted on easy. All pairs of a prompt are in one fold, since they are alike.

    Args:
        differences: (P, D) features of the chosen side minus those of the rejected side.
        prompt_ids: (P,)
        seed: of the folds.

    Raises:
        DataError: there is one prompt only; see also `rmcore.ensembles.linear_probes.fit_head`.
    """
    x = np.asarray(differences, dtype=np.float64)
    prompts, prompt = np.unique(np.asarray(prompt_ids), return_inverse=True)
    if len(prompts) < 2:
        raise DataError(
            f"{len(x)} pairs of {len(prompts)} prompt: no head can be fitted without the pair that it is to judge. "
            "Pass pairs of several prompts, or use annotated margins."
        )
    folds = min(NUM_FOLDS, len(prompts))
    fold = (np.random.default_rng(seed).permutation(len(prompts)) % folds)[prompt]
    found = np.zeros(len(x))
    for number in range(folds):
        head = fit_head(x[fold != number])
        found[fold == number] = x[fold == number] @ head
    return found
