"""Optimizers: same model, data order and initial weights; each at the best of equally many tuned learning rates."""

from collections.abc import Sequence

from experiments.schema import Experiment, Factor, Hypothesis, Tuning
from experiments.sizes import ACCURACY, BUDGET_MINUTES, LOOKS, SEEDS, Size, base

RELATIVE_RANGES = {"adam": (0.2, 5.0), "adamw": (0.2, 5.0), "sgd": (30.0, 3000.0), "muon": (0.5, 20.0)}
"""Ranges of the learning rate in units of the base's, which suits AdamW. Muon wants somewhat more (Jordan et al. 2024),
SGD orders of magnitude more."""
CONTROL = "adamw"
TARGET_ACCURACY = {"smoke": 0.55, "gold": 0.65, "small": 0.70, "paper": 0.60}


def with_control(optimizers: Sequence[str]) -> list[str]:
    """`optimizers` and the one that the hypotheses compare with, which is never left out."""
    return [*optimizers, *([CONTROL] if CONTROL not in optimizers else [])]


def experiment(size: Size) -> Experiment:
    """Accuracy, time to a target accuracy, and curvature at the end, by optimizer."""
    accuracy, top = ACCURACY[size], "hessian/test_lambda_max"
    normalized = "hessian/test_lambda_max_normalized"
    lr = base(size).train.lr

    return Experiment(
        name="optimizers",
        size=size,
        title="Optimizers for reward models",
        question="Which optimizer gives the most accurate reward model at the same number of steps, which one reaches "
        "a target accuracy first, and does it change the curvature where it ends?",
        base=base(size),
        factors=(Factor(name="optimizer", levels={name: {"train.optimizer": name} for name in RELATIVE_RANGES}),),
        control=CONTROL,
        seeds=SEEDS[size],
        looks=LOOKS[size],
        metrics=(
            accuracy,
            "calib/test_ece_debiased",
            "eval/test_loss",
            "train/steps_to_target",
            "cost/seconds_to_target",
            top,
            normalized,
            "hessian/test_trace_estimate",
            "cost/train_seconds",
            "cost/peak_training_mib",
        ),
        tuning=Tuning(
            trials=2 if size == "smoke" else 3,
            ranges={arm: (low * lr, high * lr) for arm, (low, high) in RELATIVE_RANGES.items()},
        ),
        target_accuracy=TARGET_ACCURACY[size],
        hypotheses=(
            Hypothesis(
                name="O1",
                claim="Muon is more accurate than AdamW at the same number of steps.",
                metric=accuracy,
                comparison="difference",
                arm="muon",
                direction="above",
                threshold=0.0,
            ),
            Hypothesis(
                name="O3",
                claim="SGD is over 2 points less accurate than AdamW.",
                metric=accuracy,
                comparison="difference",
                arm="sgd",
                direction="below",
                threshold=-0.02,
            ),
            Hypothesis(
                name="O4",
                claim="Muon ends where the largest curvature is smaller than where AdamW ends.",
                metric=top,
                comparison="ratio",
                arm="muon",
                direction="below",
                threshold=1.0,
            ),
            # O4 alone could be won by larger margins, which lower the curvature of the loss without any flatter place.
            Hypothesis(
                name="O5",
                claim="So it does at margins of equal size.",
                metric=normalized,
                comparison="ratio",
                arm="muon",
                direction="below",
                threshold=1.0,
            ),
        ),
        budget_minutes=BUDGET_MINUTES[size],
    )
