"""The tables of a curvature record: every number with its errors, each kind of error in a column of its own.

A reader must not take one for the other: how well a number is known for these very pairs (a residual, a standard error
over probes) and how much it would vary with other prompts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rmcore.reporting.figures import numbers
from rmcore.reporting.html import glossary
from rmcore.reporting.html.cards import largest_eigenvalue, residual_of

_ENOUGH = 0.1  # relative standard error of `pairs_for_10_percent`
_SURE = 2.0  # standard errors from zero at which a sign is believed
_UNMEASURED = "not measured"
_EXACT = ("exact", "up to rounding")
_NOTHING = ("", "")


class Row(NamedTuple):
    """One quantity: (value, reason why it is missing), and as (error, its kind) what is known of its errors."""

    label: str
    definition: str
    value: tuple[str, str]
    computed: tuple[str, str]
    sampled: tuple[str, str]


class Group(NamedTuple):
    """Quantities of one matrix or one loss."""

    title: str
    basis: str
    rows: list[Row]


class Enough(NamedTuple):
    """Whether the pairs sufficed for one quantity."""

    label: str
    value: str
    error: str
    relative: str
    pairs: str


class Block(NamedTuple):
    """One part of the model."""

    name: str
    num_parameters: str
    trace: str
    mean: str
    lambda_max: str
    lambda_min: str
    gauss_newton: str


def groups(record: Mapping[str, Any]) -> list[Group]:
    """The quantities of all parts that were measured."""
    found = []
    if "spectrum" in record:
        found.append(_spectrum(record["spectrum"], record.get("noise") or {}))
    if "normalized" in record:
        found.append(_normalized(record["normalized"]))
    if "gauss_newton" in record:
        found.append(_gauss_newton(record["gauss_newton"]))
    if "density" in record:
        found.append(_density(record["density"]))
    if "sam" in record.get("slices", {}):
        found.append(_sam(record["slices"]["sam"]))
    return found


def _spectrum(spectrum: Mapping[str, Any], noise: Mapping[str, Any]) -> Group:
    ends = {"lambda_max": largest_eigenvalue(spectrum), "lambda_min": numbers.finite(spectrum.get("lambda_min"))}
    record = {**spectrum, **ends}
    same_pairs = noise.get("num_pairs") == spectrum["num_pairs"]
    computed = {name: _residual(residual_of(spectrum, value)) for name, value in ends.items()}
    computed["trace_estimate"] = _over_probes(spectrum.get("trace_standard_error"))
    if spectrum["method"] == "full":
        computed["trace_estimate"] = _EXACT
    rows = []
    for name, term in glossary.SPECTRUM.items():
        if name in record:
            of_noise = noise.get(name.removesuffix("_estimate")) if same_pairs else None
            errors = (computed.get(name, _NOTHING), _over_prompts(of_noise))
            rows.append(_row(record, name, term, *errors))
    products = numbers.count(spectrum["num_products"])
    return Group("Hessian of the loss", f"{_pairs(spectrum)}, {spectrum['method']}, {products} products", rows)


def _normalized(record: Mapping[str, Any]) -> Group:
    computed = {
        "temperature": _EXACT,
        "lambda_max": _residual(record.get("lambda_max_residual")),
        "lambda_min": _residual(record.get("lambda_min_residual")),
        "trace": _over_probes(record.get("trace_standard_error")),
    }
    known = {*record, *(record.get("reasons") or {})}
    terms = {name: term for name, term in glossary.NORMALIZED.items() if name in known}
    rows = [_row(record, name, term, computed[name], _NOTHING) for name, term in terms.items()]
    return Group("Hessian at margins of size 1", "every margin divided by their root mean square", rows)


def _gauss_newton(record: Mapping[str, Any]) -> Group:
    rows = [_row(record, name, term, _EXACT, _jackknife(record, name)) for name, term in glossary.GAUSS_NEWTON.items()]
    return Group("Gauss–Newton matrix", f"{_pairs(record)}, all eigenvalues from the gradients of the margins", rows)


def _density(record: Mapping[str, Any]) -> Group:
    rows = [
        _row(record, name, term, _over_probes(record.get(f"{name}_standard_error"), term.unit), _NOTHING)
        for name, term in glossary.DENSITY.items()
    ]
    probes, steps = numbers.count(record["num_vectors"]), numbers.count(record["num_steps"])
    return Group("All eigenvalues of the Hessian", f"{probes} probes of {steps} Lanczos steps", rows)


def _sam(record: Mapping[str, Any]) -> Group:
    rows = [_row(record, name, term, _EXACT, _NOTHING) for name, term in glossary.SAM.items()]
    return Group("A step up the gradient", f"of length {numbers.decimal(record['radius'])}", rows)


def _row(
    record: Mapping[str, Any], name: str, term: glossary.Term, computed: tuple[str, str], sampled: tuple[str, str]
) -> Row:
    if numbers.finite(record.get(name)) is None:
        reason = (record.get("reasons") or {}).get(name, "")
        return Row(term.label, term.definition, ("undefined" if reason else _UNMEASURED, reason), _NOTHING, _NOTHING)
    return Row(term.label, term.definition, (numbers.text(record[name], term.unit), ""), computed, sampled)


def _residual(residual: float | None) -> tuple[str, str]:
    return _NOTHING if numbers.finite(residual) is None else (f"± {numbers.decimal(residual)}", "residual bound")


def _over_probes(error: float | None, unit: str = "") -> tuple[str, str]:
    if numbers.finite(error) is None:
        return _NOTHING
    return f"± {numbers.text(error, unit)}", "standard error over probes"


def _over_prompts(item: Mapping[str, Any] | None) -> tuple[str, str]:
    if item is None or numbers.finite(item.get("standard_error")) is None:
        return _NOTHING
    return f"± {numbers.decimal(item['standard_error'])}", "standard error over prompts"


def _jackknife(record: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Standard error and 95 % interval over prompts, or why there is none."""
    error = numbers.finite(record.get(f"{name}_standard_error"))
    if error is None:
        reasons = record.get("reasons") or {}
        held = (reasons[key] for key in (f"{name}_standard_error", f"{name}_ci_low") if key in reasons)
        return _UNMEASURED, next(held, "")
    bounds = numbers.interval({end: record.get(f"{name}_{end}") for end in ("ci_low", "ci_high")})
    return f"± {numbers.decimal(error)}", "standard error over prompts" + (f"; 95 %: {bounds}" if bounds else "")


def enough(noise: Mapping[str, Any]) -> list[Enough]:
    """For each quantity its error over prompts, and how many pairs an error of 10 % takes."""
    rows = []
    for name, term in glossary.NOISE.items():
        item = noise.get(name)
        if item is None:
            reason = (noise.get("reasons") or {}).get(name)
            if reason:
                rows.append(Enough(term.label, f"undefined: {reason}", "", "", ""))
            continue
        rows.append(_enough(term.label, item))
    return rows


def _enough(label: str, item: Mapping[str, Any]) -> Enough:
    value, error = numbers.finite(item["value"]), numbers.finite(item["standard_error"])
    relative = abs(error / value) if value and error is not None else None
    wanted = numbers.finite(item.get("pairs_for_10_percent"))
    pairs = numbers.MISSING if wanted is None else f"about {numbers.count(max(wanted, 1))}"
    if relative is not None and relative <= _ENOUGH:
        pairs = f"enough ({pairs})"
    elif relative is not None and relative > 1 / _SURE:
        pairs = "its sign is not sure"  # a number of pairs that follows from such a value means nothing
    error_text = numbers.MISSING if error is None else f"± {numbers.decimal(error)}"
    return Enough(label, numbers.decimal(value), error_text, numbers.percent(relative), pairs)


def block_rows(record: Mapping[str, Any]) -> list[Block]:
    """Every block of the layers part, with what the Gauss-Newton part knows of it; or the latter's blocks alone."""
    curved = record.get("gauss_newton", {}).get("blocks") or {}
    alone = [{"name": name, "num_parameters": held["num_parameters"]} for name, held in curved.items()]
    return [_block(block, curved) for block in record.get("layers", {}).get("blocks") or alone]


def _block(block: Mapping[str, Any], curved: Mapping[str, Any]) -> Block:
    trace = numbers.finite(block.get("trace"))
    error = numbers.finite(block.get("trace_standard_error"))
    mean = None if trace is None else trace / block["num_parameters"]
    return Block(
        name=block["name"],
        num_parameters=numbers.count(block["num_parameters"]),
        trace=_with_error(trace, error),
        mean=numbers.decimal(mean),
        lambda_max=_with_error(block.get("lambda_max"), block.get("lambda_max_residual")),
        lambda_min=_with_error(block.get("lambda_min"), block.get("lambda_min_residual")),
        gauss_newton=numbers.decimal(curved.get(block["name"], {}).get("lambda_max")),
    )


def _with_error(value: float | None, error: float | None) -> str:
    if numbers.finite(value) is None:
        return numbers.MISSING
    return numbers.decimal(value) + ("" if numbers.finite(error) is None else f" ± {numbers.decimal(error)}")


def _pairs(record: Mapping[str, Any]) -> str:
    return f"{numbers.count(record['num_pairs'])} pairs"
