"""Optimizers: same model, data order and initial weights; each at its own learning rate."""

from collections.abc import Sequence

from experiments.schema import Experiment, Factor, Hypothesis
from experiments.sizes import ACCURACY, BUDGET_MINUTES, SEEDS, Size, base
from rmcore.core.metrics import CELL_METRICS

RELATIVE_RATES = {"adam": 1.0, "adamw": 1.0, "sgd": 50.0, "muon": 16.0, "lion": 0.3}
"""Learning rate in units of AdamW's, the base's: the ratios of the best of equally many trials of each at size `gold`
(experiments/log/optimizers.md: AdamW 5.2e-4, SGD 0.026, Muon 8.2e-3). Lion's is its authors' advice, 3 to 10 times
less (Chen et al. 2023, arXiv:2302.06675)."""
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
    # Without the capability that measures curvature the experiment asks what is left.
    metrics = (
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
    )
    claims = (
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
    )
    return Experiment(
        name="optimizers",
        size=size,
        title="Optimizers for reward models",
        question="Which optimizer gives the most accurate reward model at the same number of steps, which one reaches "
        "a target accuracy first, and does it change the curvature where it ends?",
        base=base(size),
        factors=(
            Factor(
                name="optimizer",
                levels={
                    name: {"train.optimizer": name, "train.lr": ratio * lr} for name, ratio in RELATIVE_RATES.items()
                },
            ),
        ),
        control=CONTROL,
        seeds=SEEDS[size],
        metrics=tuple(metric for metric in metrics if metric in CELL_METRICS),
        target_accuracy=TARGET_ACCURACY[size],
        hypotheses=tuple(claim for claim in claims if claim.metric in CELL_METRICS),
        budget_minutes=BUDGET_MINUTES[size],
    )
