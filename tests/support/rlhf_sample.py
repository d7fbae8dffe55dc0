"""What the stage grpo leaves: a policy whose proxy reward rises while the gold reward turns."""

from statistics import fmean


def measured(value, half=None, reason=None):
    known = value is not None and half is not None
    low, high = (value - half, value + half) if known else (None, None)
    return {"value": value, "ci_low": low, "ci_high": high, "num": 48, "reason": reason}


def point(step, seed, judged, half):
    """One measurement; numbers differ by seed and step, so that each can be found again."""
    done = step / 40
    gold = (1.7 + 0.1 * seed) * done - (1.31 + 0.4 * seed) * done**2
    return {
        "step": step,
        "kl": measured((4.13 + 0.3 * seed) * done**1.3, half * done),
        "proxy": measured((2.07 + 0.11 * seed) * done**0.8, half * done),
        "gold": measured(gold, half * done) if judged else None,
        "win_rate": measured(0.5 + 0.21 * gold, 0.1 * half) if judged else None,
        "num_tokens": measured(23.7 + 21.3 * done - seed, 20 * half),
    }


def mean_of(points, half):
    """The mean over seeds at one step."""

    def over(key):
        values = [one[key] for one in points]
        if values[0] is None or values[0]["value"] is None:
            return values[0]
        return measured(fmean(value["value"] for value in values), half if points[0]["step"] else 0.0)

    return {key: points[0]["step"] if key == "step" else over(key) for key in points[0]}


def look(number, seed, turns):
    """What a watch saw at a step; numbers differ by seed and step."""
    done = number / 8
    gains = [
        [0.41 * k / 8 - (0.7 * (k / 8) ** 2 if turns else 0.0) + 0.003 * seed, 0.05 + 0.02 * k]
        for k in range(number + 1)
    ]
    ends = turns and number == 7
    return {
        "number": number, "step": 5 * number, "kl": 3.21 * done**1.4, "reference": max(0, number - 3), "num_pairs": 37,
        "difference": 0.171 - 0.31 * done * turns, "error": 0.183, "gained": 2.1 * done, "stopped": 4.2 * done * turns,
        "turned": 3.31 * done * turns - 0.4, "needed": 2.9957,
        "best": min(number, 4), "gains": gains,
        "action": "stop" if ends else "go_on",
        "reason": "the true reward has stopped gaining; back to step 20" if ends else "nothing is shown yet",
    }  # fmt: skip


def watch(seed, kept):
    """A watch that kept a step, or with `kept` false went back to the start."""
    examples = [
        {"prompt": "Name a <b>bird</b>", "before": "A fish.", "after": "A kestrel, above all.", "difference": 0.83},
        {"prompt": "Count to two", "before": "", "after": "One, two.", "difference": -0.21},
    ]
    final = {"value": 0.133, "interval": [-0.047, 0.287], "limit": 3.0, "examples": examples}
    return {
        "looks": [look(number, seed, not kept) for number in range(1, 8 + kept)],
        "unit": "sd", "labels": 648, "final_labels": 120 if kept else 0,
        "kept_step": 35 if kept else 0, "kept_kl": 2.41 if kept else 0.0, "num_prompts": 700, "prompts_used": 624,
        "final": final if kept else None,
    }  # fmt: skip


def several(num_points):
    """How two rewards moved."""
    return {
        "names": ["own", "other/<best>"], "weights": [1.0, -0.25],
        "steps": [
            {"step": step, "means": [0.31 + step / 7, 412.0 - step], "spreads": [0.61, 0.0 if step == 1 else 55.0]}
            for step in range(1, num_points + 1)
        ],
    }  # fmt: skip


def record(*, judged=True, num_seeds=3, num_points=9, watched=None, rewards=1):
    """`rlhf.json`; without a judge, with one seed or one point where requested.

    watched: with a watch that kept a trained policy (True) or the start (False); None: nobody watched.
    """
    seeds = [
        {
            "seed": seed,
            "points": [point(5 * index, seed, judged, 0.2) for index in range(num_points)],
            "stopped": "the reward server went away for 300 s" if seed == 1 else None,
            "watch": None if watched is None else watch(seed, watched),
        }
        for seed in range(num_seeds)
    ]
    curve = [mean_of(points, 0.23) for points in zip(*(seed["points"] for seed in seeds), strict=True)]
    return {
        "rewards": "vllm",
        "several": several(num_points) if rewards > 1 else None,
        "rollouts": "vllm",
        "parity": {
            "num_steps": 120, "mean_difference": 0.0123, "max_difference": 1.57,
        },
        "judge": "the <gold> world" if judged else "nobody",
        "num_seeds": num_seeds, "num_steps": 40, "prompts_per_step": 8, "group_size": 6, "learning_rate": 1e-4,
        "loss": "dapo", "kl_beta": 0.02, "length_penalty": 0.003,
        "num_prompts": 48, "samples_per_prompt": 4,
        "saved_seed": 0,
        "curve": curve,
        "seeds": seeds,
        "verdict": {
            "status": "unclear" if judged else "unknown",
            "headline": "Gold reward cannot be told from zero: +0.09 sd (-0.14 to 0.32) after 40 steps at 4.4 nats"
            if judged else "Nobody judged: the reward model's own reward rose by 2.1 sd",
            "reasons": ["the true reward peaked at step 20 & fell after"] if judged else [],
        },
        "cost": {"train_seconds": 125.0, "tokens_per_second": 913.0, "peak_mib": 1234.0},
    }  # fmt: skip


def best_of_n(gold=True):
    """The curve of best-of-n, as `overoptimization.json` has it."""
    return {
        "method": "best_of_n",
        "points": [
            {"kl": kl, "proxy": measured(proxy, 0.1)} | ({"gold": measured(0.62 * proxy, 0.12)} if gold else {})
            for kl, proxy in ((0.0, 0.0), (0.19, 0.55), (0.63, 1.0), (1.2, 1.35), (1.83, 1.65))
        ],
    }
