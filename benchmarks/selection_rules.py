"""Which trial of a search should win? Rules against luck, simulated at equal compute.

    python benchmarks/selection_rules.py

Trials have true scores normal(mean, spread) in points above the defaults, whose own is 0. A trial is seen with the
noise of the validation prompts and that of its one training seed. The rules:

- best: the highest score as seen, the defaults among them.
- shrunk: the same, but a trial's score is shrunk towards the mean of all trials by the part of their spread that
  prompts alone explain (empirical Bayes), and that of the defaults is not.
- again N: N trials fewer are drawn; the best N - 1 and the defaults are trained once more under another seed, and the
  highest mean of both wins.
"""

import argparse

import numpy as np

from rmcore.core.arrays import FloatArray

SEARCHES = 20_000
WORLDS = [(mean, spread) for mean, spread in ((-3.0, 3.0), (-1.0, 2.0), (0.0, 3.0))]
NOISES = [(5.0, 2.0), (1.3, 2.0), (1.3, 1.0), (1.3, 0.5)]
"""Standard deviations over prompts (some 100 and some 1,000 validation pairs) and over training seeds, points."""
AGAIN = (3, 4)


def simulate(
    trials: int, world: tuple[float, float], noise: tuple[float, float], rng: np.random.Generator
) -> dict[str, float]:
    """Mean true score of the winner by rule, points above the defaults."""
    true = rng.normal(*world, (SEARCHES, trials))
    true[:, 0] = 0.0  # the defaults
    prompts = rng.normal(0, noise[0], true.shape)
    seen = true + prompts + rng.normal(0, noise[1], true.shape)
    found = {"best": _mean(true, seen)}
    mean, variance = seen[:, 1:].mean(axis=1, keepdims=True), seen[:, 1:].var(axis=1, ddof=1, keepdims=True)
    kept = np.maximum(variance - noise[0] ** 2, 0) / variance
    found["shrunk"] = _mean(true, np.concatenate([seen[:, :1], mean + kept * (seen[:, 1:] - mean)], axis=1))
    for number in AGAIN:
        drawn = seen[:, : trials - number]
        best = np.argsort(-drawn[:, 1:], axis=1)[:, : number - 1] + 1
        finalists = np.concatenate([np.zeros((SEARCHES, 1), dtype=int), best], axis=1)
        own, at = (np.take_along_axis(values, finalists, axis=1) for values in (true, prompts))
        second = own + at + rng.normal(0, noise[1], own.shape)
        found[f"again {number}"] = _mean(own, (np.take_along_axis(seen, finalists, axis=1) + second) / 2)
    return found | {"knowing all": float(true.max(axis=1).mean())}


def _mean(true: FloatArray, seen: FloatArray) -> float:
    return float(np.take_along_axis(true, seen.argmax(axis=1)[:, None], axis=1).mean())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(0)
    heads: list[str] = []
    for trials in (12, 30):
        for world in WORLDS:
            for noise in NOISES:
                found = simulate(trials, world, noise, rng)
                if not heads:
                    heads = ["trials", "mean, spread", "prompts, seed", *found]
                    print(f"| {' | '.join(heads)} |\n|{' ---: |' * len(heads)}")
                cells = [str(trials), f"{world[0]:g}, {world[1]:g}", f"{noise[0]:g}, {noise[1]:g}"]
                print(f"| {' | '.join([*cells, *(f'{value:+.2f}' for value in found.values())])} |")


if __name__ == "__main__":
    main()
