"""How soon best-of-n that is served is decided, how often wrongly, and what a fixed number of labels would take.

    python benchmarks/served_gain.py

Simulated judgements of the best of 16 responses and another one: prompts differ in spread and in how well the reward
model sees them. At each quality of the reward model, `--repeats` servings of at most 400 prompts, judged in turns of 8,
each with a unit of its own from 24 other pairs, end where `ServedGain` has decided. Labels: two a pair, and 48.

Wrong: the interval at the end does not hold the gain that it is of, the mean of clipped differences in the unit that
was measured; and: it does not hold the gain in true standard deviations, so the unit's error is in it. Fixed: labels of
a test of a fixed size that is as sharp (the usual 95 % interval, looked at once, lies above the gain that was asked
for, or below zero) in 80, 90 and 95 % of the servings; it has to be chosen before anybody knows the gain.
"""

import argparse

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.policy.confirmation import ServedGain
from rmcore.policy.stopping.pair_judges import CALIBRATED, CLIP, ScoreJudge

USEFUL, N, MOST, TURN = 0.3, 16, 400, ScoreJudge.at_once or 1
POWERS = (0.8, 0.9, 0.95)
SPREADS = (0.5, 2.0)
UNIT = float(np.sqrt((SPREADS[0] ** 2 + SPREADS[0] * SPREADS[1] + SPREADS[1] ** 2) / 3))
"""Root mean square of spreads between the two."""


def served(rng: np.random.Generator, num_prompts: int, quality: float) -> FloatArray:
    """Judged scores of the chosen response less those of another one, (num_prompts,), before any unit."""
    spread = rng.uniform(*SPREADS, size=num_prompts)
    gold = rng.normal(size=(num_prompts, N + 1))
    own = np.clip(quality + rng.normal(0, 0.2, size=(num_prompts, 1)), -1, 1)
    proxy = own * gold + np.sqrt(1 - own**2) * rng.normal(size=gold.shape)
    best = gold[np.arange(num_prompts), proxy[:, :N].argmax(axis=1)]
    return (best - gold[:, N]) * spread


def units(rng: np.random.Generator, repeats: int) -> FloatArray:
    """The unit of each serving, (repeats, 1), as it is measured."""
    apart = rng.normal(size=(repeats, CALIBRATED)) * np.sqrt(2) * rng.uniform(*SPREADS, size=(repeats, CALIBRATED))
    return np.sqrt((apart**2 / 2).mean(axis=1, keepdims=True))


def fixed_labels(rows: FloatArray, gain: float) -> list[str]:
    """Labels after which one look is as sharp with each power; a dash where 400 prompts are too few."""
    sizes = np.arange(1, rows.shape[1] + 1)
    means = rows.cumsum(axis=1) / sizes
    squares = (rows**2).cumsum(axis=1) / sizes
    half = 1.96 * np.sqrt(np.maximum(squares - means**2, 0) / np.maximum(sizes - 1, 1))
    sharp = ((means - half >= USEFUL) if gain > 0 else (means + half < 0)).mean(axis=0)
    found = [np.flatnonzero((sharp >= power) & (sizes >= 10)) for power in POWERS]
    return [str(2 * int(sizes[one[0]]) + 2 * CALIBRATED) if len(one) else "–" for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    print(
        "| true gain, sd | rose | fell | unclear | wrong | in true sd | labels, mean (median) | fixed: 80, 90, 95 % |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for quality in (0.9, 0.6, 0.45, 0.3, 0.17, 0.0, -0.17, -0.3, -0.6):
        many = served(rng, 200_000, quality)
        gain = float(many.mean()) / UNIT
        judged = np.array([served(rng, MOST, quality) for _ in range(args.repeats)])
        scales = units(rng, args.repeats)
        rows = np.clip(judged / scales, -CLIP, CLIP)
        labels, found, wrong, wrong_in_sd = [], [], 0, 0
        for row, scale in zip(rows, scales, strict=True):
            known = ServedGain(CLIP, USEFUL)
            for turn in row.reshape(-1, TURN):
                for difference in turn:
                    known.see(float(difference))
                if known.is_decided:
                    break
            low, high = known.interval
            labels.append(2 * len(known.differences) + 2 * CALIBRATED)
            found.append(known.decision)
            wrong += not low <= np.clip(many / scale, -CLIP, CLIP).mean() <= high
            wrong_in_sd += not low <= gain <= high
        share = " | ".join(f"{found.count(name) / len(found):.0%}" for name in ("rose", "fell", "unclear"))
        fixed = ", ".join(fixed_labels(rows, gain)) if abs(gain) > 0.01 else "–"
        print(
            f"| {gain:+.2f} | {share} | {wrong / len(rows):.1%} | {wrong_in_sd / len(rows):.1%} | "
            f"{np.mean(labels):.0f} ({np.median(labels):.0f}) | "
            f"{fixed} |"
        )


if __name__ == "__main__":
    main()
