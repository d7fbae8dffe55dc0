"""How much a judge's label should count next to a person's, where the judge is right with probability c.

    python benchmarks/judge_label_weight.py [--repeats 60]

A linear reward of 50 features learns from 300 labels of people, who prefer by Bradley-Terry, and from 3,000 of a judge
that names the better side with probability c. Each column weights the judge's labels otherwise; a row shows the share
of new pairs that are ordered rightly, and the largest standard error of a difference to the column of 2c - 1.
"""

import argparse
from collections.abc import Callable

import numpy as np

from rmcore.core.arrays import FloatArray

NUM_FEATURES, NUM_PEOPLE, NUM_JUDGED, NUM_TESTED = 50, 300, 3000, 2000
WEIGHTS: dict[str, Callable[[float], float]] = {
    "no labels of the judge": lambda c: 0.0,
    "1": lambda c: 1.0,
    "c": lambda c: c,
    "2c - 1": lambda c: 2 * c - 1,
    "(2c - 1)^2": lambda c: (2 * c - 1) ** 2,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    repeats = parser.parse_args().repeats
    print("c | " + " | ".join(WEIGHTS) + " | standard error")
    for right in (0.9, 0.8, 0.7, 0.6, 0.55):
        rng = np.random.default_rng(0)
        found = np.array([_accuracies(right, rng) for _ in range(repeats)])  # (R, W)
        apart = found - found[:, [list(WEIGHTS).index("2c - 1")]]
        error = apart.std(axis=0).max() / np.sqrt(repeats)
        print(f"{right:g} | " + " | ".join(f"{value:.3f}" for value in found.mean(axis=0)) + f" | {error:.3f}")


def _accuracies(right: float, rng: np.random.Generator) -> list[float]:
    truth = rng.normal(size=NUM_FEATURES)
    truth *= 2 / np.linalg.norm(truth)
    features = rng.normal(size=(NUM_PEOPLE + NUM_JUDGED, NUM_FEATURES))  # of the difference of two sides
    utility = features @ truth
    labels = rng.random(len(utility)) < 1 / (1 + np.exp(-utility))
    is_right = rng.random(NUM_JUDGED) < right
    labels[NUM_PEOPLE:] = (utility[NUM_PEOPLE:] > 0) == is_right
    tested = rng.normal(size=(NUM_TESTED, NUM_FEATURES))
    found = []
    for weight in WEIGHTS.values():
        weights = np.concatenate([np.ones(NUM_PEOPLE), np.full(NUM_JUDGED, weight(right))])
        fitted = _fit(features, labels.astype(np.float64), weights)
        found.append(float(np.mean((tested @ fitted > 0) == (tested @ truth > 0))))
    return found


def _fit(features: FloatArray, labels: FloatArray, weights: FloatArray) -> FloatArray:
    """Weighted logistic regression with a standard normal prior, by Newton's method."""
    found = np.zeros(features.shape[1])
    for _ in range(25):
        chance = 1 / (1 + np.exp(-features @ found))
        slope = features.T @ (weights * (chance - labels)) + found
        curvature = (features * (weights * chance * (1 - chance))[:, None]).T @ features + np.eye(len(found))
        found = found - np.linalg.solve(curvature, slope)
    return found


if __name__ == "__main__":
    main()
