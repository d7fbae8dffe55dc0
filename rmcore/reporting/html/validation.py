"""Findings of the study of readiness, as people read them: in a terminal and in Prefect's artifacts."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures.overoptimization import NAMES
from rmcore.reporting.figures.policy import SCORES
from rmcore.reporting.html.markdown import bullets, text_table
from rmcore.reporting.html.policy import shown

CLAIM_HEADINGS = ("claim", "difference of rho", "by world", "own heads", "p after Holm", "verdict")
VALIDATION_HEADINGS = ("score", "rho with best-of-n gain", "rho with KL-optimum gain", "minus on-policy accuracy's")
OPERATING_HEADINGS = (
    "gate",
    "called ready",
    "of them worth while",
    "of them gained nothing",
    "worth while, refused",
    "cost",
)
OPERATING_WAYS = {
    "by_end": "Operating points of the gates, as they ask: by the end of the interval",
    "by_value": "The same by the value alone",
}
FITS = {
    "v2": "composed",
    "win_rate_fit": "best-of-16 win rate",
    "accuracy_fit": "on-policy accuracy",
    "shipped": "the shipped fit",
}


def claim_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Each claim with its difference, pooled and by world, and its verdict."""
    return [
        (
            f"{one['name']}: {one['text']}",
            shown(one),
            "; ".join(f"{world} {shown(value)}" for world, value in one["worlds"].items()),
            shown(one["own_heads"]),
            "-" if one["p_holm"] is None else f"{one['p_holm']:.3f}",
            one["verdict"] + (", replaces the shipped score" if one["replaces"] else ""),
        )
        for one in results["claims"]
    ]


def validation_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Each score's rank correlation with both gains, and how much it differs from on-policy accuracy."""
    return [
        (
            SCORES[name],
            *(shown(by_method[method]) for method in NAMES),
            shown(results["differences"][name]) if name in results["differences"] else "-",
        )
        for name, by_method in results["correlations"].items()
    ]


def operating_rows(results: Mapping[str, Any], way: str) -> list[tuple[str, ...]]:
    """Each gate's operating point, `way` one of `OPERATING_WAYS`."""
    rows = []
    for one in results["operating_points"]:
        gate = one["name"].replace("_", " ")
        if one["threshold"] is not None:
            end = f"{'lower' if one['end'] == 'low' else 'upper'} end " if way == "by_end" else ""
            gate += f": {end}at least {one['threshold']:g}"
        shares = (_share(one[way][name]) for name in ("ready_gained", "ready_lost", "gained_refused"))
        rows.append((gate, f"{one[way]['num_ready']} of {results['num_models']}", *shares, str(one[way]["cost"])))
    return rows


def findings(results: Mapping[str, Any]) -> list[str]:
    """Sentences: what there was, how calibrated the probabilities are, and what the signal share tells."""
    worlds = "; ".join(
        f"{one['name']}: {one['num_models']} reward models, {one['num_worthwhile']} gain at least "
        f"{results['min_gain']:g}, the gold reward of {one['num_turned']} turned"
        for one in results["worlds"]
    )
    lines = [f"{results['num_backbones']} backbones of {results['num_recipes']} recipes. {worlds}"]
    for name, found in results["calibration"].items():
        if found["brier"] is None:
            continue
        curve = ", ".join(f"{one['predicted']:.2f} said: {_share(one['gained'])}" for one in found["bins"])
        lines.append(
            f"probability by {FITS[name]}: Brier {shown(found['brier'])}, minus the plain share's "
            f"{shown(found['minus_share'])}; {curve}"
        )
    signal = results["signal_share"]
    if signal is not None:
        lines.append(
            f"signal share on {signal['num_models']} models of {signal['num_recipes']} recipes with two seeds: over "
            f"heads {signal['mean_heads']:.2f} on average, rho with the gain {shown(signal['heads'])}; over seeds "
            f"{signal['mean_seeds']:.2f}, rho {shown(signal['seeds'])}; difference {shown(signal['seeds_minus_heads'])}"
        )
    registration = results.get("registration")
    if registration is not None:
        lines.append(
            f"registration {registration['hash'][:12]} of {registration['frozen_at']}; claims "
            f"{results['claims_digest'][:12]}"
        )
    return lines


def validation_markdown(results: Mapping[str, Any]) -> str:
    """Claims, correlations, findings and operating points."""
    tables: tuple[tuple[str, tuple[str, ...], list[tuple[str, ...]], list[str]], ...] = (
        ("Readiness against the truth", CLAIM_HEADINGS, claim_rows(results), [results["verdict"]]),
        ("Every score", VALIDATION_HEADINGS, validation_rows(results), findings(results)),
        *((title, OPERATING_HEADINGS, operating_rows(results, way), []) for way, title in OPERATING_WAYS.items()),
    )
    return "\n".join(
        f"# {title}\n\n{text_table(headings, rows)}\n" + (f"\n{bullets(lines)}\n" if lines else "")
        for title, headings, rows, lines in tables
    )


def _share(value: Mapping[str, Any] | None) -> str:
    return "-" if value is None else shown(value)
