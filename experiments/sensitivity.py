"""Sensitivity: how much the outcome depends on four settings, one at a time in the order of their priority."""

from experiments.schema import Experiment, Factor
from experiments.sizes import ACCURACY, BUDGET_MINUTES, SEEDS, Size, base
from rmcore.config.pipeline import Changes

RELATIVE_RATES = {"0.2x": 0.2, "1x": 1.0, "2x": 2.0}
"""1e-6, 5e-6 and 1e-5, usual for models of billions of weights, in units of 5e-6: a small model wants a larger base."""
SMOOTHING = (0.0, 0.05, 0.1)
WARMUP_SHARES = (0.0, 0.05, 0.1)
"""0, 50 and 100 of 1000 steps."""
PENALTY = (0.0, 0.001, 0.01)


def experiment(size: Size) -> Experiment:
    """Learning rate, label smoothing, warm-up and penalty around the full recipe. Exploratory: no hypothesis."""
    start = base(size)
    steps = start.train.steps or 1000
    rates: dict[str, Changes] = {name: {"train.lr": start.train.lr * times} for name, times in RELATIVE_RATES.items()}
    accuracy = ACCURACY[size]
    return Experiment(
        name="sensitivity",
        size=size,
        title="Sensitivity to learning rate, smoothing, warm-up and penalty",
        question="Which of these settings has to be chosen with care, and which hardly matters?",
        base=start,
        factors=(
            Factor(name="lr", levels=rates),
            Factor(name="smoothing", levels={f"{value:g}": {"train.label_smoothing": value} for value in SMOOTHING}),
            Factor(
                name="warmup",
                levels={
                    f"{round(share * steps)}": {"train.warmup_steps": round(share * steps)} for share in WARMUP_SHARES
                },
            ),
            Factor(name="penalty", levels={f"{value:g}": {"train.regularization_lambda": value} for value in PENALTY}),
        ),
        design="one_at_a_time",
        control="base",
        seeds=SEEDS[size][:3],  # nothing is claimed, so nothing is looked at again
        metrics=(accuracy, "calib/test_ece_debiased", "eval/train_test_gap", "train/stop_share", "cost/train_seconds"),
        budget_minutes=BUDGET_MINUTES[size],
    )
