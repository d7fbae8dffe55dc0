"""Show that intervals over seeds and prompts cover, and that verdicts over looks err as rarely as they promise.

    python benchmarks/verdict_coverage.py [--trials 2000] [--jobs 2]

Simulated experiments with known truth. An answer's score is normal: a part of the prompt, one of seed and arm, and one
of all three; prompts are shared by all seeds and arms. Standard deviations are in units of what seed and prompt
together put on the mean over all prompts: with "seed 1" half of the variance over seeds is the seeds' own.

First table: coverage of 95 % intervals of the difference between an arm and the control, and their width in units of
that of the interval without moderation. Second: how often looks at 5, 8, 12 and 20 seeds with four claims, all true
at their threshold, decide any of them (family-wise, over all looks).
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from rmcore.evaluation.verdicts.estimate import SeedSample, estimate_over_seeds, variance_prior
from rmcore.evaluation.verdicts.judgement import Looks

NUM_PROMPTS, NUM_REPLICATES = 100, 200
LOOKS, ALPHA = Looks((5, 8, 12, 20)), 0.05
SEED_SPREADS = {
    "seeds differ by nothing of their own": np.zeros,
    "seed 0.4": lambda arms: np.full(arms, 0.4),
    "seed 1": lambda arms: np.full(arms, 1.0),
    "seed 4": lambda arms: np.full(arms, 4.0),
    "seed 0.4, one arm 3": lambda arms: np.array([0.4] * (arms - 1) + [3.0]),
    "seed 0.1, the control 2": lambda arms: np.array([2.0] + [0.1] * (arms - 1)),
}


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


def cover(trials: int, spread: str, num_arms: int, num_seeds: int, prompt: float = 1.0) -> tuple[list[float], float]:
    """Coverage of each difference, and the median width beside the interval of the same seeds without moderation."""
    rng = np.random.default_rng([num_arms, num_seeds, len(spread)])
    hits, widths = np.zeros(num_arms - 1), []
    for _ in range(trials):
        arms = samples_of(experiment(rng, SEED_SPREADS[spread](num_arms), num_seeds, prompt), weights_of(rng))
        prior = variance_prior(arms, num_prompts=NUM_PROMPTS)
        for place, arm in enumerate(arms[1:]):
            seen = difference(arm, arms[0])
            with_prior, alone = (
                estimate_over_seeds(seen, num_prompts=NUM_PROMPTS, prompts_shared=True, prior=one)
                for one in (prior, None)
            )
            hits[place] += with_prior.ci_low <= 0 <= with_prior.ci_high
            widths.append((with_prior.ci_high - with_prior.ci_low) / (alone.ci_high - alone.ci_low))
    return list(hits / trials), float(np.median(widths))


def false_alarms(trials: int, spread: str, prompt: float) -> tuple[float, float]:
    """Shares of experiments with a wrong verdict: over all looks as registered, and if each look were the only one."""
    rng = np.random.default_rng([7, len(spread), int(10 * prompt)])
    wrong, naive = 0, 0
    for _ in range(trials):
        arms = samples_of(experiment(rng, SEED_SPREADS[spread](5), 20, prompt), weights_of(rng))
        taken = {
            name: [
                estimate_over_seeds(difference(arm, arms[0])[:number], num_prompts=NUM_PROMPTS, prompts_shared=True)
                for number in LOOKS.num_seeds
            ]
            for name, arm in zip("BCDE", arms[1:], strict=True)
        }
        # Holm decides any claim at all exactly where one is decided at its strictest step, a quarter of alpha.
        decided = alone = False
        for estimates in taken.values():
            for look, newest in enumerate(estimates, 1):
                p = newest.p_value(0.0)
                decided |= p <= LOOKS.level(ALPHA / len(taken), estimates[:look])
                alone |= p <= ALPHA / len(taken)
        wrong, naive = wrong + decided, naive + alone
    return wrong / trials, naive / trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    sizes = [(num_arms, num_seeds) for num_arms in (3, 5) for num_seeds in (2, 3, 5, 8)]
    cells = [(spread, *size) for spread in SEED_SPREADS for size in sizes]
    print("| seeds' own spread | arms | seeds | coverage, all differences | the least covered | width |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with ProcessPoolExecutor(given.jobs) as pool:
        found = pool.map(partial(cover, given.trials), *zip(*cells, strict=True))
        for (spread, num_arms, num_seeds), (covered, width) in zip(cells, found, strict=True):
            shown = f"{100 * np.mean(covered):.1f} % | {100 * min(covered):.1f} %"
            print(f"| {spread} | {num_arms} | {num_seeds} | {shown} | {width:.2f} |", flush=True)
        worlds = [(spread, prompt) for spread in list(SEED_SPREADS)[:4] for prompt in (0.2, 1.0)]
        print("\n| seeds' own spread | prompts' | wrong verdicts, four looks | each look judged as if alone |")
        print("| --- | ---: | ---: | ---: |")
        alarms = pool.map(partial(false_alarms, given.trials // 4), *zip(*worlds, strict=True))
        for (spread, prompt), (wrong, naive) in zip(worlds, alarms, strict=True):
            print(f"| {spread} | {prompt:g} | {100 * wrong:.1f} % | {100 * naive:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
