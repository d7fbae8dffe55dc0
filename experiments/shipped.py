"""The shipped experiments, each a function of its size. H1 to H5 are the hypotheses of the validation plan."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from experiments.schema import Experiment, Hypothesis
from experiments.sizes import ACCURACY, BUDGET_MINUTES, NOTHING, SEEDS, Size, base
from rmcore.config.pipeline import Changes
from rmcore.core.metrics import CELL_METRICS

GAP = "eval/train_test_gap"
ECE = "calib/test_ece_debiased"
LOSS = "eval/test_loss"
LENGTH_MATCHED = "eval/test_length_matched_accuracy"
CURVATURE = "hessian/test_lambda_max"
AT_EQUAL_MARGINS = "hessian/test_lambda_max_normalized"
STOP_SHARE = "train/stop_share"
SPEED = "cost/train_pairs_per_second"
SECONDS = "cost/train_seconds"
MEMORY = "cost/peak_training_mib"

CLAIMS = {
    "H1a": "The full recipe is over 3 points more accurate than the plain loop.",
    "H1b": "The full recipe orders over 63 % of the held-out pairs as the labels do.",
    "H1c": "Pair-aware batching trains more pairs a second than the plain loop.",
    # The gradients differ by the weights of pairs alone, so it is speed that is bought, not accuracy.
    "H1d": "Pair-aware batching alone changes the accuracy by less than a point.",
    "H2a": "Without a schedule the model overfits: training accuracy is over 15 points above held-out accuracy.",
    "H2b": "With a cosine schedule and warm-up that gap stays below 10 points.",
    "H2c": "The schedule makes the gap smaller.",
    "H2d": "It ends at a lower held-out loss.",
    "H3a": "Without label smoothing the model is badly calibrated: its ECE exceeds 0.15.",
    "H3b": "Label smoothing of 0.05 brings the ECE below 0.12.",
    "H3c": "Label smoothing costs less than 2 points of accuracy.",
    "H4a": "LoRA of rank 8 loses less than 3 points of accuracy against full fine-tuning.",
    "H4b": "LoRA of rank 8 trains over 3 times as many pairs a second.",
    "H4c": "LoRA of rank 8 needs less than 60 % of the memory that full fine-tuning takes above the weights.",
    "H5a": "Early stopping ends the run before 90 % of the planned steps.",
    "H5b": "Keeping the best checkpoint beats keeping the last one.",
    "O1": "Muon is more accurate than AdamW at the same number of steps.",
    "O3": "SGD is over 2 points less accurate than AdamW.",
    "O4": "Muon ends where the largest curvature is smaller than where AdamW ends.",
    # O4 alone could be won by larger margins, which lower the curvature of the loss without any flatter place.
    "O5": "So it does at margins of equal size.",
}

LORA_RATE = 10.0
"""Learning rate of adapters in units of full fine-tuning's, the base's: they start at zero and want about ten times
more (Hu et al. 2021, arXiv:2106.09685)."""
SENSITIVITY_RATES = {"0.2x": 0.2, "1x": 1.0, "2x": 2.0}
"""1e-6, 5e-6 and 1e-5, usual for models of billions of weights, in units of 5e-6: a small model wants a larger base."""
WARMUP_SHARES = (0.0, 0.05, 0.1)
"""0, 50 and 100 of 1000 steps."""
OPTIMIZER_RATES = {"adam": 1.0, "adamw": 1.0, "sgd": 50.0, "muon": 16.0, "lion": 0.3}
"""Learning rate in units of AdamW's, the base's: the ratios of the best of equally many trials of each at size `gold`
(experiments/log/optimizers.md: AdamW 5.2e-4, SGD 0.026, Muon 8.2e-3). Lion's is its authors' advice, 3 to 10 times
less (Chen et al. 2023, arXiv:2302.06675)."""
OPTIMIZER_CONTROL = "adamw"
TARGET_ACCURACY = {"smoke": 0.55, "gold": 0.65, "small": 0.70, "paper": 0.60}


def baseline(size: Size) -> Experiment:
    """The whole recipe against the loop that one writes by hand in an afternoon."""
    accuracy = ACCURACY[size]
    return _experiment(
        "baseline",
        size,
        {"loop": {"plain": NOTHING | {"train.batching": "plain"}, "pair_aware": NOTHING, "full": {}}},
        title="The full recipe against a plain loop",
        question="Does pair-aware batching with schedule, smoothing and early stopping beat a plain loop (padded "
        "micro-batches in the order drawn, each with a mean loss of its own, constant learning rate, last weights) at "
        "the same number of steps, and what of it is the batching alone?",
        control="plain",
        metrics=(accuracy, ECE, GAP, LENGTH_MATCHED, SPEED, SECONDS),
        hypotheses=(
            _claim("H1a", accuracy, "difference", "full", above=0.03),
            _claim("H1b", accuracy, "level", "full", above=0.63),
            _claim("H1c", SPEED, "ratio", "pair_aware", above=1.0),
            _claim("H1d", accuracy, "difference", "pair_aware", within=0.01),
        ),
    )


def ablation(size: Size) -> Experiment:
    """Measure what each part of the recipe adds, from nothing (A1) to everything (A5)."""
    accuracy = ACCURACY[size]
    return _experiment(
        "ablation",
        size,
        {"recipe": _recipes(size)},
        title="Ablation of the training recipe",
        question="What do a decaying schedule, label smoothing, early stopping and a penalty on the rewards each add? "
        "A1 none; A2 + cosine schedule with warm-up; A3 + label smoothing; A4 + early stopping with the best "
        "checkpoint; A5 + penalty.",
        control="A1",
        metrics=(accuracy, ECE, GAP, LENGTH_MATCHED, LOSS, STOP_SHARE, SECONDS),
        hypotheses=(
            _claim("H2a", GAP, "level", "A1", above=0.15),
            _claim("H2b", GAP, "level", "A2", below=0.10),
            _claim("H2c", GAP, "difference", "A2", "A1", below=0.0),
            _claim("H2d", LOSS, "difference", "A2", "A1", below=0.0),
            _claim("H3a", ECE, "level", "A2", above=0.15),
            _claim("H3b", ECE, "level", "A3", below=0.12),
            _claim("H3c", accuracy, "difference", "A3", "A2", above=-0.02),
            _claim("H5a", STOP_SHARE, "level", "A4", below=0.9),
            _claim("H5b", accuracy, "difference", "A4", "A3", above=0.0),
        ),
    )


def _recipes(size: Size) -> dict[str, Changes]:
    """A1 to A5 as changes of the full recipe: each adds one part to the one before."""
    full = base(size).train
    parts = [
        ("schedule", "warmup_steps"),
        ("label_smoothing",),
        ("early_stopping_patience", "best_metric"),
        ("regularization_lambda",),
    ]
    recipes: dict[str, Changes] = {"A1": NOTHING}
    for number, settings in enumerate(parts, 2):
        added = {f"train.{setting}": getattr(full, setting) for setting in settings}
        recipes[f"A{number}"] = recipes[f"A{number - 1}"] | added
    return recipes


def lora(size: Size) -> Experiment:
    """Low-rank adapters against full fine-tuning, at ten times its learning rate."""
    accuracy = ACCURACY[size]
    rate = {"train.lr": LORA_RATE * base(size).train.lr}
    weights: dict[str, Changes] = {
        "full": {},
        "r8": {"model.lora": {"rank": 8, "alpha": 16}} | rate,
        "r16": {"model.lora": {"rank": 16, "alpha": 32}} | rate,
    }
    return _experiment(
        "lora",
        size,
        {"weights": weights},
        title="LoRA against full fine-tuning",
        question="Are low-rank adapters as accurate as full fine-tuning, how much faster are they, and how much memory "
        "do they save?",
        control="full",
        metrics=(accuracy, ECE, GAP, SPEED, "train/trained_share", MEMORY, "cost/peak_total_mib", SECONDS),
        hypotheses=(
            _claim("H4a", accuracy, "difference", "r8", above=-0.03),
            _claim("H4b", SPEED, "ratio", "r8", above=3.0),
            _claim("H4c", MEMORY, "ratio", "r8", below=0.6),
        ),
    )


def sensitivity(size: Size) -> Experiment:
    """How much the outcome depends on four settings, one at a time in the order of their priority: exploratory."""
    train = base(size).train
    values = {
        "smoothing": ("train.label_smoothing", (0.0, 0.05, 0.1)),
        "warmup": ("train.warmup_steps", [round(share * (train.steps or 1000)) for share in WARMUP_SHARES]),
        "penalty": ("train.regularization_lambda", (0.0, 0.001, 0.01)),
    }
    factors: dict[str, dict[str, Changes]] = {
        "lr": {name: {"train.lr": train.lr * times} for name, times in SENSITIVITY_RATES.items()}
    }
    for factor, (setting, levels) in values.items():
        factors[factor] = {f"{value:g}": {setting: value} for value in levels}
    return _experiment(
        "sensitivity",
        size,
        factors,
        title="Sensitivity to learning rate, smoothing, warm-up and penalty",
        question="Which of these settings has to be chosen with care, and which hardly matters?",
        design="one_at_a_time",
        control="base",
        seeds=SEEDS[size][:3],
        metrics=(ACCURACY[size], ECE, GAP, STOP_SHARE, SECONDS),
    )


def optimizers(size: Size) -> Experiment:
    """Accuracy, time to a target accuracy, and curvature at the end: same model, data order and initial weights."""
    accuracy, lr = ACCURACY[size], base(size).train.lr
    levels = {name: {"train.optimizer": name, "train.lr": relative * lr} for name, relative in OPTIMIZER_RATES.items()}
    return _experiment(
        "optimizers",
        size,
        {"optimizer": levels},
        title="Optimizers for reward models",
        question="Which optimizer gives the most accurate reward model at the same number of steps, which one reaches "
        "a target accuracy first, and does it change the curvature where it ends?",
        control=OPTIMIZER_CONTROL,
        metrics=(
            *(accuracy, ECE, LOSS, "train/steps_to_target", "cost/seconds_to_target"),
            *(CURVATURE, AT_EQUAL_MARGINS, "hessian/test_trace_estimate", SECONDS, MEMORY),
        ),
        target_accuracy=TARGET_ACCURACY[size],
        hypotheses=(
            _claim("O1", accuracy, "difference", "muon", above=0.0),
            _claim("O3", accuracy, "difference", "sgd", below=-0.02),
            _claim("O4", CURVATURE, "ratio", "muon", below=1.0),
            _claim("O5", AT_EQUAL_MARGINS, "ratio", "muon", below=1.0),
        ),
    )


def with_control(optimizers: Sequence[str]) -> list[str]:
    """`optimizers` and the one that the hypotheses compare with, which is never left out."""
    return [*optimizers, *([OPTIMIZER_CONTROL] if OPTIMIZER_CONTROL not in optimizers else [])]


SHIPPED: dict[str, Callable[[Size], Experiment]] = {
    declare.__name__: declare for declare in (baseline, ablation, lora, sensitivity, optimizers)
}


def _experiment(name: str, size: Size, factors: dict[str, dict[str, Changes]], **declared: Any) -> Experiment:
    """An experiment with the recipe, seeds and budget of its size, about what this program can measure."""
    of_size = {"base": base(size), "seeds": SEEDS[size], "budget_minutes": BUDGET_MINUTES[size]}
    varied = [{"name": factor, "levels": levels} for factor, levels in factors.items()]
    # Without the capability that measures curvature the experiment asks what is left.
    declared["metrics"] = [metric for metric in declared["metrics"] if metric in CELL_METRICS]
    declared["hypotheses"] = [claim for claim in declared.get("hypotheses", ()) if claim.metric in CELL_METRICS]
    return Experiment.model_validate({"name": name, "size": size, "factors": varied, **of_size, **declared})


def _claim(
    name: str,
    metric: str,
    comparison: Literal["difference", "ratio", "level"],
    arm: str,
    versus: str | None = None,
    **side: float,
) -> Hypothesis:
    """One of `CLAIMS`; `side` is its direction with the threshold, as in above=0.03."""
    [(direction, threshold)] = side.items()
    compared = {"comparison": comparison, "arm": arm, "versus": versus, "direction": direction, "threshold": threshold}
    return Hypothesis.model_validate({"name": name, "claim": CLAIMS[name], "metric": metric} | compared)
