"""How many calls of a judge a cheap reward model saves when the best of many answers is chosen.

    python benchmarks/judge_cascade.py

A judge that is asked about all answers of a prompt takes the best of them. Here it is asked about a share of them
alone, and takes the best of those. Which: drawn at random; the best by a reward model of words, a ridge regression on
the judge's scores of other prompts; the best by its mean and its ensemble's deviation; or over all prompts together
those that are least surely worse than the best by the model, in deviations of the ensemble (`spread`). A cell is the
gain over an answer at random as a share of the gain with all calls, and its 95 % interval over prompts.

The worlds: AlpacaEval's answers with its judge ($RM_OPT_DATA; 56 a prompt), and 64 answers of the gold world's writer,
judged by the gold reward, exactly or with an error as large as the deviation within prompts (gain of the true reward).
"""

import argparse
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import sparse

from rmcore.config.data import GoldConfig
from rmcore.core.arrays import FloatArray
from rmcore.data.gold.world import generate_pairs, gold_reward, written_responses

SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
ORDERS = ("random", "model", "model + sd", "spread")
NUM_WORDS, NUM_MEMBERS, RIDGE, NUM_RESAMPLES = 2048, 8, 30.0, 1000
WORDS = re.compile(r"\w+|[^\w\s]")


def main() -> None:
    """Print a table a world."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=300, help="prompts that the reward model learns from")
    train = parser.parse_args().train
    folder = Path(os.environ.get("RM_OPT_DATA", "../shared/data"))
    for name, tables in (("AlpacaEval", _alpacaeval(folder)), ("gold world", _gold_world(train))):
        learned, tested = tables
        learned = learned[learned["prompt"].isin(learned["prompt"].unique()[:train])]
        members = _members(learned, tested)
        pools = [rows.to_numpy() for _, rows in tested.groupby("prompt", sort=False)["place"]]
        truth = tested["judge"].to_numpy()
        within = np.sqrt(np.mean([truth[pool].var() for pool in pools]))
        noise = np.random.default_rng(1).normal(0, within, len(truth))
        judges = {"": truth} if name == "AlpacaEval" else {", exact judge": truth, ", noisy judge": truth + noise}
        for judge, seen in judges.items():
            right = np.mean([_accuracy(members.mean(axis=0)[pool], seen[pool]) for pool in pools])
            print(f"\n{name}{judge}: {len(pools)} prompts, accuracy of the model by the judge {right:.3f}\n")
            _table(pools, seen, truth, members)


def _table(pools: Sequence[np.ndarray], seen: FloatArray, truth: FloatArray, members: FloatArray) -> None:
    print("| share of calls | " + " | ".join(ORDERS) + " |\n" + "| ---: " * (len(ORDERS) + 1) + "|")
    middle = np.array([truth[pool].mean() for pool in pools])
    every = np.array([truth[pool[seen[pool].argmax()]] for pool in pools]) - middle
    for share in SHARES:
        cells = []
        for order in ORDERS:
            rng = np.random.default_rng(0)
            repeats = 20 if order == "random" else 1
            gains = np.mean([_gains(order, share, pools, seen, truth, members, rng) for _ in range(repeats)], axis=0)
            cells.append(_ratio(gains - middle, every))
        print(f"| {share:.0%} | " + " | ".join(cells) + " |")


def _gains(
    order: str,
    share: float,
    pools: Sequence[np.ndarray],
    seen: FloatArray,
    truth: FloatArray,
    members: FloatArray,
    rng: np.random.Generator,
) -> FloatArray:
    """True reward of the answer that is taken, by prompt."""
    mean, deviation = members.mean(axis=0), members.std(axis=0)
    if order == "spread":
        slack = np.empty(len(mean))
        for pool in pools:
            best = pool[mean[pool].argmax()]
            slack[pool] = (mean[best] - mean[pool]) / np.hypot(deviation[pool], deviation[best])
        cut = np.sort(slack)[round(share * len(slack)) - 1]
        asked = [pool[slack[pool] <= max(cut, 0.0)] for pool in pools]
    else:
        values = {"random": rng.random(len(mean)), "model": mean, "model + sd": mean + deviation}[order]
        asked = [pool[np.argsort(-values[pool])[: max(1, round(share * len(pool)))]] for pool in pools]
    return np.array([truth[own[seen[own].argmax()]] for own in asked])


def _ratio(gains: FloatArray, every: FloatArray) -> str:
    draws = np.random.default_rng(0).integers(len(every), size=(NUM_RESAMPLES, len(every)))
    ratios = gains[draws].sum(axis=1) / every[draws].sum(axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return f"{gains.sum() / every.sum():.2f} ({low:.2f} to {high:.2f})"


def _accuracy(reward: FloatArray, judged: FloatArray) -> float:
    better = judged[:, None] > judged[None, :]
    return float(((1 + np.sign(reward[:, None] - reward[None, :])) / 2)[better].mean()) if better.any() else 0.5


def _members(learned: pd.DataFrame, tested: pd.DataFrame) -> FloatArray:
    """Rewards of the tested answers by ridge regressions on resampled prompts, (M, N)."""
    features = _features(learned)
    codes, prompts = pd.factorize(learned["prompt"])
    centred = learned["judge"].to_numpy() - learned.groupby("prompt")["judge"].transform("mean").to_numpy()
    rng, found, new = np.random.default_rng(0), [], _features(tested)
    for _ in range(NUM_MEMBERS):
        weights = np.bincount(rng.integers(len(prompts), size=len(prompts)), minlength=len(prompts))[codes]
        weighted = sparse.diags(weights.astype(np.float64)) @ features
        curvature = (features.T @ weighted).toarray() + RIDGE * np.eye(features.shape[1])
        found.append(new @ np.linalg.solve(curvature, weighted.T @ centred))
    return np.array(found)


def _features(table: pd.DataFrame) -> sparse.csr_matrix:
    """Hashed words, the logarithm of their number, and the share of the prompt's words that return, (N, D)."""
    rows, columns, values = [], [], []
    for row, (prompt, response) in enumerate(zip(table["prompt"], table["response"], strict=True)):
        words = WORDS.findall(response.lower())
        own, asked = set(words), set(WORDS.findall(prompt.lower()))
        places = sorted({zlib.crc32(word.encode()) % NUM_WORDS for word in own})
        extra = (np.log1p(len(words)), len(own & asked) / max(len(asked), 1))
        columns += [*places, NUM_WORDS, NUM_WORDS + 1]
        values += [1 / np.sqrt(len(places) + 1)] * len(places) + list(extra)
        rows += [row] * (len(places) + 2)
    return sparse.csr_matrix((values, (rows, columns)), shape=(len(table), NUM_WORDS + 2))


def _alpacaeval(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    train, test = (pd.read_parquet(folder / f"alpacaeval_answers_{name}.parquet") for name in ("train", "test"))
    return train, test.assign(place=np.arange(len(test)))


def _gold_world(train: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    pairs = generate_pairs(GoldConfig(num_prompts=train + 150, pairs_per_prompt=1), seed=0).pairs
    prompts = list(dict.fromkeys(str(pair.prompt) for pair in pairs))
    rows = [
        {"prompt": prompt, "response": response, "judge": gold_reward(prompt, response)}
        for prompt in prompts
        for response in written_responses(prompt, 64, GoldConfig().shortcut, seed=0)
    ]
    table = pd.DataFrame(rows)
    is_train = table["prompt"].isin(prompts[:train])
    test = table[~is_train]
    return table[is_train], test.assign(place=np.arange(len(test)))


if __name__ == "__main__":
    main()
