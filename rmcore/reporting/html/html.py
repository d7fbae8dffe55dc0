"""The report of a run: one HTML file that opens anywhere, without network, scripts or other files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rmcore.core.cost import money_text, price_per_hour
from rmcore.core.metrics import metric_order, metric_spec
from rmcore.reporting.figures import numbers
from rmcore.reporting.html import benchmarks, curvature, explained, glossary, judgements, logged, policy, probe, rlhf
from rmcore.reporting.html.cards import headline_cards, metric_texts, trained_on
from rmcore.reporting.html.page import date, gate_row, shorten, write_page
from rmcore.reporting.html.tree import blocks
from rmcore.reporting.schema import Results, StageResult
from rmcore.reporting.verdict_style import verdict_style

TEMPLATE = "report.html.j2"
CAPTIONS = {
    "accuracy_in_context": "The same held-out pairs judged by this model, by guessing, by always taking the longer "
    "completion, and (where the true reward is known) by a perfect model.",
    "training_curves": "Training pairs in blue, validation pairs in orange. A training line that leaves the validation "
    "line behind means overfitting.",
    "curvature_trajectory": "Curvature at each evaluation on the same few validation pairs. λmax falls merely because "
    "margins grow.",
    "reliability_diagram": "Pairs grouped by how sure the model is. On the dashed line “80 % sure” is right 80 % of "
    "the time; below it the model is too sure of itself, above it too modest.",
    "margin_histogram": "How far apart the model puts the two sides. Left of zero it prefers the rejected side.",
    "reward_by_length": "If reward follows length, a policy learns to write long instead of well.",
    **benchmarks.CAPTIONS,
    **curvature.CAPTIONS,
    **logged.CAPTIONS,
    **policy.CAPTIONS,
    **rlhf.CAPTIONS,
}


AUDIT_TITLES = {"num_rejected": "rows_set_aside", "rejected": "rows set aside, by reason"}
"""Keys of the audit whose own words would be misread: here rejected rows are not rejected sides."""


class MetricRow(NamedTuple):
    """One row of the table of all metrics."""

    name: str
    label: str
    definition: str
    value: str
    interval: str
    num: str
    ood_value: str
    ood_interval: str


def write_report(results: Results, figures: Mapping[str, Path], out: Path) -> Path:
    """Write the self-contained report of a run to `out`; returns `out`.

    Args:
        results: everything to show, see rmcore.reporting.schema.
        figures: PNG files by name; those of CAPTIONS have their place, others follow at the end, missing ones are
            mentioned.
        out: HTML file to write; its folder is made.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    return write_page(TEMPLATE, view(results), figures, CAPTIONS, out)


def view(results: Results) -> dict[str, Any]:
    """Gather the values that the template prints, numbers as text."""
    audit = {AUDIT_TITLES.get(key, key): value for key, value in results["audit"].items()}
    return {
        "results": results,
        "created": date(results["created"]),
        "verdict_style": verdict_style(results["verdict"]),
        "question": _question(results),
        "cards": headline_cards(results),
        "gate": [gate_row(check) for check in results["gate"]],
        "label_gate": [gate_row(check) for check in results["label_gate"]] if results["policy"] else [],
        "metrics": metric_rows(results),
        "has_ood": results["ood_metrics"] is not None,
        "training": _training_rows(results),
        "truncation": blocks({"texts cut to fit the model": results["training"]["truncation"]}, "texts cut"),
        "curvature": curvature.view(results["spectrum"]),
        "readiness_parts": _readiness_rows(results["readiness"]),
        "benchmarks": benchmarks.benchmarks_section(results["benchmarks"]),
        "logged": logged.logged_section(results["logged"]),
        "judgements": judgements.judgements_section(results["observations"]),
        "probe": probe.probe_section(results["probe"]),
        "explained": explained.explained_section(results["explained"]),
        "policy": policy.section(results["policy"]),
        "rlhf": rlhf.rlhf_section(results["rlhf"]),
        "readiness_weakness": glossary.READINESS_WEAKNESS,
        "audit": sorted(blocks(audit, "overview"), key=lambda block: not block.sentences),  # warnings first
        "mistakes": [_mistake(mistake) for mistake in results["mistakes"]],
        "device_time": _device_time(results["stages"]),
        "stages": [{**stage, "took": numbers.duration(stage["wall_seconds"])} for stage in results["stages"]],
        "config_yaml": yaml.safe_dump(dict(results["config"]), sort_keys=False, allow_unicode=True, width=100),
        "words": glossary.WORDS,
    }


def metric_rows(results: Results) -> list[MetricRow]:
    """All metrics of both splits in the order of the registry."""
    test, ood = results["metrics"], results["ood_metrics"] or {}
    rows = []
    for name in sorted({*test, *ood}, key=metric_order):
        spec = metric_spec(name)
        here, there = test.get(name), ood.get(name)
        value, interval, _ = metric_texts(name, here)
        ood_value, ood_interval, _ = metric_texts(name, there)
        rows.append(
            MetricRow(
                name=name,
                label=spec.label,
                definition=spec.definition,
                value=value,
                interval=interval,
                num=numbers.count(here["num"] if here else None),
                ood_value=ood_value,
                ood_interval=ood_interval,
            )
        )
    return rows


def _question(results: Results) -> str:
    """State in one sentence the question that the configuration asks."""
    config, training = results["config"], results["training"]
    model = config.get("model", {}).get("name", "the model")
    source = config.get("data", {}).get("source", "the data")
    accuracy = results["metrics"].get("pairwise_accuracy")
    tested = f" and tested on {numbers.count(accuracy['num'])} held-out pairs" if accuracy else ""
    return (
        f"A reward model based on “{model}” was trained on {trained_on(training)} of "
        f"“{source}”{tested}. The question: may a policy be optimised against it?"
    )


def _device_time(stages: Sequence[StageResult]) -> str:
    """Time of the device that the stages took, and its cost, in one sentence; empty where one is not known."""
    seconds = [stage["device_seconds"] for stage in stages]
    known = [one for one in seconds if one is not None]
    if len(known) < len(seconds):
        return ""
    spent = money_text(sum(known), price_per_hour())
    return f"They held a device for {numbers.duration(sum(known))}{f', which costs {spent}' if spent else ''}."


def _training_rows(results: Results) -> list[tuple[str, str]]:
    training = results["training"]
    best = training["best_value"]
    metric = training["best_metric"]
    if metric is None or best is None:
        chosen = "none was chosen by validation pairs: the last step was kept"
    else:
        chosen = f"{metric} {numbers.text(best, metric_spec(metric.rpartition('/')[2]).unit)}"
    return [
        ("optimizer steps", numbers.count(training["steps"])),
        ("kept checkpoint", f"step {numbers.count(training['best_step'])} ({chosen})"),
        ("stopped because", training["stop_reason"].replace("_", " ")),
        ("trained on", trained_on(training)),
        ("parameters", numbers.count(training["num_parameters"])),
        ("speed", f"{numbers.decimal(training['pairs_per_second'])} pairs/s"),
        ("time", numbers.duration(training["wall_seconds"])),
    ]


def _readiness_rows(scores: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    if scores is None:
        return []
    parts = [(term.label, numbers.decimal(scores[name]), term.definition) for name, term in glossary.READINESS.items()]
    return [*parts, ("overall", numbers.decimal(scores["overall_score"]), "weighted sum of the parts")]


def _mistake(mistake: Mapping[str, Any]) -> dict[str, str]:
    texts = {key: shorten(str(mistake[key])) for key in ("prompt", "chosen", "rejected")}
    return {"pair_id": str(mistake["pair_id"]), "margin": numbers.decimal(mistake["margin"]), **texts}
