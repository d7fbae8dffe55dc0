"""The curvature of a loss in a run's report and on the terminal: each number with its errors, and what it says not.

A reader must not take one error for the other: how well a number is known for these very pairs (a residual, a standard
error over probes) and how much it would vary with other prompts.
"""

from collections.abc import Mapping
from typing import Any

from rmcore.core.metrics import METRICS
from rmcore.reporting.figures import numbers
from rmcore.reporting.html import glossary
from rmcore.reporting.html.blocks import Block, Table

CAPTIONS = {"eigenvalues": "Curvature of the loss at the trained weights along its extreme directions."}
SHARPNESS = (
    "Sharpness alone says nothing about how good the model is, and decides nothing here: λmax falls merely because "
    "margins grow, as they do while a model trains. Compare models by λmax at margins of size 1 "
    "(landscape.normalized=true)."
)
ERRORS = (
    "Curvature is in nats per squared unit of the parameters. A residual bound is certain: a true eigenvalue of these "
    "pairs is within it. A standard error is not: the true value is within two of them about 95 times in 100, and less "
    "often where few probes or prompts went into it."
)
TITLE = "Curvature of the loss"
COLUMNS = ("quantity", "value", "standard error over prompts", "error of the computation, for these pairs")


def curvature_block(spectrum: Mapping[str, Any], title: str = TITLE) -> Block:
    """The curvature of the loss."""
    return Block(
        title,
        text=(" ".join([*_sentences(spectrum), SHARPNESS]), ERRORS),
        figures=("eigenvalues",),
        tables=(Table(COLUMNS, rows(spectrum), left=range(len(COLUMNS))),),
    )


def _sentences(spectrum: Mapping[str, Any]) -> list[str]:
    """Say what was measured, on how many pairs, and whether it converged."""
    over = "" if spectrum["parameters"] == "all" else f" ({spectrum['parameters']} only)"
    products = numbers.count(spectrum["num_products"])
    found = [
        f"This is how the mean loss of {numbers.count(spectrum['num_pairs'])} pairs bends when the "
        f"{numbers.count(spectrum['num_parameters'])} trained parameters{over} are moved a little."
    ]
    if spectrum["method"] == "full":
        return [*found, "The whole matrix was computed, so its eigenvalues are exact up to rounding."]
    if spectrum["converged"]:
        return [*found, f"The computation converged: after {products} products the extremes are known to about 1 %."]
    return [
        *found,
        f"The computation did not converge: after {products} products an extreme is not yet known to 1 %. Read every "
        "number with its error, or measure again with more landscape.lanczos_steps.",
    ]


def rows(spectrum: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The quantities of a spectrum record, under COLUMNS: those that were measured, or that say why they were not."""
    scaled = spectrum.get("normalized", {})
    record = {**spectrum, "lambda_max_normalized": scaled.get("lambda_max")}
    reasons = {**spectrum["reasons"], "lambda_max_normalized": scaled.get("reasons", {}).get("lambda_max", "")}
    residuals = dict(zip(spectrum["eigenvalues"], spectrum["residuals"], strict=True))
    errors = {
        "lambda_max": _error(residuals.get(spectrum["lambda_max"]), "residual bound"),
        "lambda_min": _error(residuals.get(spectrum["lambda_min"]), "residual bound"),
        "lambda_max_normalized": _error(scaled.get("residual"), "residual bound"),
        "trace_estimate": _error(spectrum["trace_standard_error"], "standard error over probes"),
    }
    over_prompts = spectrum.get("over_prompts", {})
    sampled = {"lambda_max": _error(over_prompts.get("standard_error"), "")}
    if reason := over_prompts.get("reasons", {}).get("standard_error"):
        sampled["lambda_max"] = f"undefined: {reason}"
    found = []
    for name in glossary.SPECTRUM:
        spec = METRICS[name]
        if numbers.finite(record[name]) is not None:
            value = numbers.text(record[name], spec.unit)
            found.append((spec.label, value, sampled.get(name, ""), errors.get(name, "")))
        elif reasons.get(name):
            found.append((spec.label, f"undefined: {reasons[name]}", "", ""))
    return found


def _error(error: float | None, kind: str) -> str:
    return "" if numbers.finite(error) is None else f"± {numbers.decimal(error)} {kind}".strip()
