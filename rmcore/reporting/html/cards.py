"""The few numbers that a reader sees first: what they are, in one place for the HTML page and the Markdown summary."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rmcore.core.metrics import METRICS, metric_spec
from rmcore.reporting.figures import numbers
from rmcore.reporting.schema import Results

HEADLINE_METRICS = ("pairwise_accuracy", "accuracy_over_baseline", "length_matched_accuracy", "ece_debiased")


class Card(NamedTuple):
    """One headline number, ready to print."""

    label: str
    value: str
    interval: str
    """Its 95 % interval, or what stands in its place."""
    definition: str


def headline_cards(results: Results) -> list[Card]:
    """A policy's gold gain, held-out accuracy, over length, and length-matched; debiased ECE, λmax."""
    cards = [_metric_card(name, results["metrics"].get(name)) for name in HEADLINE_METRICS]
    gain = [] if results["policy"] is None else [_gain_card(results["policy"]["readiness"]["readiness"])]
    return [*gain, *cards, _curvature_card(results["spectrum"])]


def metric_texts(name: str, metric: Mapping[str, Any] | None) -> tuple[str, str, bool]:
    """The value, the interval or why there is none, and whether there is one."""
    if metric is None:
        return numbers.MISSING, "not measured", False
    value, interval = numbers.estimate(name, metric, metric_spec(name).unit)
    return value, interval or str(metric.get("reason") or "no interval"), bool(interval)


def _metric_card(name: str, metric: Mapping[str, Any] | None) -> Card:
    spec = metric_spec(name)
    value, interval, has_interval = metric_texts(name, metric)
    return Card(spec.label, value, f"95 %: {interval}" if has_interval else interval, spec.definition)


def _curvature_card(spectrum: Mapping[str, Any] | None) -> Card:
    """λmax has an error bound, not an interval of a sample."""
    spec = METRICS["lambda_max"]
    if spectrum is None:
        return Card(spec.label, numbers.MISSING, "not measured", spec.definition)
    value = largest_eigenvalue(spectrum)
    if value is None:
        return Card(
            spec.label, numbers.MISSING, spectrum.get("reasons", {}).get("lambda_max", "not measured"), spec.definition
        )
    residual = residual_of(spectrum, value)
    bound = "error bound unknown" if residual is None else f"± {numbers.decimal(residual)} (residual)"
    return Card(spec.label, numbers.decimal(value), bound, spec.definition)


def largest_eigenvalue(spectrum: Mapping[str, Any]) -> float | None:
    """λmax of the record, else the largest of its eigenvalues; None where there is none."""
    given = numbers.finite(spectrum.get("lambda_max"))
    if given is not None or "lambda_max" in spectrum:
        return given
    return max(map(float, spectrum["eigenvalues"]), default=None)


def residual_of(spectrum: Mapping[str, Any], eigenvalue: float | None) -> float | None:
    """The error bound of one of the computed eigenvalues; None where it is unknown."""
    values, residuals = list(spectrum["eigenvalues"]), spectrum.get("residuals") or []
    return numbers.finite(residuals[values.index(eigenvalue)]) if eigenvalue in values and residuals else None


def _gain_card(judged: Mapping[str, Any]) -> Card:
    """Make the card of the gold reward that the policy would gain under the plan."""
    kl, gain = judged["plan"]["kl"], judged["parts"].get("planned_gain")
    value, interval, has_interval = metric_texts("planned_gain", gain)
    return Card(
        f"gold gain at {kl:g} nats",
        value,
        f"95 %: {interval}" if has_interval else interval,
        "what the judge makes of samples chosen by the reward model, in standard deviations within prompts",
    )
