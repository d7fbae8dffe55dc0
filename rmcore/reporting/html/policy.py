"""Findings on a policy's samples, as people read them: in the report, in a terminal, in Prefect's artifacts."""

from collections.abc import Mapping
from typing import Any

from rmcore.core.metrics import METRICS
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.overoptimization import NAMES, finding
from rmcore.reporting.html.blocks import Block, Table
from rmcore.reporting.verdict_style import check_result

CAPTIONS = {
    "overoptimization": "Further right, the reward model selects harder among the samples. The proxy rises by "
    "construction; where the true reward no longer follows, optimising further does harm."
}
PARTS = {
    **{name: METRICS[name].definition for name in ("on_policy_accuracy", "hard_accuracy")},
    "win_rate_4": "how often the best of 4 beats another sample",
    "win_rate_16": "how often the best of 16 beats another sample",
    "win_rate_64": "how often the best of 64 beats another sample",
    "planned_gain": "gain of the true reward at the planned KL (sd within prompts)",
    "gain_without_length": "that gain with length taken out of the judge's scores (their sd)",
    "gain_of_longest": "gain of choosing by length at the planned KL",
    "planned_fall": "gain at the planned KL minus the highest before it",
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


def policy_block(results: Mapping[str, Any]) -> Block:
    """The report's section on a policy's samples: proxy against the true reward, best-of-n, the parts of readiness v2.

    Args:
        results: {"sampling", "overoptimization", "readiness"}: records of the stages samples, overoptimization and
            readiness_v2.
    """
    judged = results["readiness"]["readiness"]
    plan = judged["plan"]
    worst = _worst_prompts(results)
    return Block(
        "On the policy's own samples: readiness v2",
        text=(
            "Whether a policy may be optimised against this reward model is decided on the policy's samples, not on "
            f"labelled pairs alone. The plan is {numbers.decimal(plan['kl'])} nats by {NAMES[plan['optimizer']]}; the "
            f"true reward is that of {judged['judge']}. Gains are in standard deviations of the true reward within "
            "prompts, intervals are 95 % over prompts.",
        ),
        figures=("overoptimization",),
        parts=[
            best_of_n_block(results),
            Block("The parts of readiness v2", tables=(_parts(results["readiness"]),)),
            *([Block("The prompts where the plan gains least", tables=(worst,))] if worst.rows else []),
        ],
    )


def best_of_n_block(results: Mapping[str, Any]) -> Block:
    """n, KL, reward and, where it is known, the gold gain, one row an n; what follows from it."""
    headings = ("n", "KL, nats", "log n - (n-1)/n", "reward", "gain of the true reward (sd within prompts)")
    table = Table(headings, _best_of_n(results), left=())
    return Block("Best-of-n", tables=(table,), findings=_findings(results))


def best_of_n_headline(results: Mapping[str, Any]) -> str:
    """Say what choosing the best of the most samples by this reward model comes to, in one sentence."""
    *_, (n, kl, _, reward, gold) = _best_of_n(results)
    judged = "not judged" if gold == "-" else f"gain of the true reward {gold} sd within prompts"
    return f"Best of {n}, {kl} nats from the policy: reward {reward}, {judged}"


def readiness_block(results: Mapping[str, Any]) -> Block:
    """Verdict, parts and checks of readiness v2."""
    checks = [f"{check_result(check)}: {check['text']}" for check in results["gate"]]
    return Block(results["verdict"]["headline"], tables=(_parts(results),), findings=checks)


def confirmation_block(results: Mapping[str, Any]) -> Block:
    """The gain by serving best-of-n, with the first prompts and those that lose most."""
    verdict = results["verdict"]
    headings = ("prompt", f"best of {results['n']}", "another one", f"judged, {results['unit']}")

    def examples(title: str, name: str) -> Block:
        rows = [
            (one["prompt"], *(one[side] or EMPTY for side in ("chosen", "other")), f"{one['difference']:+.2f}")
            for one in results[name]
        ]
        return Block(title, tables=(Table(headings, rows, left=range(3)),))

    return Block(
        verdict["headline"],
        tables=(Table(("of the chosen response", "value, 95 % whenever one stops"), _confirmed(results), range(2)),),
        findings=verdict["reasons"],
        parts=[examples("The first prompts", "examples"), examples("The prompts that lose most", "worst")],
    )


def curves_block(found: Mapping[str, Any]) -> Block:
    """The curves of each proxy: what they show, and their points; the best one has a star."""
    parts = []
    for name, curves in found["proxies"].items():
        for curve in curves:
            setting = "n" if curve["method"] == "best_of_n" else "1 / β"
            headings = (setting, "KL, nats", "proxy gain, sd", "gain of the true reward, sd (95 %)")
            rows = [
                (
                    f"{point['setting']:.4g}",
                    f"{point['kl']:.3f}",
                    numbers.decimal(point["proxy"]["value"]),
                    shown(point["gold"]) + " *" * (place == curve["best"]),
                )
                for place, point in enumerate(curve["points"])
            ]
            title = f"{name}, {NAMES[curve['method']]}: {finding(curve)}"
            parts.append(Block(title, tables=(Table(headings, rows, left=()),)))
    about = "Gains are in standard deviations within prompts."
    return Block(f"Over-optimisation against {found['gold']}", text=(about,), parts=parts)


EMPTY = "(an empty answer)"


def _best_of_n(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
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


def _findings(results: Mapping[str, Any]) -> list[str]:
    """Sentences below the table."""
    sampling, found = results["sampling"], results["overoptimization"]
    lines = [
        f"{sampling['num_samples']} samples of {sampling['num_prompts']} prompts by {sampling['engine'] or 'a file'}; "
        f"{sampling['finished_share']:.1%} ended by themselves, {sampling['num_empty']} are empty, {found['num_cut']} "
        "exceeded the reward model's length limit"
    ]
    lines += [f"{NAMES[curve['method']]}: {finding(curve)}" for curve in found.get("curves", [])]
    for plan in (curve["plan"] for curve in found.get("curves", [])[:1] if curve["plan"] is not None):
        lines.append(
            f"intervals of the gain of the true reward are over {plan['num_telling']} independent prompts that the "
            "judge tells apart, and assume that an unseen prompt loses at most as much as the worst judged sample, "
            f"{plan['worst']:.1f} sd"
        )
        if plan["num_short"]:
            lines.append(f"{plan['num_short']} prompts have fewer samples than the plan needs and are left out of it")
    return [*lines, *found.get("left_out", [])]


def _parts(results: Mapping[str, Any]) -> Table:
    """The parts of readiness v2 in reading order."""
    parts = results["readiness"]["parts"]
    others = (name for name in parts if name.startswith("win_rate_") and name not in PARTS)
    fewer = {name: f"how often the best of {name.removeprefix('win_rate_')} beats another sample" for name in others}
    rows = [(meaning, shown(parts[name])) for name, meaning in (PARTS | fewer).items() if name in parts]
    return Table(("part", "value, 95 %"), rows, left=range(2))


def _worst_prompts(results: Mapping[str, Any]) -> Table:
    """The prompts where the plan gains least, worst first; no rows where there is no judge."""
    optimizer = results["readiness"]["readiness"]["plan"]["optimizer"]
    worst = results["overoptimization"].get("worst_prompts", {}).get(optimizer, [])
    rows = [(row["prompt"], f"{row['gain']:+.2f}", row["response"] or EMPTY) for row in worst]
    headings = ("prompt", "gain of the true reward at the plan, sd", "the sample that the reward model likes best")
    return Table(headings, rows, left=(0, 2))


def _of_measured_unit(results: Mapping[str, Any], error: float) -> list[tuple[str, str]]:
    clipped = f"the same of differences as they are ({results['clipped_share']:.1%} of them are clipped above)"
    return [
        ("the unit itself, which is measured, ± standard error", f"1 ± {error:.0%}"),
        (clipped, shown(results["gold"]["unclipped_gain"])),
    ]


def _confirmed(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Give the outcome of serving best-of-n, in reading order."""
    length, labels = results["characters"], f"{results['num_labels']:,}"
    error = results["unit_error"]
    ended = "decided" if results["is_decided"] else "not decided"
    return [
        (f"gain over a sample, {results['unit']}", shown(results["gold"]["gain"])),
        *(_of_measured_unit(results, error) if error is not None else []),
        ("win rate over a sample", shown(results["gold"]["win_rate"])),
        ("gain of the reward that chose it, sd", shown(results["proxy"]["gain"])),
        ("length in characters, and of a sample", f"{length['chosen']:.0f}, {length['other']:.0f}"),
        ("KL from the policy, nats, at most", f"{results['kl']:.2f}"),
        ("labels", f"{labels} ({results['num_prompts']} of {results['num_allowed']} prompts; {ended})"),
    ]
