"""A measured number in the form in which the Hugging Face hub lists results."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

ROUNDED = "Measured with weights in bfloat16, the reward head in float32; rewards differ a little from the file's."


def hub_result(task: str, dataset: tuple[str, str], metric_name: str, metric: Mapping[str, Any]) -> "EvalResult":
    """A number with its interval in the hub's own form; `dataset` is the type that the hub groups by, and the name."""
    from huggingface_hub import EvalResult

    ends = {end: round(float(metric[end]), 4) for end in ("ci_low", "ci_high") if metric[end] is not None}
    return EvalResult(
        task_type="text-classification",
        task_name=task,
        dataset_type=dataset[0],
        dataset_name=dataset[1],
        metric_type="accuracy",
        metric_name=metric_name,
        metric_value=round(float(metric["value"]), 4),
        metric_args={**ends, **({"level": 0.95} if ends else {}), "n": int(metric["num"])},
    )
