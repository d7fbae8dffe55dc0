"""Curriculum: the same pairs and steps in three orders, easy first, hard first and at random."""

from typing import Any

from experiments.schema import Experiment, Factor, Hypothesis
from experiments.sizes import ACCURACY, BUDGET_MINUTES, LOOKS, SEEDS, Size, base

MARGINS: dict[Size, dict[str, Any]] = {
    "smoke": {"curriculum_margins": "predicted"},
    "gold": {"curriculum_margins": "predicted"},
    "small": {"curriculum_margins": "annotated"},
    "paper": {"curriculum_margins": "predicted"},
}
"""Settings that say how easy a pair is: AlpacaEval's pairs have a judge's margin, the others have none."""


def experiment(size: Size) -> Experiment:
    """Compare the curriculum, easy pairs first, with a random order and with its own reverse at equal steps."""
    accuracy = ACCURACY[size]
    start = base(size)
    column = "margin" if size == "small" else start.data.margin_column
    margins = {f"train.{name}": value for name, value in MARGINS[size].items()}
    return Experiment(
        name="curriculum",
        size=size,
        title="Curriculum: does the order of the pairs matter?",
        question="Is a reward model more accurate if easy pairs come first and hard ones late, at the same pairs and "
        "steps?",
        base=start.model_copy(update={"data": start.data.model_copy(update={"margin_column": column})}),
        factors=(
            Factor(
                name="order",
                levels={
                    "random": {},
                    "easy_first": {"train.curriculum": "easy_first", **margins},
                    "hard_first": {"train.curriculum": "hard_first", **margins},
                },
            ),
        ),
        control="random",
        seeds=SEEDS[size],
        looks=LOOKS[size],
        metrics=(accuracy, "calib/test_ece_debiased", "eval/train_test_gap", "eval/test_loss", "cost/train_seconds"),
        hypotheses=(
            Hypothesis(
                name="C1",
                claim="The specification's curriculum is more accurate than a random order.",
                metric=accuracy,
                comparison="difference",
                arm="easy_first",
                direction="above",
                threshold=0.0,
            ),
            Hypothesis(
                name="C2",
                claim="The specification's curriculum is more accurate than its reverse.",
                metric=accuracy,
                comparison="difference",
                arm="easy_first",
                versus="hard_first",
                direction="above",
                threshold=0.0,
            ),
        ),
        budget_minutes=BUDGET_MINUTES[size],
    )
