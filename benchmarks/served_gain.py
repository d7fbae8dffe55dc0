"""How soon best-of-n that is served is decided, how often wrongly, and what a fixed number of labels would take.

    python benchmarks/served_gain.py

Simulated judgements of 16 responses and another one: prompts differ in spread and in how well the reward model sees
them, as in `tests/rmcore/policy/test_confirmation.py`. At each quality of the reward model, `--repeats` servings of at
most 400 prompts each end where `ServedGain` has decided. Beside them a test of a fixed size that decides as often: the
fewest pairs after which the usual 95 % interval, looked at once, lies as clearly above the gain that was asked for, or
below zero, in as many of the servings. It has to be chosen before anybody knows the gain.
"""

import argparse

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.policy.confirmation import ServedGain

CLIP, USEFUL, N = 3.0, 0.3, 16


def served(rng: np.random.Generator, num_prompts: int, quality: float) -> FloatArray:
    """Judged differences, (num_prompts,), of the chosen response and another one."""
    spread = rng.uniform(0.5, 2, size=num_prompts)
    gold = rng.normal(size=(num_prompts, N + 1))
    own = np.clip(quality + rng.normal(0, 0.2, size=(num_prompts, 1)), -1, 1)
    proxy = own * gold + np.sqrt(1 - own**2) * rng.normal(size=gold.shape)
    best = gold[np.arange(num_prompts), proxy[:, :N].argmax(axis=1)]
    return np.clip((best - gold[:, N]) * spread / 1.25, -CLIP, CLIP)


def fixed_size(rows: FloatArray, gain: float, share: float) -> int | None:
    """The fewest pairs after which one look decides as often; None: more than there are."""
    sizes = np.arange(1, rows.shape[1] + 1)
    means = rows.cumsum(axis=1) / sizes
    squares = (rows**2).cumsum(axis=1) / sizes
    half = 1.96 * np.sqrt(np.maximum(squares - means**2, 0) / np.maximum(sizes - 1, 1))
    decided = (means - half >= USEFUL) if gain > 0 else (means + half < 0)
    enough = np.flatnonzero((decided.mean(axis=0) >= share) & (sizes >= 10))
    return int(sizes[enough[0]]) if len(enough) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    print("| true gain | rose | fell | unclear | wrong | pairs, mean (median) | pairs of a fixed test as sharp |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for quality in (0.9, 0.6, 0.45, 0.3, 0.17, 0.0, -0.17, -0.3, -0.6):
        gain = float(served(rng, 200_000, quality).mean())
        rows = np.array([served(rng, 400, quality) for _ in range(args.repeats)])
        ended, found, wrong, sharp = [], [], 0, 0
        for row in rows:
            known = ServedGain(CLIP, USEFUL)
            for difference in row:
                if not known.see(float(difference)):
                    break
            low, high = known.interval
            ended.append(len(known.differences))
            found.append(known.decision)
            wrong += not low <= gain <= high
            sharp += low >= USEFUL if gain > 0 else high < 0
        share = {name: found.count(name) / len(found) for name in ("rose", "fell", "unclear")}
        fixed = fixed_size(rows, gain, sharp / len(rows)) if sharp / len(rows) > 0.1 else None
        print(
            f"| {gain:+.2f} | {share['rose']:.0%} | {share['fell']:.0%} | {share['unclear']:.0%} | "
            f"{wrong / len(rows):.1%} | {np.mean(ended):.0f} ({np.median(ended):.0f}) | {fixed or '-'} |"
        )


if __name__ == "__main__":
    main()
