"""Held-out judgements as stage evaluate measures them: pairs with ties, rankings, and grades of two attributes."""

from dataclasses import asdict

import numpy as np

from rmcore.evaluation.ranking import PairMean, means_over_prompts
from rmcore.stages.evaluate import MeasuredJudgements

PROMPTS = 60


def record() -> dict:
    """JSON-ready."""
    rng, prompts, every = np.random.default_rng(0), np.arange(PROMPTS), np.ones(PROMPTS, dtype=bool)

    def measured(*names: str) -> dict:
        means = [PairMean(name, rng.uniform(-0.4, 1.2, PROMPTS), every, False, "") for name in names]
        return means_over_prompts(means, prompts, num_prompts=PROMPTS, num_resamples=200, seed=0)

    named = ("pair", "tie", "ranking", "helpfulness", "safe")
    parts = {
        name: {"weight": weight} | {key: one.to_dict() for key, one in measured("alone", "left_out").items()}
        for name, weight in (("helpfulness", 1.0), ("safe", 0.0))
    }
    metrics = measured(*(f"{what}[{name}]" for name in named for what in ("nats", "nats_gained")))
    return asdict(MeasuredJudgements(metrics, {"pair": 20, "tie": 20, "ranking": 20, "grades": 60}, 2, 3, parts))
