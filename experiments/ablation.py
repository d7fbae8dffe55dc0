"""Ablation: what each part of the recipe adds, from nothing (A1) to everything (A5)."""

from experiments.schema import Experiment, Factor, Hypothesis
from experiments.sizes import ACCURACY, BUDGET_MINUTES, NOTHING, SEEDS, Size, base
from rmcore.config.pipeline import Changes

GAP = "eval/train_test_gap"
ECE = "calib/test_ece_debiased"
LOSS = "eval/test_loss"


def recipes(size: Size) -> dict[str, Changes]:
    """A1 to A5 as changes of the full recipe: each adds one part to the one before."""
    full = base(size).train
    added: list[Changes] = [
        {"train.schedule": full.schedule, "train.warmup_steps": full.warmup_steps},
        {"train.label_smoothing": full.label_smoothing},
        {"train.early_stopping_patience": full.early_stopping_patience, "train.best_metric": full.best_metric},
        {"train.regularization_lambda": full.regularization_lambda},
    ]
    found = {"A1": NOTHING}
    for number, change in enumerate(added, 2):
        found[f"A{number}"] = found[f"A{number - 1}"] | change
    return found


def experiment(size: Size) -> Experiment:
    """Hypotheses H2, H3 and H5 of the validation plan."""
    accuracy = ACCURACY[size]
    return Experiment(
        name="ablation",
        size=size,
        title="Ablation of the training recipe",
        question="What do a decaying schedule, label smoothing, early stopping and a penalty on the rewards each add? "
        "A1 none; A2 + cosine schedule with warm-up; A3 + label smoothing; A4 + early stopping with the best "
        "checkpoint; A5 + penalty.",
        base=base(size),
        factors=(Factor(name="recipe", levels=recipes(size)),),
        control="A1",
        seeds=SEEDS[size],
        metrics=(
            accuracy,
            ECE,
            GAP,
            "eval/test_length_matched_accuracy",
            LOSS,
            "train/stop_share",
            "cost/train_seconds",
        ),
        hypotheses=(
            Hypothesis(
                name="H2a",
                claim="Without a schedule the model overfits: training accuracy is over 15 points above held-out "
                "accuracy.",
                metric=GAP,
                comparison="level",
                arm="A1",
                direction="above",
                threshold=0.15,
            ),
            Hypothesis(
                name="H2b",
                claim="With a cosine schedule and warm-up that gap stays below 10 points.",
                metric=GAP,
                comparison="level",
                arm="A2",
                direction="below",
                threshold=0.10,
            ),
            Hypothesis(
                name="H2c",
                claim="The schedule makes the gap smaller.",
                metric=GAP,
                comparison="difference",
                arm="A2",
                versus="A1",
                direction="below",
                threshold=0.0,
            ),
            Hypothesis(
                name="H2d",
                claim="It ends at a lower held-out loss.",
                metric=LOSS,
                comparison="difference",
                arm="A2",
                versus="A1",
                direction="below",
                threshold=0.0,
            ),
            Hypothesis(
                name="H3a",
                claim="Without label smoothing the model is badly calibrated: its ECE exceeds 0.15.",
                metric=ECE,
                comparison="level",
                arm="A2",
                direction="above",
                threshold=0.15,
            ),
            Hypothesis(
                name="H3b",
                claim="Label smoothing of 0.05 brings the ECE below 0.12.",
                metric=ECE,
                comparison="level",
                arm="A3",
                direction="below",
                threshold=0.12,
            ),
            Hypothesis(
                name="H3c",
                claim="Label smoothing costs less than 2 points of accuracy.",
                metric=accuracy,
                comparison="difference",
                arm="A3",
                versus="A2",
                direction="above",
                threshold=-0.02,
            ),
            Hypothesis(
                name="H5a",
                claim="Early stopping ends the run before 90 % of the planned steps.",
                metric="train/stop_share",
                comparison="level",
                arm="A4",
                direction="below",
                threshold=0.9,
            ),
            Hypothesis(
                name="H5b",
                claim="Keeping the best checkpoint beats keeping the last one.",
                metric=accuracy,
                comparison="difference",
                arm="A4",
                versus="A3",
                direction="above",
                threshold=0.0,
            ),
        ),
        budget_minutes=BUDGET_MINUTES[size],
    )
