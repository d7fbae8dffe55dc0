"""Held-out pairs as all readers are shown them: the numbers that come first, metrics, checks, and mistakes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rmcore.core.metrics import metric_order, metric_spec
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Named, Table, shorten
from rmcore.reporting.schema import Results, Training
from rmcore.reporting.verdict_style import check_result

HEADLINE_METRICS = ("pairwise_accuracy", "accuracy_over_baseline", "length_matched_accuracy", "ece_debiased")

NUM_CARDS = 4
"""Numbers on the first screen."""
SIDES = {"chosen": "labelled better (chosen)", "rejected": "model prefers (rejected)"}


class Card(NamedTuple):
    """One headline number, ready to print."""

    label: str
    value: str
    interval: str
    """Its 95 % interval, or why there is none."""
    definition: str


def headline_cards(results: Results) -> list[Card]:
    """The first four of: a policy's gold gain, held-out accuracy, over length, and length-matched; debiased ECE."""
    cards = []
    if results["policy"] is not None:
        judged = results["policy"]["readiness"]["readiness"]
        label = f"gain of the true reward at {judged['plan']['kl']:g} nats"
        about = "true reward of the chosen samples minus the policy's mean, in standard deviations within prompts"
        cards.append(_card(label, "planned_gain", judged["parts"].get("planned_gain"), about))
    for spec in map(metric_spec, HEADLINE_METRICS):
        cards.append(_card(spec.label, spec.name, results["metrics"].get(spec.name), spec.definition))
    return cards[:NUM_CARDS]


def trained_on(training: Training) -> str:
    """The pairs of a training and how often it saw them: "297 pairs, 6 passes"."""
    return ", ".join(pairs_and_passes(training))


def pairs_and_passes(training: Training) -> tuple[str, str]:
    """The distinct pairs of a training, and how often it saw each: ("297 pairs", "6 passes")."""
    pairs = training["num_distinct"]
    passes = f"{training['num_pairs'] / max(1, pairs):.3g}"
    return f"{numbers.count(pairs)} pairs", f"{passes} {'pass' if passes == '1' else 'passes'}"


def tested_on(results: Results) -> str:
    """The held-out pairs and the prompts that they are of, which are what intervals resample."""
    pairs = f"{numbers.count(results['metrics']['pairwise_accuracy']['num'])} held-out pairs"
    split = results["audit"].get("splits", {}).get("test", {})
    return f"{pairs} of {numbers.count(split['num_prompts'])} prompts" if "num_prompts" in split else pairs


def metric_texts(name: str, metric: Mapping[str, Any] | None) -> tuple[str, str, bool]:
    """The value, the interval or why there is none, and whether there is one."""
    if metric is None:
        return numbers.MISSING, "not measured", False
    value, interval = numbers.estimate(name, metric, metric_spec(name).unit)
    return value, interval or str(metric.get("reason") or "no interval"), bool(interval)


def metrics_table(splits: Sequence[Mapping[str, Mapping[str, Any]]]) -> Table:
    """Metrics of held-out pairs and, where there is a second split, of those out of distribution."""
    rows = []
    for name in sorted(set().union(*splits), key=metric_order):
        spec, entry = metric_spec(name), splits[0].get(name)
        first, *others = [metric_texts(name, split.get(name))[:2] for split in splits]
        num = numbers.count(entry["num"] if entry else None)
        rows.append((Named(spec.label, f"{name}: {spec.definition}"), *first, num, *sum(others, ())))
    headings = ("metric", "value", "95 % interval", "pairs", "out of distribution", "95 % interval")
    return Table(headings[: 2 + 2 * len(splits)], rows, left=(0, 2, 5))


def gate_row(check: Mapping[str, Any]) -> dict[str, Any]:
    """One condition of the gate with its numbers as text."""
    spec = metric_spec(check["name"])
    value, _ = numbers.estimate(check["name"], check, spec.unit)
    return {
        **check,
        "result": check_result(check),
        "value": value,
        "threshold": numbers.text(check["threshold"], spec.unit),
        "label": spec.label,
    }


def checks_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    """Conditions of a gate with their results."""
    rows = [
        (row["result"], Named(row["label"], row["text"]), row["value"], row["threshold"])
        for row in map(gate_row, checks)
    ]
    return Table(("result", "check", "compared value", "threshold"), rows, left=(0, 1))


def _card(label: str, name: str, metric: Mapping[str, Any] | None, definition: str) -> Card:
    value, interval, has_interval = metric_texts(name, metric)
    return Card(label, value, f"95 %: {interval}" if has_interval else interval, definition)


def mistakes_block(mistakes: Sequence[Mapping[str, Any]], tables_of_pairs: Mapping[str, Sequence[Table]] = {}) -> Block:
    """The pairs that the model ranks against their label, each folded.

    Args:
        mistakes: pair_id, prompt, chosen, rejected, and margin in logits.
        tables_of_pairs: more to show of a pair, by its pair_id.
    """
    parts = []
    for mistake in mistakes:
        prompt, *sides = (shorten(str(mistake[key])) for key in ("prompt", *SIDES))
        title = f"margin {numbers.decimal(mistake['margin'])} · pair {mistake['pair_id']}"
        tables = [Table(tuple(SIDES.values()), [sides], left=range(2)), *tables_of_pairs.get(mistake["pair_id"], ())]
        parts.append(Block(title, code=prompt, tables=tables, is_folded=True))
    about = (
        "Held-out pairs that the model ranks the wrong way round, the surest first. Look for wrong labels, and for "
        "what they have in common. Texts are from the data: they may offend."
    )
    nothing = "No held-out pair is ranked the wrong way round."
    return Block("Most confident mistakes", text=(about if parts else nothing,), parts=parts, is_folded=True)
