"""Baseline: the whole recipe against the loop that one writes by hand in an afternoon."""

from experiments.schema import Experiment, Factor, Hypothesis
from experiments.sizes import ACCURACY, BUDGET_MINUTES, NOTHING, SEEDS, Size, base


def experiment(size: Size) -> Experiment:
    """Hypothesis H1 of the validation plan."""
    accuracy = ACCURACY[size]
    return Experiment(
        name="baseline",
        size=size,
        title="The full recipe against a plain loop",
        question="Does pair-aware batching with schedule, smoothing and early stopping beat a plain loop (padded "
        "micro-batches in the order drawn, each with a mean loss of its own, constant learning rate, last weights) at "
        "the same number of steps, and what of it is the batching alone?",
        base=base(size),
        factors=(
            Factor(
                name="loop", levels={"plain": NOTHING | {"train.batching": "plain"}, "pair_aware": NOTHING, "full": {}}
            ),
        ),
        control="plain",
        seeds=SEEDS[size],
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
                arm="pair_aware",
                direction="above",
                threshold=1.0,
            ),
            # The gradients differ by the weights of pairs alone, so it is speed that is bought, not accuracy.
            Hypothesis(
                name="H1d",
                claim="Pair-aware batching alone changes the accuracy by less than a point.",
                metric=accuracy,
                comparison="difference",
                arm="pair_aware",
                direction="within",
                threshold=0.01,
            ),
        ),
        budget_minutes=BUDGET_MINUTES[size],
    )
