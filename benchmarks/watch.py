"""Is the watch over a policy's training right? Simulated trainings of known true gain.

    python benchmarks/watch.py --trials 400

Twenty looks, 600 labels (two a judged pair, each pair on a prompt of its own), KL measured with noise. Prompts differ
in what they gain, and responses within prompts differ by a log-normal factor. *Ended as turned* is a false alarm where
the true reward never falls, and at most 5 % of those may be; so is *ended as stopped* where it rises to the end. *Lost*
is the true gain of the best checkpoint up to the end less that of the one that is kept.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.calibration import wilson
from rmcore.policy.stopping.watch import Watch

LOOKS, PAIRS, LIMIT, FURTHEST = 20, 300, 3.0, 6.0
Gain = Callable[[FloatArray], FloatArray]


def gao(peak_at: float, peak: float) -> Gain:
    """Gao, Schulman and Hilton 2023, arXiv:2210.10760, eq. 1: d (a - b d), where d is the root of the nats."""
    return lambda kl: peak * (2 * np.sqrt(kl / peak_at) - kl / peak_at)


def crash(at: float, peak: float, slope: float) -> Gain:
    """Up by the root, and from a point on straight down: no smooth curve."""
    return lambda kl: np.where(kl <= at, peak * np.sqrt(kl / at), peak - slope * (kl - at))


@dataclass(frozen=True)
class Training:
    """A training whose truth is known.

    gain: of the nats from the start, in standard deviations within prompts.
    rare: share of the prompts that gain `far` in place of what the others gain, which changes nothing in the mean.
    """

    name: str
    gain: Gain
    rare: float = 0.0
    far: float = 0.0


TRAININGS = (
    Training("flat", lambda kl: 0 * kl),
    Training("flat: 3 % of the prompts gain 9.7 sd, the others lose 0.3", lambda kl: 0 * kl, 0.03, 9.7),
    Training("gains to the end", lambda kl: 0.25 * np.sqrt(kl)),
    Training("a plateau from 1 nat on", lambda kl: 0.4 * np.sqrt(np.minimum(kl, 1.0))),
    Training("turns at 1 nat", gao(1.0, 0.4)),
    Training("turns at 2 nats", gao(2.0, 0.5)),
    Training("crashes from 1.5 nats on, 0.25 sd a nat", crash(1.5, 0.4, 0.25)),
    Training("crashes from 1.5 nats on, 1 sd a nat", crash(1.5, 0.4, 1.0)),
    Training("falls from the start", lambda kl: -0.3 * np.sqrt(kl)),
)


def differences(training: Training, rise: float, pairs: int, rng: np.random.Generator) -> FloatArray:
    """What a judge says of `pairs` prompts (pairs,), newest checkpoint less earlier one: about `rise` in the mean."""
    uneven = rng.lognormal(0.0, 0.5, pairs) / np.exp(0.25)  # mean square 1
    own = np.sqrt(2) * (0.7 * rng.standard_normal(pairs) + np.sqrt(0.51) * uneven * rng.standard_normal(pairs))
    judged: FloatArray = rise * (1 + 0.5 * rng.standard_normal(pairs)) + own
    if training.rare:
        is_rare = rng.random(pairs) < training.rare
        judged += np.where(is_rare, training.far, -training.far * training.rare / (1 - training.rare))
    return judged


@dataclass(frozen=True)
class Outcome:
    """How one training ended: the look (None: with its steps) and why, labels, and what is lost by what is kept."""

    ended_at: int | None
    turned: bool
    labels: int
    lost: float


def watched(training: Training, seed: int) -> Outcome:
    """One training under the watch."""
    rng = np.random.default_rng(seed)
    kls = FURTHEST * np.linspace(0, 1, LOOKS + 1) ** 1.2 * np.exp(0.05 * rng.standard_normal(LOOKS + 1))
    truth = np.asarray(training.gain(kls), dtype=float)
    watch = Watch(PAIRS, num_looks=LOOKS, limit=LIMIT)
    for number in range(1, LOOKS + 1):
        reference, pairs = watch.begin(number, float(kls[number]))
        for judged in differences(training, float(truth[number] - truth[reference]), pairs, rng):
            if not watch.see(float(judged)):
                break
        look = watch.end()
        lost = float(truth[: number + 1].max() - truth[look.best])
        if look.action == "stop":
            return Outcome(number, "turned" in look.reason, 2 * watch.pairs_judged, lost)
    return Outcome(None, False, 2 * watch.pairs_judged, lost)


def share(hits: int, trials: int) -> str:
    """A share with its 95 % interval (Wilson)."""
    low, high = wilson(hits / trials, trials)
    return f"{hits / trials:.0%} ({low:.1%} to {high:.1%})"


def main() -> None:
    """Print one row a training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    trials = parser.parse_args().trials
    print("| true gain, sd | ended as turned | ended as stopped | median look | labels | lost, sd |")
    print("| --- | --- | --- | ---: | ---: | --- |")
    for number, training in enumerate(TRAININGS):
        found = [watched(training, 10_000 * number + trial) for trial in range(trials)]
        turned = sum(one.turned for one in found)
        stopped = sum(one.ended_at is not None for one in found) - turned
        lost = np.array([one.lost for one in found])
        half = 1.96 * float(lost.std(ddof=1)) / trials**0.5
        print(
            f"| {training.name} | {share(turned, trials)} | {share(stopped, trials)} | "
            f"{np.median([one.ended_at or LOOKS for one in found]):.0f} | "
            f"{np.mean([one.labels for one in found]):.0f} | "
            f"{lost.mean():.3f} ({lost.mean() - half:.3f} to {lost.mean() + half:.3f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
