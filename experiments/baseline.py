"""Baseline: the whole recipe against the loop that one writes by hand in an afternoon."""

from experiments.schema import Experiment, Factor, Hypothesis
from experiments.sizes import BUDGET_MINUTES, LOOKS, NOTHING, SEEDS, Size, base


def experiment(size: Size) -> Experiment:
    """Hypothesis H1 of the validation plan."""
    accuracy = "eval/test_pairwise_accuracy"
    return Experiment(
        name="baseline",
        size=size,
        title="The full recipe against a plain loop",
        question="Does pair-aware batching with schedule, smoothing and early stopping beat a plain loop (padded "
        "micro-batches in the order drawn, each with a mean loss of its own, constant learning rate, last weights) at "
        "the same number of steps?",
        base=base(size),
        factors=(Factor(name="loop", levels={"plain": NOTHING | {"train.batching": "plain"}, "full": {}}),),
        control="plain",
        seeds=SEEDS[size],
        looks=LOOKS[size],
        metrics=(
            accuracy,
            "calib/test_ece_debiased",
            "eval/train_test_gap",
            "eval/test_length_matched_accuracy",
            "cost/train_pairs_per_second",
            "cost/train_seconds",
        ),
        hypotheses=(
            Hypothesis(
                name="H1a",
                claim="The full recipe is over 3 points more accurate than the plain loop.",
                metric=accuracy,
                comparison="difference",
                arm="full",
                direction="above",
                threshold=0.03,
            ),
            Hypothesis(
                name="H1b",
                claim="The full recipe orders over 63 % of the held-out pairs as the labels do.",
                metric=accuracy,
                comparison="level",
                arm="full",
                direction="above",
                threshold=0.63,
            ),
            Hypothesis(
                name="H1c",
                claim="Pair-aware batching trains more pairs a second than the plain loop.",
                metric="cost/train_pairs_per_second",
                comparison="ratio",
                arm="full",
                direction="above",
                threshold=1.0,
            ),
        ),
        budget_minutes=BUDGET_MINUTES[size],
    )
