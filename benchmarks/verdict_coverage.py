"""Show that intervals over seeds and prompts cover, and that verdicts err as rarely as they promise.

    python benchmarks/verdict_coverage.py [--trials 2000] [--jobs 2] [--only seeds|shapes]

Simulated experiments with known truth. An answer's score is normal: a part of the prompt, one of seed and arm, and one
of all three; prompts are shared by all seeds and arms. Standard deviations are in units of what seed and prompt
together put on the mean over all prompts: with "seed 1" half of the variance over seeds is the seeds' own.

First table: coverage of 95 % intervals of the difference between an arm and the control. Second: how often any of four
claims, all true at their threshold, is decided (family-wise, Holm). Third: coverage of the interval of an accuracy over
pairs, where prompts have the numbers of pairs that labelled sets have, and its width next to the percentile interval of
the clustered bootstrap; prompts differ in how often they are right (beta, 4 and 1.5).
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from rmcore.evaluation.uncertainty import metric_value
from rmcore.evaluation.verdicts.estimate import SeedSample, estimate_over_seeds

NUM_PROMPTS, NUM_REPLICATES = 100, 200
ALPHA = 0.05
SEED_SPREADS = {
    "seeds differ by nothing of their own": np.zeros,
    "seed 0.4": lambda arms: np.full(arms, 0.4),
    "seed 1": lambda arms: np.full(arms, 1.0),
    "seed 4": lambda arms: np.full(arms, 4.0),
    "seed 0.4, one arm 3": lambda arms: np.array([0.4] * (arms - 1) + [3.0]),
    "seed 0.1, the control 2": lambda arms: np.array([2.0] + [0.1] * (arms - 1)),
}

SHAPES = {
    "one pair each": lambda rng: np.ones(100),
    "three each": lambda rng: np.full(100, 3),
    "three of a fifth, one of the others": lambda rng: np.repeat([3, 1], [60, 240]),
    "three of 200 prompts, one of 800": lambda rng: np.repeat([3, 1], [200, 800]),
    "140 of 100": lambda rng: 1 + rng.multinomial(40, np.full(100, 0.01)),
    "one to three": lambda rng: rng.integers(1, 4, 100),
    "one to eight": lambda rng: rng.integers(1, 9, 80),
    "mostly one, up to eight": lambda rng: np.minimum(rng.geometric(0.5, 100), 8),
    "eight each": lambda rng: np.full(60, 8),
    "thirty of a fifth, ten of the others": lambda rng: np.repeat([30, 10], [20, 80]),
}
"""Pairs of each prompt."""


def shape_rates(shape: str, trials: int) -> tuple[int, float]:
    """How many intervals hold the accuracy, and their mean width over that of a clustered bootstrap's."""
    rng, held, wider = np.random.default_rng(0), 0, []
    for _ in range(trials):
        sizes = np.asarray(SHAPES[shape](rng), dtype=np.int64)
        right = rng.binomial(sizes, rng.beta(4, 1.5, len(sizes)))
        weights = rng.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=300)
        drawn, told = (weights @ right) / (weights @ sizes), {"num_prompts": len(sizes), "num_pairs": int(sizes.sum())}
        found = metric_value(right.sum() / sizes.sum(), drawn, is_share=True, sizes=sizes.astype(np.float64), **told)
        if found.ci_low is None or found.ci_high is None:
            raise RuntimeError(f"{shape}: no interval, {found.reason}")
        held += found.ci_low <= 4 / 5.5 <= found.ci_high
        low, high = np.percentile(drawn, [2.5, 97.5])
        wider.append((found.ci_high - found.ci_low) / (high - low))
    return held, float(np.mean(wider))


def experiment(rng: np.random.Generator, spreads: np.ndarray, num_seeds: int, prompt: float) -> np.ndarray:
    """(A, S, C) scores; every arm's mean is 0."""
    num_arms, unit = len(spreads), np.sqrt(NUM_PROMPTS)
    scores = unit * prompt * rng.normal(size=(num_arms, 1, NUM_PROMPTS))
    scores = scores + unit * rng.normal(size=(num_arms, num_seeds, NUM_PROMPTS))
    return scores + (spreads[:, None] * rng.normal(size=(num_arms, num_seeds)))[:, :, None]


def samples_of(scores: np.ndarray, weights: np.ndarray) -> list[list[SeedSample]]:
    return [[SeedSample(float(row.mean()), row @ weights.T) for row in arm] for arm in scores]


def difference(arm: list[SeedSample], control: list[SeedSample]) -> list[SeedSample]:
    pairs = zip(arm, control, strict=True)
    return [SeedSample(one.value - other.value, one.replicates - other.replicates) for one, other in pairs]


def weights_of(rng: np.random.Generator) -> np.ndarray:
    return rng.multinomial(NUM_PROMPTS, np.full(NUM_PROMPTS, 1 / NUM_PROMPTS), size=NUM_REPLICATES) / NUM_PROMPTS


def cover(trials: int, spread: str, num_arms: int, num_seeds: int, prompt: float = 1.0) -> list[float]:
    """Coverage of each difference."""
    rng = np.random.default_rng([num_arms, num_seeds, len(spread)])
    hits = np.zeros(num_arms - 1)
    for _ in range(trials):
        arms = samples_of(experiment(rng, SEED_SPREADS[spread](num_arms), num_seeds, prompt), weights_of(rng))
        for place, arm in enumerate(arms[1:]):
            seen = estimate_over_seeds(difference(arm, arms[0]), num_prompts=NUM_PROMPTS, prompts_shared=True)
            hits[place] += seen.ci_low <= 0 <= seen.ci_high
    return list(hits / trials)


def false_alarms(trials: int, spread: str, num_seeds: int, prompt: float) -> float:
    """Share of experiments of four claims with a wrong verdict."""
    rng = np.random.default_rng([7, num_seeds, len(spread), int(10 * prompt)])
    wrong = 0
    for _ in range(trials):
        control, *arms = samples_of(experiment(rng, SEED_SPREADS[spread](5), num_seeds, prompt), weights_of(rng))
        seen = [
            estimate_over_seeds(difference(arm, control), num_prompts=NUM_PROMPTS, prompts_shared=True) for arm in arms
        ]
        # Holm decides any claim at all exactly where one is decided at its strictest step, a quarter of alpha.
        wrong += any(one.p_value(0.0) <= ALPHA / len(arms) for one in seen)
    return wrong / trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("seeds", "shapes"))
    given = parser.parse_args()
    if given.only != "shapes":
        show_seeds(given.trials, given.jobs)
    if given.only != "seeds":
        print("\n| pairs of a prompt | coverage | width, of the clustered bootstrap's |\n| --- | ---: | ---: |")
        for shape in SHAPES:
            held, wider = shape_rates(shape, given.trials)
            print(f"| {shape} | {100 * held / given.trials:.1f} % | {wider:.2f} |", flush=True)


def show_seeds(trials: int, jobs: int) -> None:
    """Print the first two tables."""
    sizes = [(num_arms, num_seeds) for num_arms in (3, 5) for num_seeds in (2, 3, 5, 8)]
    cells = [(spread, *size) for spread in SEED_SPREADS for size in sizes]
    print("| seeds' own spread | arms | seeds | coverage, all differences | the least covered |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with ProcessPoolExecutor(jobs) as pool:
        found = pool.map(partial(cover, trials), *zip(*cells, strict=True))
        for (spread, num_arms, num_seeds), covered in zip(cells, found, strict=True):
            shown = f"{100 * np.mean(covered):.1f} % | {100 * min(covered):.1f} %"
            print(f"| {spread} | {num_arms} | {num_seeds} | {shown} |", flush=True)
        worlds = [
            (spread, seeds, prompt) for spread in list(SEED_SPREADS)[:4] for seeds in (3, 8) for prompt in (0.2, 1.0)
        ]
        print("\n| seeds' own spread | seeds | prompts' | wrong verdicts |")
        print("| --- | ---: | ---: | ---: |")
        alarms = pool.map(partial(false_alarms, trials), *zip(*worlds, strict=True))
        for (spread, seeds, prompt), wrong in zip(worlds, alarms, strict=True):
            print(f"| {spread} | {seeds} | {prompt:g} | {100 * wrong:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
