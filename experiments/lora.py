"""LoRA: low-rank adapters against full fine-tuning, at ten times its learning rate."""

from experiments.schema import Experiment, Factor, Hypothesis
from experiments.sizes import ACCURACY, BUDGET_MINUTES, SEEDS, Size, base

RELATIVE_RATE = 10.0
"""Learning rate of adapters in units of full fine-tuning's, the base's: they start at zero and want about ten times
more (Hu et al. 2021, arXiv:2106.09685)."""


def experiment(size: Size) -> Experiment:
    """Hypothesis H4 of the validation plan."""
    accuracy = ACCURACY[size]
    started = base(size)
    rate = {"train.lr": RELATIVE_RATE * started.train.lr}
    return Experiment(
        name="lora",
        size=size,
        title="LoRA against full fine-tuning",
        question="Are low-rank adapters as accurate as full fine-tuning, how much faster are they, and how much memory "
        "do they save?",
        base=started,
        factors=(
            Factor(
                name="weights",
                levels={
                    "full": {},
                    "r8": {"model.lora": {"rank": 8, "alpha": 16}} | rate,
                    "r16": {"model.lora": {"rank": 16, "alpha": 32}} | rate,
                },
            ),
        ),
        control="full",
        seeds=SEEDS[size],
        metrics=(
            accuracy,
            "calib/test_ece_debiased",
            "eval/train_test_gap",
            "cost/train_pairs_per_second",
            "train/trained_share",
            "cost/peak_training_mib",
            "cost/peak_total_mib",
            "cost/train_seconds",
        ),
        hypotheses=(
            Hypothesis(
                name="H4a",
                claim="LoRA of rank 8 loses less than 3 points of accuracy against full fine-tuning.",
                metric=accuracy,
                comparison="difference",
                arm="r8",
                direction="above",
                threshold=-0.03,
            ),
            Hypothesis(
                name="H4b",
                claim="LoRA of rank 8 trains over 3 times as many pairs a second.",
                metric="cost/train_pairs_per_second",
                comparison="ratio",
                arm="r8",
                direction="above",
                threshold=3.0,
            ),
            Hypothesis(
                name="H4c",
                claim="LoRA of rank 8 needs less than 60 % of the memory that full fine-tuning takes above the "
                "weights.",
                metric="cost/peak_training_mib",
                comparison="ratio",
                arm="r8",
                direction="below",
                threshold=0.6,
            ),
        ),
        budget_minutes=BUDGET_MINUTES[size],
    )
