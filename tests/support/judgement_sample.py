"""Held-out judgements as stage evaluate measures them: pairs with ties, rankings, and grades of two attributes."""

from dataclasses import asdict

import numpy as np

from rmcore.data.survey import Scale
from rmcore.evaluation.judgements import Choices, GradesOf, mean_over_prompts, measure_choices, measure_grades
from rmcore.stages.evaluate import MeasuredJudgements

PROMPTS = 60
HOW = {"num_prompts": PROMPTS, "num_resamples": 200, "seed": 0}


def record() -> dict:
    """JSON-ready."""
    rng = np.random.default_rng(0)
    prompts = np.arange(PROMPTS)
    kinds = ["pair", "tie", "ranking"] * (PROMPTS // 3)
    lists = np.array(kinds) == "ranking"
    two = np.where(lists, np.nan, rng.uniform(0.1, 0.3, PROMPTS))
    choices = Choices(
        prompts,
        kinds,
        nats=rng.uniform(0.4, 1.0, PROMPTS),
        chance_nats=np.where(lists, np.log(75), np.log(3)),
        top_is_best=rng.integers(0, 2, PROMPTS).astype(float),
        gain=np.where(lists, rng.uniform(0.7, 1.0, PROMPTS), np.nan),
        tie_probability=two,
        is_tie=np.array(kinds) == "tie",
    )
    scales = (
        Scale("helpfulness", "ordinal", (0.0, 1.0, 2.0), (0.2, 0.5, 0.3), 1.1, 0.7),
        Scale("safe", "binary", (0.0, 1.0), (0.1, 0.9), 0.9, 0.3),
    )
    metrics = measure_choices(choices, **HOW)
    for scale in scales:
        codes = rng.integers(0, len(scale.levels), PROMPTS).astype(float)
        said = codes + rng.normal(size=PROMPTS)
        grades = GradesOf(
            prompts,
            rng.uniform(0.3, 1.2, PROMPTS),
            np.full(PROMPTS, 1.0),
            said,
            codes,
            np.clip(np.round(said), 0, len(scale.levels) - 1),
            len(scale.levels),
        )
        metrics |= {f"{name}[{scale.attribute}]": value for name, value in measure_grades(grades, **HOW).items()}
    change = {
        "alone": rng.integers(0, 2, PROMPTS).astype(float),
        "left_out": rng.integers(-1, 1, PROMPTS).astype(float),
    }
    parts = {
        name: {"weight": weight}
        | {key: one.to_dict() for key, one in mean_over_prompts(change, prompts, **HOW).items()}
        for name, weight in (("helpfulness", 1.0), ("safe", 0.0))
    }
    measured = MeasuredJudgements(
        metrics,
        {"pair": 20, "tie": 20, "ranking": 20, "grades": 60},
        2,
        3,
        {"helpfulness": {"helpfulness": 1.0, "safe": 0.31}, "safe": {"helpfulness": 0.31, "safe": 1.0}},
        parts,
    )
    return asdict(measured)
