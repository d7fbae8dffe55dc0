"""The curvature of a loss for someone who never saw a Hessian: one section, in a run's report and as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html import glossary
from rmcore.reporting.html.cards import largest_eigenvalue, residual_of
from rmcore.reporting.html.curvature_rows import block_rows, enough, groups
from rmcore.reporting.html.page import write_page

TEMPLATE = "curvature.html.j2"
CAPTIONS = {
    "eigenvalues": "Curvature of the loss at the trained weights along its extreme directions.",
    "density": "All eigenvalues, each drawn as a bell: nearly all are close to zero, so the axis is logarithmic; "
    "bells at zero reach to both sides, but the share in the title counts the eigenvalues themselves.",
    "hessian_and_gauss_newton": "Two matrices that are often taken for one another, on common axes; their error bars "
    "are of different kinds, one of the computation and one over prompts.",
    "layers": "Where in the model the curvature is: a cell is one kind of tensor in one block, white means that the "
    "block has no such tensor.",
    "slices": "The loss measured again after moving the weights along straight lines, beside what slope and curvature "
    "at the trained weights predict.",
    "surface": "The loss over a plane through the trained weights; a picture of two directions out of very many.",
}
STEP = 0.1
"""Length of the step, in units of the parameters, by which the size of an eigenvalue is made plain."""


def write_curvature_page(
    record: Mapping[str, Any],
    figures: Mapping[str, Path],
    out: Path,
    *,
    title: str,
    facts: Sequence[tuple[str, str]],
) -> Path:
    """Write a self-contained page about one curvature record to `out`; returns `out`.

    Args:
        record: as the landscape stage writes it to `curvature.json`; each of its parts may be absent.
        figures: PNG files by name; those of CAPTIONS have their place, others follow at the end.
        out: HTML file to write; its folder is made.
        title: of the page.
        facts: (name, value) of what was measured: the checkpoint, the data.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    values = {"title": title, "facts": list(facts), "curvature": view(record), "words": glossary.CURVATURE_WORDS}
    return write_page(TEMPLATE, values, figures, CAPTIONS, out)


def view(record: Mapping[str, Any]) -> dict[str, Any]:
    """Gather the values that curvature_section.html.j2 prints, numbers as text."""
    slices = record.get("slices", {})
    return {
        "measured": _measured(record),
        "meaning": _meaning(record.get("spectrum")),
        "warnings": _warnings(record),
        "groups": groups(record),
        "blocks": block_rows(record),
        "blocks_have_ends": "layers" in record,
        "blocks_have_gauss_newton": bool(record.get("gauss_newton", {}).get("blocks")),
        "block_reasons": sorted(record.get("layers", {}).get("reasons", {}).items()),
        "enough": enough(record.get("noise", {})),
        "enough_words": _enough_words(record.get("noise")),
        "bf16": _bf16(record.get("noise", {})),
        "parts": [
            name
            for name, held in {
                "eigenvalues": "spectrum" in record,
                "hessian_and_gauss_newton": "spectrum" in record and "gauss_newton" in record,
                "density": "density" in record,
                "layers": "layers" in record,
                "slices": "lines" in slices,
                "surface": "surface" in slices,
            }.items()
            if held
        ],
    }


def _measured(record: Mapping[str, Any]) -> list[str]:
    """List what was measured, on how many pairs, and whether it converged."""
    spectrum = record.get("spectrum")
    if spectrum is None:
        return ["The ends of the spectrum were not measured."]
    prompts = _first(record, "num_prompts", ("gauss_newton", "noise"))
    of_prompts = "" if prompts is None else f" of {_counted(prompts, 'prompt')}"
    parameters = "" if spectrum["parameters"] == "all" else f" ({spectrum['parameters']} only)"
    text = (
        f"This is how the mean loss of {_counted(spectrum['num_pairs'], 'pair')}{of_prompts} bends when the "
        f"{numbers.count(spectrum['num_parameters'])} trained parameters{parameters} are moved a little."
    )
    return [text, _converged(spectrum), *(f"{sentence}." for sentence in record.get("left_out", []))]


def _converged(spectrum: Mapping[str, Any]) -> str:
    if spectrum["method"] == "full":
        return "The whole matrix was computed, so its eigenvalues are exact up to rounding."
    products = numbers.count(spectrum["num_products"])
    if spectrum["converged"]:
        return f"The computation converged: after {products} products the extremes are known to about 1 %."
    return (
        f"The computation did not converge: after {products} products an extreme is not yet known to 1 %. Read every "
        "number with its error, or measure again with more steps."
    )


def _meaning(spectrum: Mapping[str, Any] | None) -> list[str]:
    """Explain the two ends of the spectrum as steps of the weights, not as numbers of a matrix."""
    if spectrum is None:
        return []
    found = []
    largest, smallest = largest_eigenvalue(spectrum), numbers.finite(spectrum.get("lambda_min"))
    if largest is not None and largest > 0:
        rise = numbers.decimal(0.5 * STEP**2 * largest)
        found.append(
            f"λmax is {numbers.decimal(largest)}: a step of length {STEP} along the sharpest direction raises the loss "
            f"by about {rise} nats more than the slope alone (half of λmax times the squared length)."
        )
    if smallest is not None and smallest + (residual_of(spectrum, smallest) or 0.0) < 0:
        found.append(
            f"λmin is {numbers.decimal(smallest)}, so there is a direction along which the loss bends down: the model "
            "is not at a minimum. That is usual and no fault."
        )
    return found


def _warnings(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(What is often believed, what is so), as far as the record gives occasion."""
    if "spectrum" not in record:
        return []
    scale = (
        "λmax falls merely because margins grow, as they do while a model trains: a pair that is judged surely hardly "
        "bends the loss."
    )
    normalized = numbers.finite(record.get("normalized", {}).get("lambda_max"))
    if normalized is not None:
        scale += f" To compare models, take λmax at margins of size 1, here {numbers.decimal(normalized)}."
    else:
        scale += " Compare only models whose margins are of one size."
    found = [("Sharpness alone says nothing about how good the model is.", scale)]
    if "gauss_newton" in record:
        curved, largest = record["gauss_newton"]["lambda_max"], largest_eigenvalue(record["spectrum"])
        text = (
            f"λmax is {numbers.decimal(curved)} for the Gauss–Newton matrix and {numbers.decimal(largest)} for the "
            "Hessian. The former is never negative and leaves out how the model itself bends."
        )
        found.append(("The Gauss–Newton matrix is not the Hessian.", text))
    errors = (
        "It says how exactly the number was computed for these very pairs. How much other prompts would change it "
        "stands in the last column; where that is empty it was not measured, which does not mean that it is small."
    )
    return [*found, ("A small error of the computation is not a small error over pairs.", errors)]


def _enough_words(noise: Mapping[str, Any] | None) -> str:
    if noise is None:
        return ""
    pairs, prompts = _counted(noise["num_pairs"], "pair"), _counted(noise["num_prompts"], "prompt")
    return (
        f"The same quantities in groups of whole prompts show how much they vary; here are {pairs} of {prompts}. "
        "The error falls with the root of the number of pairs, if the new pairs bring new prompts."
    )


def _bf16(noise: Mapping[str, Any]) -> str:
    """Describe how bf16 would have changed the numbers."""
    found = noise.get("bf16")
    if found is None:
        return ""
    text = (
        f"In bf16 instead of float32 a product along the sharpest direction is off by "
        f"{numbers.percent(found['relative_error'])} of its length"
    )
    value = numbers.finite(noise.get("lambda_max", {}).get("value"))
    if value is None:
        return f"{text}, and λmax comes out as {numbers.decimal(found['lambda_max'])}."
    return f"{text}, and λmax comes out as {numbers.decimal(found['lambda_max'])} instead of {numbers.decimal(value)}."


def _first(record: Mapping[str, Any], name: str, parts: Sequence[str]) -> int | None:
    return next((record[part][name] for part in parts if name in record.get(part, {})), None)


def _counted(number: int, word: str) -> str:
    return f"{numbers.count(number)} {word}" + ("" if number == 1 else "s")
