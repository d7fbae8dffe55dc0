"""What a policy's stages leave, computed from synthetic samples."""

from copy import deepcopy
from functools import cache

import numpy as np

from rmcore.config.evaluate import ReadinessConfig
from rmcore.policy.confirmation import ServedGain, verdict_of_confirmation
from rmcore.policy.overoptimization import METHODS, overoptimization
from rmcore.readiness.components import JudgedPools, on_policy_parts
from rmcore.readiness.readiness_v2 import judge_v2


def policy(quality=1.0):
    """Records of the stages samples, overoptimization and readiness_v2 for a reward that is gold plus noise."""
    return deepcopy(_policy(quality))


@cache
def _policy(quality):
    rng = np.random.default_rng(0)
    gold = [rng.normal(size=17) for _ in range(60)]
    rewards = [quality * pool + rng.normal(size=17) for pool in gold]
    config = ReadinessConfig(planned_kl=1.5)
    settings = {"num_resamples": 100, "seed": 0}
    curves = [overoptimization(rewards, gold, method=m, planned_kl=1.5, **settings).to_dict() for m in METHODS]
    lengths = [rng.normal(size=17) for _ in gold]
    parts = {
        name: value.to_dict()
        for name, value in on_policy_parts(JudgedPools(rewards, gold, lengths), **settings).items()
    }
    plan = curves[0]["plan"]
    parts |= {"planned_gain": plan["gain"], "planned_fall": plan["fall"]}
    parts["ece_tempered_debiased"] = {"value": 0.02, "ci_low": 0.01, "ci_high": 0.04, "num": 9, "reason": None}
    choices = [{"n": n, "kl": 0.1, "nominal_kl": 0.1, "reward": float(n)} for n in (1, 2, 4, 8, 16)]
    return {
        "sampling": {
            "num_samples": 510, "num_prompts": 30, "engine": "generate", "finished_share": 0.975, "num_empty": 2,
        },
        "overoptimization": {
            "judge": "the <gold> world", "num_cut": 5, "best_of_n": choices, "curves": curves,
            "worst_prompts": {"best_of_n": [{"prompt": "Sort <these>", "gain": -2.5, "response": "the worst one"}]},
        },
        "readiness": judge_v2(parts, config, "the <gold> world", num_telling=60),
    }  # fmt: skip


def judged(results, quality=1.0):
    """A run's results with a policy."""
    found = policy(quality)
    return results | {"policy": found, "gate": found["readiness"]["gate"], "verdict": found["readiness"]["verdict"]}


def served(num=128):
    """The record of a best-of-64 that was served to `num` prompts, as the stage confirmation writes it."""
    rng = np.random.default_rng(3)
    known = ServedGain(3.0, 0.3)
    for difference in rng.normal(0.7, 1.4, num):
        known.see(float(difference))
    record = {
        "n": 64, "kl": 3.17, "num_prompts": num, "num_allowed": 400, "num_fresh": None, "num_labels": 2 * num + 48,
        "judge": "the synthetic benchmark", "unit": "sd", "unit_error": 0.17, "useful_gain": 0.3,
        "is_decided": known.is_decided,
        "differences": known.differences, "path": known.path, "characters": {"chosen": 266.0, "other": 128.0},
        "clipped_share": known.clipped_share, "doubt": known.doubt,
        "gold": {
            "gain": known.gain().to_dict(), "unclipped_gain": known.unclipped().to_dict(),
            "win_rate": known.win_rate().to_dict(),
        },
        "examples": [{"prompt": "Sort | these\nnumbers.", "chosen": "1, 2 <b>", "other": "", "difference": 0.31}],
        "worst": [{"prompt": "Count to two.", "chosen": "Two.", "other": "One, two.", "difference": -4.5}],
    }  # fmt: skip
    return record | {"verdict": verdict_of_confirmation(record)}
