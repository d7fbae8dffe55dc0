"""Data for every figure of a run."""

import numpy as np
import pandas as pd

ECE = {"value": 0.042, "ci_low": 0.021, "ci_high": 0.067}


def history(num=80, evaluated=True):
    rng = np.random.default_rng(0)
    rows = []
    for index in range(1, num + 1):
        done = index / num
        values = {"train/loss": 0.69 - 0.2 * done + rng.normal(0, 0.03), "train/pairwise_accuracy": 0.5 + 0.2 * done}
        values |= {"train/mean_margin": done, "train/lr": 5e-5 * (1 - done), "train/grad_norm": 1 + rng.random()}
        rows.append({"step": 10 * index, "metrics": values})
        if evaluated and index % 10 == 0:
            values = {"eval/loss": 0.68 - 0.1 * done, "eval/pairwise_accuracy": 0.5 + 0.15 * done}
            values |= {"eval/mean_margin": 0.8 * done, "eval/pairwise_accuracy_ci_low": 0.45 + 0.15 * done}
            values |= {"eval/pairwise_accuracy_ci_high": 0.55 + 0.15 * done}
            rows.append({"step": 10 * index, "metrics": values})
    return rows


def rewards(num=400, scale=1.0):
    rng = np.random.default_rng(num)
    chosen, rejected = rng.integers(20, 1800, num), rng.integers(20, 1500, num)
    return pd.DataFrame(
        {
            "pair_id": [f"pair{index}" for index in range(num)],
            "prompt_id": [f"prompt{index // 4}" for index in range(num)],
            "reward_chosen": scale * (rng.normal(0.8, 1, num) + chosen / 900),
            "reward_rejected": scale * (rng.normal(0, 1, num) + rejected / 900),
            "chosen_chars": chosen,
            "rejected_chars": rejected,
        }
    )


def bins(num=10):
    edges = np.linspace(0.5, 1, num + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    accuracy = 0.45 + 0.85 * (middle - 0.5)
    return pd.DataFrame(
        {
            "bin_low": edges[:-1],
            "bin_high": edges[1:],
            "mean_confidence": middle,
            "accuracy": accuracy,
            "count": np.arange(num) + 3,
            "accuracy_low": accuracy - 0.05,
            "accuracy_high": accuracy + 0.05,
        }
    )


def item(name, value, half=None, kind="subset"):
    low, high = (None, None) if half is None else (value - half, value + half)
    return {"name": name, "value": value, "ci_low": low, "ci_high": high, "kind": kind}


CONTEXT = [
    item("this model", 0.712, 0.02, "model"),
    item("guessing", 0.5, None, "reference"),
    item("the longer one wins", 0.634, 0.03, "reference"),
    item("label ceiling", 0.831, None, "reference"),
    item("arithmetic", 0.55, 0.05),
    item("tail", 0.58, 0.05, "ood"),
]
