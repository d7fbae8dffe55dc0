"""Findings on a policy's samples, as people read them: in the report, in a terminal, in Prefect's artifacts."""

from collections.abc import Mapping
from typing import Any

from rmcore.core.metrics import METRICS
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.overoptimization import NAMES, finding
from rmcore.reporting.html.markdown import bullets, escape, text_table
from rmcore.reporting.verdict_style import check_result

CAPTIONS = {
    "overoptimization": "Further right the samples are chosen more sharply by the reward model. The proxy rises by "
    "construction; where the gold reward no longer follows, optimising further does harm.",
    "ensemble_disagreement": "Members are heads on one backbone, fitted on other draws of the training prompts: what "
    "all of them have learned wrong, such as a shortcut, they do not disagree about.",
}
PARTS = {
    **{name: METRICS[name].definition for name in ("on_policy_accuracy", "hard_accuracy")},
    "win_rate_4": "how often the best of 4 beats another sample",
    "win_rate_16": "how often the best of 16 beats another sample",
    "win_rate_64": "how often the best of 64 beats another sample",
    "skill_16": "the win rate of the best of 16 from 0 (blind) to 1 (perfect)",
    "planned_gain": "gold gain at the planned KL (sd within prompts)",
    "planned_fall": "that gain minus the highest before it",
    "headroom": "distance to the fitted peak of the gold reward over the planned one",
    "signal_share": "share of the variance that other training data repeat",
    "length_correlation": "correlation of reward and length, given the judge",
    "pairwise_accuracy": "accuracy on labelled pairs",
    "length_matched_accuracy": "the same where both sides are about as long",
    "ece_tempered_debiased": "calibration error after temperature",
    "lambda_max": "largest eigenvalue of the Hessian (weight zero)",
}


def shown(value: Mapping[str, Any]) -> str:
    """A number with its interval, or why there is none."""
    if value["value"] is None:
        return str(value.get("reason") or numbers.MISSING)
    return numbers.with_interval(value)


def best_of_n_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """n, KL, reward and, where it is known, the gold gain, one row an n."""
    found = results["overoptimization"]
    curve = next((one for one in found.get("curves", []) if one["method"] == "best_of_n"), None)
    gold = {} if curve is None else {int(point["setting"]): shown(point["gold"]) for point in curve["points"]}
    return [
        (
            str(row["n"]),
            f"{row['kl']:.3f}",
            f"{row['nominal_kl']:.3f}",
            f"{row['reward']:+.3f}",
            gold.get(row["n"], "-"),
        )
        for row in found["best_of_n"]
    ]


def section(results: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Gather the values that the report prints of the policy, numbers as text; None where there was none.

    Args:
        results: {"sampling", "overoptimization", "readiness"}: records of the stages samples,
            overoptimization and readiness_v2.
    """
    if results is None:
        return None
    judged = results["readiness"]["readiness"]
    return {
        "headings": BEST_OF_N_HEADINGS,
        "choices": best_of_n_rows(results),
        "findings": best_of_n_findings(results),
        "parts": readiness_rows(results["readiness"]),
        "judge": judged["judge"],
        "probability": "not known" if judged["probability"] is None else f"{judged['probability']:.2f}",
        "score_parts": ", ".join(judged["score_parts"]),
        "probability_of": "a gain of at least {gain:g} at {kl:g} nats".format(**judged["probability_of"]),
        "worst": worst_prompts_rows(results),
        "worst_headings": WORST_HEADINGS,
        "plan": f"{numbers.decimal(judged['plan']['kl'])} nats by {NAMES[judged['plan']['optimizer']]}",
    }


WORST_HEADINGS = ("prompt", "gold gain at the plan, sd", "the sample that the reward model likes best")


def worst_prompts_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The prompts where the plan gains least, worst first; empty where there is no judge."""
    optimizer = results["readiness"]["readiness"]["plan"]["optimizer"]
    worst = results["overoptimization"].get("worst_prompts", {}).get(optimizer, [])
    return [(row["prompt"], f"{row['gain']:+.2f}", row["response"] or EMPTY) for row in worst]


BEST_OF_N_HEADINGS = ("n", "KL, nats", "log n - (n-1)/n", "reward", "gold gain (sd within prompts)")


def best_of_n_findings(results: Mapping[str, Any]) -> list[str]:
    """Sentences below the table."""
    sampling, found = results["sampling"], results["overoptimization"]
    lines = [
        f"{sampling['num_samples']} samples of {sampling['num_prompts']} prompts by {sampling['engine'] or 'a file'}; "
        f"{sampling['finished_share']:.1%} ended by themselves, {sampling['num_empty']} are empty, {found['num_cut']} "
        "were longer than the reward model reads"
    ]
    lines += [f"{NAMES[curve['method']]}: {finding(curve)}" for curve in found.get("curves", [])]
    for plan in (curve["plan"] for curve in found.get("curves", [])[:1] if curve["plan"] is not None):
        lines.append(
            f"intervals of the gold gain are over {plan['num_telling']} independent prompts that the judge tells "
            "apart, and take a prompt that was not seen to lose at most as much as the worst judged sample, "
            f"{plan['worst']:.1f} sd"
        )
        if plan["num_short"]:
            lines.append(f"{plan['num_short']} prompts have fewer samples than the plan needs and are left out of it")
    return lines


def best_of_n_headline(results: Mapping[str, Any]) -> str:
    """Say what choosing the best of the most samples by this reward model comes to, in one sentence."""
    *_, (n, kl, _, reward, gold) = best_of_n_rows(results)
    judged = "nobody judged" if gold == "-" else f"gold gain {gold} sd within prompts"
    return f"Best of {n}, {kl} nats from the policy: reward {reward}, {judged}"


def best_of_n_markdown(results: Mapping[str, Any]) -> str:
    """The table and the findings."""
    return titled_table("Best-of-n", BEST_OF_N_HEADINGS, best_of_n_rows(results), best_of_n_findings(results))


def readiness_rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Give the name of each part of v2, in reading order, and its value."""
    parts = results["readiness"]["parts"]
    others = (name for name in parts if name.startswith("win_rate_") and name not in PARTS)
    fewer = {name: f"how often the best of {name.removeprefix('win_rate_')} beats another sample" for name in others}
    return [(meaning, shown(parts[name])) for name, meaning in (PARTS | fewer).items() if name in parts]


def readiness_markdown(results: Mapping[str, Any]) -> str:
    """Verdict, parts and checks."""
    checks = [f"{check_result(check)}: {check['text']}" for check in results["gate"]]
    return titled_table(results["verdict"]["headline"], ("part", "value, 95 %"), readiness_rows(results), checks)


EMPTY = "(an empty answer)"
CONFIRMATION_HEADINGS = ("of the chosen response", "value, 95 % whenever one stops")


def confirmation_rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Give the outcome of serving best-of-n, in reading order."""
    length, labels = results["characters"], f"{results['num_labels']:,}"
    error = results["unit_error"]
    ended = "decided" if results["is_decided"] else "not decided"
    return [
        (f"gain over a sample, {results['unit']}", shown(results["gold"]["gain"])),
        *([("the unit itself, which is measured, ± standard error", f"1 ± {error:.0%}")] if error is not None else []),
        *(
            [
                (
                    f"the same of differences as they are ({results['clipped_share']:.1%} of them are clipped above)",
                    shown(results["gold"]["unclipped_gain"]),
                )
            ]
            if error is not None
            else []
        ),
        ("win rate over a sample", shown(results["gold"]["win_rate"])),
        ("gain of the reward that chose it, sd", shown(results["proxy"]["gain"])),
        ("length in characters, and of a sample", f"{length['chosen']:.0f}, {length['other']:.0f}"),
        ("KL from the policy, nats, at most", f"{results['kl']:.2f}"),
        ("labels", f"{labels} ({results['num_prompts']} of {results['num_allowed']} prompts; {ended})"),
    ]


def confirmation_markdown(results: Mapping[str, Any]) -> str:
    """Verdict, what was measured, and the first prompts with both responses."""
    verdict = results["verdict"]
    measured = titled_table(verdict["headline"], CONFIRMATION_HEADINGS, confirmation_rows(results), verdict["reasons"])
    headings = ("prompt", f"best of {results['n']}", "another one", f"judged, {results['unit']}")

    def examples(name: str) -> str:
        rows = [
            (one["prompt"], *(one[side] or EMPTY for side in ("chosen", "other")), f"{one['difference']:+.2f}")
            for one in results[name]
        ]
        return text_table(headings, rows)

    return (
        f"{measured}\n# The first prompts\n\n{examples('examples')}\n\n# The prompts that lose most\n\n"
        f"{examples('worst')}\n"
    )


def curves_markdown(found: Mapping[str, Any]) -> str:
    """Describe the curves of each proxy."""
    lines = [
        f"{escape(name)}, {NAMES[curve['method']]}: {finding(curve)}"
        for name, curves in found["proxies"].items()
        for curve in curves
    ]
    return f"# Over-optimisation against {escape(found['gold'])}\n\n{bullets(lines)}\n"


def titled_table(title: str, headings: tuple[str, ...], rows: list[Any], lines: list[str]) -> str:
    """A title, a table and what follows from it."""
    return f"# {escape(title)}\n\n{text_table(headings, rows)}\n\n{bullets(lines)}\n"
