"""How well utilities from few judgements order answers: pairs by expected information, at random, and all; and lists.

    python benchmarks/judge_comparisons.py [--prompts 40] [--answers 16]

The judge is simulated: Davidson's model with an effect of the order of 0.3 logits and exp(-0.5) for ties; of lists of
eight Plackett-Luce with the same effect a place. A row a standard deviation of the true utilities; mean Spearman
correlation with them over the prompts. The last columns are shares of pairs that are ordered rightly: of those that a
verdict in both orders decides, by utilities of the chosen comparisons, and of the lists.
"""

import argparse

import numpy as np
from scipy.stats import spearmanr

from rmcore.core.arrays import FloatArray
from rmcore.judging.comparisons import COMPARISONS_EACH, Comparisons, lists_to_order, utilities_of_orders
from rmcore.judging.rubrics import MOST_IN_ORDER

ORDER_EFFECT, LOG_TIE = 0.3, -0.5
Pairs = list[tuple[int, int, int]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--answers", type=int, default=16)
    chosen = parser.parse_args()
    num_prompts, size = chosen.prompts, chosen.answers
    pairs_each = size * (size - 1) // 2
    print("sd of utilities | all pairs | chosen | at random | lists | right: verdicts | chosen | lists")
    for spread in (1, 2, 3, 4, 6):
        rng = np.random.default_rng(1)
        truth = [rng.normal(0, spread, size) for _ in range(num_prompts)]
        told, every, drawn = (Comparisons([size] * num_prompts) for _ in range(3))
        while pairs := told.next_pairs(rng):
            _judge(told, pairs, truth, rng)
        by_prompt = [
            [(at, *map(int, rng.permutation([a, b]))) for a in range(size) for b in range(a)]
            for at in range(num_prompts)
        ]
        _judge(every, [pair for own in by_prompt for pair in own], truth, rng)
        few = min(COMPARISONS_EACH * size, pairs_each)
        some = [own[place] for own in by_prompt for place in rng.permutation(pairs_each)[:few]]
        _judge(drawn, some, truth, rng)
        fitted = [one.fit()[0] for one in (every, told, drawn)] + [_by_lists(truth, rng)]
        right = [_right_verdicts(spread, rng), _right(fitted[1], truth), _right(fitted[3], truth)]
        print(f"{spread} | " + " | ".join(f"{one:.2f}" for one in [*(_correlation(o, truth) for o in fitted), *right]))


def _judge(comparisons: Comparisons, pairs: Pairs, truth: list[FloatArray], rng: np.random.Generator) -> None:
    for prompt, first, second in pairs:
        difference = truth[prompt][first] - truth[prompt][second] + ORDER_EFFECT
        weights = np.exp(np.array([difference / 2, LOG_TIE, -difference / 2]) - abs(difference) / 2)
        comparisons.add(prompt, first, second, float(rng.choice([1.0, 0.5, 0.0], p=weights / weights.sum())))


def _right_verdicts(spread: float, rng: np.random.Generator, number: int = 200_000) -> float:
    apart = rng.normal(0, spread, (number, 2)) @ [1, -1]  # first less second
    won = np.zeros(number)
    for sign in (1, -1):  # in both orders
        logits = np.stack([sign * apart + ORDER_EFFECT, np.full(number, 2 * LOG_TIE), -sign * apart - ORDER_EFFECT]) / 2
        won += sign * (1 - (logits + rng.gumbel(size=logits.shape)).argmax(axis=0))
    return float(((won > 0) == (apart > 0))[won != 0].mean())


def _right(fitted: list[FloatArray], truth: list[FloatArray]) -> float:
    better = [own[:, None] > own[None, :] for own in truth]
    return float(np.concatenate([(u[:, None] > u[None, :])[b] for u, b in zip(fitted, better, strict=True)]).mean())


def _by_lists(truth: list[FloatArray], rng: np.random.Generator) -> list[FloatArray]:
    """Utilities by the orders of lists, which a judge gives who draws by Plackett-Luce (Gumbel noise, sorted)."""
    orders = []
    for prompt, utilities in enumerate(truth):
        for shown in lists_to_order(len(utilities), MOST_IN_ORDER, rng):
            seen = utilities[shown] - ORDER_EFFECT * np.arange(len(shown)) + rng.gumbel(size=len(shown))
            orders.append((prompt, [shown[place] for place in np.argsort(-seen)]))
    return utilities_of_orders([len(one) for one in truth], orders)


def _correlation(fitted: list[FloatArray], truth: list[FloatArray]) -> float:
    return float(np.mean([spearmanr(one, own).statistic for one, own in zip(fitted, truth, strict=True)]))


if __name__ == "__main__":
    main()
