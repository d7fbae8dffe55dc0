"""Show that the gain which a plan is said to show is shown, by the interval that verdicts use.

    python benchmarks/verdict_power.py [--trials 400] [--out FOLDER]      # FOLDER: scores of one_policy.py

For each number of prompts and judged samples, a reward model gains exactly what `rmcore.readiness.power` claims
to be shown in 80 % of the evaluations. Shown: in how many the lower end of `bounded_means` is above 0; and in how many
it is with two thirds of the prompts, which is below 80 % where the claim asks for less than 1.5 times the prompts it
takes. In simulated worlds prompts differ in their spread (log-normal) and in how well the reward model sees them, and
samples are normal or have Student's tail; the worst judged sample is what evaluations of that size have on average.
With scores of `one_policy.py` the samples and judgements are those of a real policy, prompts are drawn with
replacement, and rewards are a model's mixed with the judge's scores until they gain what is claimed.
"""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.evaluation.uncertainty import bounded_means
from rmcore.policy.sampling.best_of_n import best_of_n_weights
from rmcore.readiness.power import detectable_gain, usual_worst
from rmcore.readiness.rank import gains

NUM_PROMPTS, CHOICES = (50, 100, 200, 350), ((4, 4), (4, 8), (8, 8), (11, 11))
"""Prompts; n of best-of-n with the judged samples of a prompt."""
MOST_NEEDED, NUM_RESAMPLES, POPULATION = 1.5, 400, 20_000
BASES = ("length_pairs=0", "noise_pairs=0", "style", "words", "minilm", "minilm_labels=longer")
Draw = Callable[[np.random.Generator, int], tuple[FloatArray, FloatArray]]
"""Of a number of prompts: rewards and the true reward (N, K)."""


@dataclass(frozen=True)
class World:
    """spread: of the log of the prompts' own deviations. quality: of their correlation of reward and true reward.
    tail: degrees of freedom of the samples; None: normal.
    """

    spread: float
    quality: float = 0.1
    tail: float | None = None

    def draw(self, size: int, correlation: float) -> Draw:
        """How prompts are drawn, where the reward sees the true reward with this correlation."""

        def drawn(rng: np.random.Generator, num: int) -> tuple[FloatArray, FloatArray]:
            shape = (num, size)
            gold = rng.normal(size=shape) if self.tail is None else rng.standard_t(self.tail, size=shape)
            own = np.clip(correlation + self.quality * rng.normal(size=(num, 1)), -1, 1)
            seen = gold if self.tail is None else np.sign(gold) * np.log1p(np.abs(gold))
            reward = own * seen + np.sqrt(1 - own**2) * rng.normal(size=shape)
            return reward, gold * np.exp(self.spread * rng.normal(size=(num, 1)))

        return drawn


WORLDS = {
    "normal": World(0.0, 0.05),
    "normal, quality differs by 0.2": World(0.0, 0.2),
    "prompts' spread 0.3": World(0.3),
    "prompts' spread 0.6": World(0.6),
    "prompts' spread 1.0": World(1.0),
    "Student's t of 4": World(0.0, tail=4),
    "Student's t of 3, prompts' spread 0.4": World(0.4, tail=3),
}


def measured(reward: FloatArray, gold: FloatArray, n: int) -> tuple[FloatArray, float, float]:
    """Gains (N,) in standard deviations within prompts, and how far the worst and the best sample are out."""
    apart = gold - gold.mean(axis=1, keepdims=True)
    apart /= math.sqrt((apart**2).sum() / (apart.shape[0] * (apart.shape[1] - 1)))
    order = np.argsort(reward, axis=1)
    weights = best_of_n_weights(np.arange(gold.shape[1], dtype=float), n)
    return np.take_along_axis(apart, order, axis=1) @ weights, float(apart.min()), float(apart.max())


def power(draw: Draw, num_prompts: int, n: int, trials: int) -> float:
    """Share of evaluations whose interval shows a gain."""
    rng, shown = np.random.default_rng([num_prompts, n]), 0
    for trial in range(trials):
        found, *bounds = measured(*draw(rng, num_prompts), n)
        low, _ = bounded_means(
            found[:, None], *(np.array([one]) for one in bounds), num_resamples=NUM_RESAMPLES, seed=trial
        )
        shown += low[0] > 0
    return shown / trials


def bisected(gain: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """Where a rising function is what is wanted."""
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) < wanted else (low, middle)
    return (low + high) / 2


def show(
    name: str, claim: float, worst: float, draw: Draw, num_prompts: int, choice: tuple[int, int], trials: int
) -> None:
    """Print one row."""
    shown, fewer = (power(draw, math.ceil(num), choice[0], trials) for num in (num_prompts, num_prompts / MOST_NEEDED))
    cells = [name, f"{num_prompts}", f"best of {choice[0]} of {choice[1]}", f"{worst:.1f}", f"{claim:.2f}"]
    print("| " + " | ".join([*cells, f"{shown:.1%}", f"{fewer:.1%}"]) + " |", flush=True)


def simulated(trials: int) -> None:
    """Worlds with their own worst sample."""
    for name, world in WORLDS.items():
        for num in NUM_PROMPTS:
            for n, size in CHOICES:
                rng = np.random.default_rng(0)
                pilots = [measured(*world.draw(size, 0.2)(rng, num), n)[1] for _ in range(60)]
                worst = -float(np.mean(pilots))
                claim = detectable_gain(num, n, size, worst)

                def gain(correlation: float, world: World = world, n: int = n, size: int = size) -> float:
                    return float(
                        measured(*world.draw(size, correlation)(np.random.default_rng(0), POPULATION), n)[0].mean()
                    )

                correlation = bisected(gain, 0.0, 1.0, claim)
                show(name, claim, worst, world.draw(size, correlation), num, (n, size), trials)


def real(folder: Path, trials: int) -> None:
    """Samples of one policy, with the worst sample that is assumed before any is judged."""
    from one_policy import RECIPES, Scores, read_data
    from verdict_one_policy import SAMPLES, Judged

    data = read_data(Path(os.environ.get("RM_OPT_DATA", "../shared/data")))
    judged, stored = Judged(data), Scores(data, folder)
    gold, prompts = judged.judge, np.arange(judged.num)
    for recipe in RECIPES:
        scores = stored.of(recipe)
        if recipe.name not in BASES or scores is None:
            continue
        own = judged.rewards(scores)
        own = (own - own.mean(axis=1, keepdims=True)) / (own.std(axis=1, keepdims=True) + 1e-9)
        for num in NUM_PROMPTS:
            for n in (4, 8, 11):
                worst = usual_worst(num, n)
                claim = detectable_gain(num, n, n)

                def gain(share: float, own: FloatArray = own, n: int = n) -> float:
                    return float(np.mean(gains(list(own + share * judged.scaled), list(judged.scaled), n)[0]))

                mixed = own + bisected(gain, -3.0, 5.0, claim) * judged.scaled

                def draw(
                    rng: np.random.Generator, num: int, mixed: FloatArray = mixed, n: int = n
                ) -> tuple[FloatArray, FloatArray]:
                    rows = rng.choice(prompts, num)[:, None]
                    columns = rng.permuted(np.tile(np.arange(SAMPLES), (num, 1)), axis=1)[:, :n]
                    return mixed[rows, columns], gold[rows, columns]

                show(f"one policy, {recipe.name} and the judge", claim, worst, draw, num, (n, n), trials)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print("| world | prompts | choice | worst sample, sd | gain claimed | shown | with two thirds of the prompts |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    if given.out is None:
        simulated(given.trials)
    else:
        real(given.out, given.trials)


if __name__ == "__main__":
    main()
