"""A realistic record of one run, as a finished pipeline hands it to the report."""

from dataclasses import asdict
from typing import Any

import judgement_sample
import logged_sample
import policy_sample
import rlhf_sample
from capability_samples import RECORDS
from rmcore.evaluation.diagnosis import GateCheck


def metric(
    value: float | None, half: float | None = None, num: int = 1200, reason: str | None = None
) -> dict[str, Any]:
    known = value is not None and half is not None
    return {
        "value": value,
        "ci_low": value - half if known else None,
        "ci_high": value + half if known else None,
        "num": num,
        "reason": reason,
    }


def metrics(shift: float = 0.0) -> dict[str, Any]:
    return {
        "pairwise_accuracy": metric(0.712 + shift, 0.022),
        "tie_rate": metric(0.01, 0.004),
        "loss": metric(0.561, 0.021),
        "mean_margin": metric(0.934, 0.08),
        "margin_p50": metric(0.918, 0.08),
        "negative_margin_rate": metric(0.288 - shift, 0.022),
        "ece_debiased": metric(0.042, 0.021),
        "ece_tempered_debiased": metric(None, num=0, reason="no temperature: every margin is zero"),
        "temperature": metric(1.31, 0.12, 240),
        "fpr@0.5": metric(0.36, 0.03),
        "length_matched_accuracy": metric(0.655, 0.055, 310),
        "longer_wins_accuracy": metric(0.634, 0.026),
        "accuracy_over_baseline": metric(0.09, 0.03),
        "pairwise_accuracy[arithmetic]": metric(0.553, 0.05, 402),
        "pairwise_accuracy[polite & short]": metric(0.821, 0.04, 398),
        "pooled_reward_variance": metric(1.94, 0.2),
    }


def lengths(scale: float) -> dict[str, float]:
    return {
        name: scale * factor for name, factor in (("p5", 0.3), ("p50", 1.0), ("p95", 2.7), ("mean", 1.2), ("max", 4))
    }


def split(num_pairs: int) -> dict[str, Any]:
    return {
        "num_pairs": num_pairs,
        "num_prompts": num_pairs // 3,
        "pairs_per_prompt": {"mean": 3.0, "max": 3},
        "longer_wins": {"accuracy": 0.634, "num_pairs": num_pairs, "num_ties": 4},
        "characters": {"prompt": lengths(91), "chosen": lengths(260), "rejected": lengths(220)},
        "target_margin": None,
    }


def audit() -> dict[str, Any]:
    return {
        "num_pairs": 3600,
        "num_prompts": 1200,
        "num_rows": 3621,
        "num_rejected": 21,
        "rejected": {"empty chosen": 12, "identical sides": 9},
        "identical_sides": {"num_rejected_rows": 9, "num_pairs_alike": 2},
        "sources": [{"source": "gold", "layout": "plain", "num_rows": 3621, "num_pairs": 3600, "num_rejected": 21}],
        "duplicates": {"num_exact": 5, "num_contradictory": 0},
        "leakage": [
            {"splits": ["train", "test"], "num_prompts": 0, "num_completions": 3, "share_of_completions": 0.0012},
            {"splits": ["train", "validation"], "num_prompts": 0, "num_completions": 1, "share_of_completions": 0.0009},
        ],
        "splits": {"train": split(2700), "validation": split(300), "test": split(600)},
        "label_ceiling": {"test": 0.831, "ood": 0.829},
        "warnings": [
            "length bias in train: the longer completion wins in 63.4 % of 2700 pairs. A model has to beat that."
        ],
    }


def context() -> list[dict[str, Any]]:
    def row(name: str, value: float, half: float | None, kind: str) -> dict[str, Any]:
        bounds = (
            {"ci_low": None, "ci_high": None} if half is None else {"ci_low": value - half, "ci_high": value + half}
        )
        return {"name": name, "value": value, **bounds, "kind": kind}

    return [
        row("this model, test pairs", 0.712, 0.022, "model"),
        row("guessing", 0.5, None, "reference"),
        row("the longer one wins", 0.634, 0.026, "reference"),
        row("label ceiling", 0.831, None, "reference"),
        row("arithmetic", 0.553, 0.05, "subset"),
        row("polite & short", 0.821, 0.04, "subset"),
        row("shortcut reversed", 0.58, 0.03, "ood"),
    ]


def checked(name, value, threshold, passed, text):
    """A check as records have it."""
    return asdict(GateCheck(name, value, threshold, passed, text))


def results() -> dict[str, Any]:
    stages = ("prepare", "train", "evaluate", "landscape", "readiness")
    checks = [
        ("pairwise_accuracy", 0.712, 0.6, True, "held-out pairwise accuracy: 0.712, above 0.6"),
        ("margin_p50", 0.918, 0.0, True, "median held-out margin: 0.918, above 0"),
        ("negative_margin_rate", 0.288, 0.4, True, "share of negative margins: 0.288, below 0.4"),
        ("ece_debiased", 0.051, 0.15, True, "calibration error (ECE): 0.051, below 0.15"),
        (
            "train_test_gap",
            None,
            0.15,
            False,
            "train accuracy minus test accuracy: not measured; it has to be below 0.15",
        ),
        ("hard_accuracy", 0.481, 0.5, False, "accuracy where the shorter is better: lower end 0.481, wanted 0.5"),
    ]
    return {
        "study": "demo",
        "seed": 7,
        "created": "2026-11-21T01:30:00+00:00",
        "run_name": "gold-tiny-s7",
        "verdict": {
            "rung": 3,
            "evidence": "samples of the policy, judged by the synthetic benchmark",
            "status": "not_ready",
            "headline": "Not ready for a KL of 3 nats by best-of-n: 2 of 6 checks on samples of the policy failed",
            "reasons": [check[4] for check in checks if not check[3]],
        },
        "next_rung": {
            "rung": 4,
            "evidence": "a policy optimised against it, judged on held-out prompts",
            "command": "rm-opt rlhf --mode policy --checkpoint out/best --seeds 3",
            "cost": "three trainings of the policy by GRPO",
        },
        "gate": [checked(*check) for check in checks],
        "label_gate": [checked(*checks[0])],
        "metrics": metrics(),
        "ood_metrics": metrics(-0.13),
        "context": context(),
        "logged": logged_sample.record(length=1.0),
        "observations": judgement_sample.record(),
        "policy": policy_sample.policy(),
        "rlhf": rlhf_sample.record(watched=True),
        "readiness": {
            "version": "v1",
            "overall_score": 0.781,
            "accuracy_score": 0.712,
            "calibration_score": 0.745,
            "stability_score": 0.424,
            "landscape_score": 1.084,
            "band": "0.6 to 0.8",
            "recommendations": ["Reward variance 2.1 is above 2.0: normalise rewards before a policy is optimised."],
        },
        "training": {
            "steps": 500,
            "best_step": 400,
            "best_metric": "eval/pairwise_accuracy",
            "best_value": 0.719,
            "num_pairs": 8100,
            "num_distinct": 2700,
            "num_parameters": 1_486_337,
            "stop_reason": "all planned steps were taken",
            "truncation": {
                "train": {"sides": 5400, "prompts_cut": 3, "completions_cut": 12},
                "validation": {"sides": 600, "prompts_cut": 0, "completions_cut": 1},
                "test": {"sides": 1200, "prompts_cut": 0, "completions_cut": 2},
            },
            "pairs_per_second": 231.4,
            "wall_seconds": 41.2,
        },
        "audit": audit(),
        "mistakes": [
            {
                "pair_id": f"pair{number:012d}",
                "prompt": "Human: What is 17 + 25?\n\nAssistant: 42.\n\nHuman: Politely! <script>alert(1)</script>",
                "chosen": "Of course! The answer is 42 & nothing else.",
                "rejected": "I am delighted to be asked such a wonderful question. " * 30,
                "margin": -3.1 + number / 20,
            }
            for number in range(50)
        ],
        "diagnoses": [
            {
                "symptom": "eval accuracy falls from 0.719 to 0.690 while train accuracy rises from 0.741 to 0.802",
                "diagnosis": "overfitting",
                "advice": "lower the learning rate, regularise, stop early",
            }
        ],
        "stages": [
            {
                "name": name,
                "key": f"{index}" * 64,
                "path": f"/home/someone/project/.rm-opt/store/{name}/gold-tiny-{name}-0123456789ab",
                "cached": name == "prepare",
                "wall_seconds": 3.2 * 10**index,
                "device_seconds": 0.0 if name == "prepare" else 3.2 * 10**index,
            }
            for index, name in enumerate(stages)
        ],
        "config": {
            "study": "demo",
            "seed": 7,
            "data": {"source": "gold", "gold": {"num_prompts": 1200, "shortcut": "length"}},
            "model": {"name": "tiny", "max_seq_len": 512},
            "train": {"lr": 0.001, "steps": 500, "early_stopping_patience": None},
        },
        **{stage: record() for stage, record in RECORDS.items()},
        "environment": {"rm-optimizer": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7", "device": "cpu"},
    }
