"""The metrics that a cell of an experiment can report, by the names that MLflow and the report show.

An experiment names the ones it wants; the stages that its cells run follow from them.
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "seconds", "pairs/s", "MiB", "steps", "nats", ""]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """What a metric is and which stage gives it."""

    label: str
    unit: Unit
    higher_is_better: bool | None
    """None: neither."""
    stage: Literal["train", "evaluate", "landscape"]
    over_prompts: bool = False
    """Computed from held-out pairs, so its error over prompts is known beside its spread over seeds."""
    needs_target: bool = False
    """Defined only where the experiment declares a `target_accuracy`."""


CATALOGUE: dict[str, MetricSpec] = {
    "eval/test_pairwise_accuracy": MetricSpec("held-out pairwise accuracy", "share", True, "evaluate", True),
    "eval/test_length_matched_accuracy": MetricSpec(
        "accuracy on pairs of about equal length", "share", True, "evaluate", True
    ),
    "eval/test_negative_margin_rate": MetricSpec("share of negative margins", "share", False, "evaluate", True),
    "eval/test_mean_margin": MetricSpec("mean held-out margin", "", None, "evaluate", True),
    "eval/test_loss": MetricSpec("held-out loss", "nats", False, "evaluate", True),
    "eval/train_test_gap": MetricSpec("train accuracy minus held-out accuracy", "share", False, "evaluate", True),
    "calib/test_ece_debiased": MetricSpec("calibration error (ECE), debiased", "", False, "evaluate", True),
    "calib/test_brier": MetricSpec("Brier score", "", False, "evaluate", True),
    "train/num_steps": MetricSpec("steps until training stopped", "steps", None, "train"),
    "train/stop_share": MetricSpec("share of the planned steps that were run", "share", None, "train"),
    "train/best_step": MetricSpec("step of the kept checkpoint", "steps", None, "train"),
    "train/steps_to_target": MetricSpec("steps to the target accuracy", "steps", False, "train", needs_target=True),
    "cost/seconds_to_target": MetricSpec(
        "training time to the target accuracy", "seconds", False, "train", needs_target=True
    ),
    "cost/train_seconds": MetricSpec("training time", "seconds", False, "train"),
    "cost/train_pairs_per_second": MetricSpec("training throughput", "pairs/s", True, "train"),
    "cost/peak_training_mib": MetricSpec("peak memory of training above the weights", "MiB", False, "train"),
    "hessian/test_lambda_max": MetricSpec("largest Hessian eigenvalue", "", None, "landscape"),
    "hessian/test_lambda_min": MetricSpec("smallest Hessian eigenvalue", "", None, "landscape"),
    "hessian/test_lambda_max_normalized": MetricSpec(
        "largest Hessian eigenvalue at margins of size 1", "", None, "landscape"
    ),
    "hessian/test_trace_estimate": MetricSpec("Hessian trace", "", None, "landscape"),
}
