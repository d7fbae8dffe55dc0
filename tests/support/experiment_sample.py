"""A realistic record of a finished experiment: five arms, three seeds, one failed cell, every kind of verdict."""

from typing import Any

import numpy as np

COSINE = {"train.lr_scheduler": "cosine", "train.warmup_steps": 50}
SMOOTH = COSINE | {"loss.label_smoothing": 0.05}
STOPPED = SMOOTH | {"train.early_stopping_patience": 5}
ARMS = {
    "A1 plain": {},
    "A2 cosine": COSINE,
    "A3 smoothing": SMOOTH,
    "A4 stopping": STOPPED,
    "A5 full": STOPPED | {"loss.regularization_lambda": 0.001, "train.lr": 4.2e-5},
}
SEEDS = (0, 1, 2)
FAILED = ("A3 smoothing", 2)
ACCURACY, GAP, ECE = "eval/test_pairwise_accuracy", "eval/train_test_gap", "calib/test_ece_debiased"
SECONDS, STEPS = "cost/train_seconds", "train/num_steps"
LEVELS = {
    ACCURACY: (0.631, 0.652, 0.655, 0.661, 0.668),
    GAP: (0.171, 0.142, 0.118, 0.081, 0.078),
    ECE: (0.162, 0.151, 0.083, 0.061, 0.064),
    SECONDS: (52.0, 51.0, 51.5, 31.0, 33.0),
    STEPS: (1000.0, 1000.0, 1000.0, 560.0, 610.0),
}
SPREADS = {ACCURACY: 0.006, GAP: 0.012, ECE: 0.011, SECONDS: 2.0, STEPS: 0.0}


def metric_infos() -> dict[str, Any]:
    rows = {
        ACCURACY: ("held-out pairwise accuracy", "share", True),
        GAP: ("train accuracy minus held-out accuracy", "share", False),
        ECE: ("calibration error, debiased", "", False),
        SECONDS: ("training time", "seconds", False),
        STEPS: ("steps until training stopped", "steps", None),
        "hessian/test_lambda_max": ("largest Hessian eigenvalue", "", None),
    }
    return {name: dict(zip(("label", "unit", "higher_is_better"), row, strict=True)) for name, row in rows.items()}


def cell_values(arm: str, seed: int) -> dict[str, float | None]:
    rng = np.random.default_rng([list(ARMS).index(arm), seed])
    found: dict[str, float | None] = {
        name: float(levels[list(ARMS).index(arm)] + rng.normal(0, SPREADS[name])) for name, levels in LEVELS.items()
    }
    return found | {"hessian/test_lambda_max": None}


def gate(values: dict[str, float | None]) -> list[dict[str, Any]]:
    rows = [
        ("pairwise_accuracy", values[ACCURACY], 0.6, values[ACCURACY] > 0.6, "held-out accuracy, above 0.6"),
        ("ece_debiased", values[ECE], 0.15, values[ECE] < 0.15, f"calibration error: {values[ECE]:.3f}, below 0.15"),
        ("train_test_gap", values[GAP], 0.15, values[GAP] < 0.15, f"train − test: {values[GAP]:.3f}, below 0.15"),
        ("margin_p50", None, 0.0, False, "median held-out margin: not measured; it has to be above 0"),
    ]
    return [dict(zip(("name", "value", "threshold", "passed", "text"), row, strict=True)) for row in rows]


def cell(arm: str, seed: int) -> dict[str, Any]:
    if (arm, seed) == FAILED:
        return {
            "arm": arm,
            "seed": seed,
            "status": "failed",
            "error": "OutOfMemoryError: 512 MiB asked for, 203 MiB free <at step 12> & stopped",
            "key": None,
            "metrics": dict.fromkeys(metric_infos()),
            "device_seconds": None,
            "diagnoses": [],
            "gate": [],
            "paths": {"prepare": "/data/store/prepare/ablation-0011aabbccdd"},
        }
    values = cell_values(arm, seed)
    overfit = {
        "symptom": "eval accuracy falls from 0.652 to 0.629 while train accuracy rises from 0.74 to 0.81",
        "diagnosis": "overfitting",
        "advice": "lower the learning rate, regularise, stop early",
    }
    return {
        "arm": arm,
        "seed": seed,
        "status": "cached" if seed == 0 else "computed",
        "error": None,
        "key": f"{list(ARMS).index(arm)}{seed}" * 32,
        "metrics": values,
        "device_seconds": values[SECONDS] + 7,
        "diagnoses": [overfit] if arm == "A1 plain" else [],
        "gate": gate(values),
        "paths": {
            stage: f"/data/store/{stage}/ablation-{arm[:2].lower()}-s{seed}-0123456789ab"
            for stage in ("prepare", "train", "evaluate")
        },
    }


def metric(values: list[float]) -> dict[str, Any]:
    mean = float(np.mean(values)) if values else None
    if len(values) < 2:
        reason = "one seed only" if values else "no cell reports it"
        return {"value": mean, "ci_low": None, "ci_high": None, "num": len(values), "reason": reason}
    quantile = {2: 12.706, 3: 4.303}[len(values)]
    half = quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return {"value": mean, "ci_low": mean - half, "ci_high": mean + half, "num": len(values), "reason": None}


def arm_result(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    own = [one["metrics"] for one in cells if one["arm"] == name]
    means = {key: metric([one[key] for one in own if one[key] is not None]) for key in metric_infos()}
    accuracy, gap = means[ACCURACY]["value"], means[GAP]["value"]
    return {
        "name": name,
        "is_control": name == "A1 plain",
        "changes": ARMS[name],
        "merged": ["A5 again"] if name == "A5 full" else [],
        "metrics": means,
        "bands": {
            "eval accuracy": "success" if accuracy > 0.63 else "acceptable",
            "train − eval gap": "failure" if gap > 0.15 else "acceptable" if gap > 0.1 else "success",
        },
    }


def hypothesis(name: str, claim: str, metric_name: str, verdict: str, reason: str, **rest: Any) -> dict[str, Any]:
    usual = {
        "comparison": "difference",
        "arm": "A5 full",
        "versus": "A1 plain",
        "direction": "above",
        "threshold": 0.0,
        "value": None,
        "ci_low": None,
        "ci_high": None,
        "num_seeds": 3,
        "num_prompts": 137,
        "p": None,
        "p_holm": None,
        "smallest_detectable": None,
        "method": "random-effects t interval over 3 seeds, prompts resampled within each, paired by pair",
        "condition": None,
    }
    own = {"name": name, "claim": claim, "metric": metric_name, "verdict": verdict, "reason": reason}
    return usual | own | rest


def hypotheses() -> list[dict[str, Any]]:
    return [
        hypothesis(
            "H1", "The full recipe ranks held-out pairs better than the plain loop by at least one point.", ACCURACY,
            "supported", "the whole interval lies above +1.0 points", threshold=0.01, value=0.037, ci_low=0.019,
            ci_high=0.055, p=0.012, p_holm=0.036, smallest_detectable=0.021,
        ),
        hypothesis(
            "H2", "With a cosine schedule the gap between train and held-out accuracy stays below ten points.", GAP,
            "refuted", "the whole interval lies above 10.0 %, on the other side of the threshold", comparison="level",
            arm="A2 cosine", versus=None, direction="below", threshold=0.1, value=0.142, ci_low=0.117, ci_high=0.167,
            p=0.018, p_holm=0.036, smallest_detectable=0.031,
        ),
        hypothesis(
            "H3", "Label smoothing of 0.05 lowers the calibration error by more than 0.05, whatever else is changed "
            "in the recipe: the schedule, the warm-up and the weight decay are those of A2.", ECE, "inconclusive",
            "only two seeds finished, so there is no interval", arm="A3 smoothing", versus="A2 cosine",
            direction="below", threshold=-0.05, value=-0.068, num_seeds=2,
        ),
        hypothesis(
            "H5", "Early stopping cuts the training time to less than 70 % of the plain loop's.", SECONDS,
            "inconclusive", "the interval 0.55× to 0.73× holds the threshold", comparison="ratio", arm="A4 stopping",
            direction="below", threshold=0.7, value=0.641, ci_low=0.551, ci_high=0.731, num_prompts=None, p=0.11,
            p_holm=0.11, smallest_detectable=0.08,
        ),
    ]  # fmt: skip


def curves() -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"eval/pairwise_accuracy": [], "train/loss": []}
    for position, arm in enumerate(ARMS):
        for seed in SEEDS:
            if (arm, seed) == FAILED:
                continue
            rng = np.random.default_rng([position, seed, 7])
            last = 1000 if position < 3 else 500 + 50 * seed
            steps = list(range(50, last + 1, 50))
            top = LEVELS[ACCURACY][position] + 0.01
            done = np.array(steps) / 1000
            values = 0.5 + (top - 0.5) * (1 - np.exp(-6 * done)) - (0.03 * done if position == 0 else 0)
            noisy = values + rng.normal(0, 0.006, len(steps))
            found["eval/pairwise_accuracy"].append({"arm": arm, "seed": seed, "steps": steps, "values": noisy.tolist()})
            steps = list(range(10, last + 1, 10))
            done = np.array(steps) / 1000
            loss = 0.44 + 0.03 * position + 0.26 * np.exp(-3 * done) + rng.normal(0, 0.03, len(steps))
            found["train/loss"].append({"arm": arm, "seed": seed, "steps": steps, "values": loss.tolist()})
    return found


def results() -> dict[str, Any]:
    cells = [cell(arm, seed) for arm in ARMS for seed in SEEDS]
    return {
        "name": "ablation",
        "size": "small",
        "title": "What does each part of the recipe add?",
        "question": "A plain loop is given a schedule, label smoothing, early stopping and a reward penalty, one "
        "after the other. Which of them improves a reward model, and which only costs time?",
        "created": "2026-11-21T01:30:00+00:00",
        "control": "A1 plain",
        "seeds": list(SEEDS),
        "metrics": metric_infos(),
        "registration": {
            "hash": "3f1c9a" + "0123456789" * 5 + "abcdef01",
            "number": 2,
            "frozen_at": "2026-11-20T22:05:00+00:00",
            "changes": ["hypotheses.H5.threshold: 0.8 → 0.7", "seeds: 0, 1 → 0, 1, 2"],
            "path": "/data/registrations/ablation-small-2.json",
        },
        "hypotheses": hypotheses(),
        "sizes": {"H5": {"seeds": 9, "prompts": None}},
        "arms": [arm_result(name, cells) for name in ARMS],
        "cells": cells,
        "curves": curves(),
        "notes": [
            "A5 again is the same recipe as A5 full: both are one arm.",
            "A3 smoothing, seed 2 failed: its arm has two seeds, so H3 has no interval.",
        ],
        "cost": {
            "estimated_seconds": 610.0,
            "measured_seconds": 802.4,
            "device_seconds": 720.0,
            "run_seconds": 655.1,
            "num_computed": 9,
            "num_cached": 5,
            "num_failed": 1,
        },
        "command": "rm-opt experiment ablation --size small",
        "base": {
            "study": "ablation",
            "model": {"name": "minilm", "max_seq_len": 256},
            "loss": {"label_smoothing": 0.0, "regularization_lambda": 0.0},
            "train": {
                "lr": 5e-5,
                "lr_scheduler": "constant",
                "warmup_steps": 0,
                "steps": 1000,
                "early_stopping_patience": None,
            },
        },
        "environment": {"rm-optimizer": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7", "device": "cpu"},
        "mlflow_url": "http://127.0.0.1:5000/#/experiments/3/runs?searchFilter=tags.`rm.kind`%20%3D%20'cell'",
    }
