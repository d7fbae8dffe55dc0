"""The report of a run: one HTML file that opens anywhere, without network, scripts or other files; its short form."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rmcore.config.data import GOLD
from rmcore.core.metrics import metric_spec
from rmcore.reporting.figures import numbers
from rmcore.reporting.html import glossary, judgements, logged, policy, rlhf
from rmcore.reporting.html.blocks import Block, Named, Section, Table, capabilities_shown, facts, markdown, words
from rmcore.reporting.html.cards import (
    checks_table,
    headline_cards,
    metrics_table,
    mistakes_block,
    pairs_and_passes,
    tested_on,
    trained_on,
)
from rmcore.reporting.html.page import date, write_page
from rmcore.reporting.html.tree import record_blocks
from rmcore.reporting.schema import Results, StageResult
from rmcore.reporting.verdict_style import VERDICT_STYLES

TEMPLATE = "report.html.j2"
CAPTIONS = {
    "accuracy_in_context": "The same held-out pairs judged by this model, by guessing, by always taking the longer "
    "completion, and (where the true reward is known) by a perfect model.",
    "training_curves": "Training pairs in blue, validation pairs in orange. A training line that leaves the validation "
    "line behind means overfitting.",
    "reliability_diagram": "Pairs grouped by how sure the model is. On the dashed line “80 % sure” is right 80 % of "
    "the time; below it the model is too sure of itself, above it too modest.",
    "reward_by_length": "If reward follows length, a policy learns to write long instead of well.",
    **logged.CAPTIONS,
    **policy.CAPTIONS,
    **rlhf.CAPTIONS,
    **{name: caption for capability in capabilities_shown() for name, caption in capability.captions.items()},
}
AUDIT_KEYS = {"num_rejected": "rows_set_aside", "rejected": "rows set aside, by reason"}
"""Keys of the audit whose own words would be misread: here rejected rows are not rejected sides."""


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
    values = {
        "results": results,
        "created": date(results["created"]),
        "verdict_style": VERDICT_STYLES[results["verdict"]["status"]],
        "question": _question(results),
        "cards": headline_cards(results),
        "sections": sections(results, [name for name in figures if name not in CAPTIONS]),
    }
    return write_page(TEMPLATE, values, figures, CAPTIONS, out)


def summary_markdown(results: Results) -> str:
    """The result in a few lines for a terminal and Prefect: verdict, numbers, reasons, the next step, where all is."""
    verdict, more = results["verdict"], results["next_rung"]
    rows = [(card.label, card.value, card.interval.removeprefix("95 %: ")) for card in headline_cards(results)]
    stages = [
        (stage["name"], "cached" if stage["cached"] else numbers.duration(stage["wall_seconds"]), stage["path"])
        for stage in results["stages"]
    ]
    parts = []
    if verdict["reasons"]:
        parts.append(Block("What speaks against it", findings=verdict["reasons"]))
    if more is not None:
        text = (f"{more['evidence']}. It costs {more['cost']}.", *([more["so_far"]] if "so_far" in more else []))
        parts.append(Block("Next step", text=text, code=more["command"]))
    records: Mapping[str, Any] = results
    parts += [
        shown.block(records[shown.stage])
        for shown in capabilities_shown()
        if shown.in_summary and records.get(shown.stage) is not None
    ]
    if results["logged"] is not None:
        parts.append(logged.logged_block(results["logged"]))
    parts.append(Block("Artifacts", tables=(Table(("stage", "took", "where"), stages, left=(0, 2)),)))
    run = f"{results['run_name']} · study {results['study']} · seed {results['seed']}"
    summary = Block(
        verdict["headline"],
        text=(f"Evidence level {verdict['rung']} of 4: {verdict['evidence']}", run),
        tables=(Table(("number", "value", "95 % interval"), rows, left=(0, 2)),),
        parts=parts,
    )
    return markdown(summary) + "\n"


def sections(results: Results, more_figures: Sequence[str] = ()) -> list[Section]:
    """Everything that was found, in reading order; what the verdict does not rest on is folded."""
    records: Mapping[str, Any] = results
    rung = results["verdict"]["rung"]
    measured = [(shown, records[shown.stage]) for shown in capabilities_shown() if records.get(shown.stage) is not None]
    tables_of_pairs = {
        pair: tables for shown, record in measured for pair, tables in shown.tables_of_pairs(record).items()
    }
    of_capabilities = {word: meaning for shown in capabilities_shown() for word, meaning in shown.words.items()}
    page: list[tuple[str, str, Block | None]] = [
        ("gate", "Checks", _checks(results)),
        ("context", "Accuracy in context", CONTEXT._replace(is_folded=rung > 1)),
        *(
            (anchor, name, _section(block, records[part], is_folded=rung != opened_by))
            for part, anchor, name, block, opened_by in PARTS
        ),
        ("training", "Training", _training(results)),
        ("calibration", "Calibration", CALIBRATION),
        ("length", "Length", LENGTH),
        ("readiness", "Original score", _original_score(results["readiness"])),
        ("metrics", "All metrics", _metrics(results)),
        ("data", "Data", _audit(results["audit"])),
        ("mistakes", "Mistakes", mistakes_block(results["mistakes"], tables_of_pairs)),
        ("more", "More figures", Block("More figures", figures=more_figures) if more_figures else None),
        ("provenance", "Provenance", _provenance(results)),
        ("glossary", "Glossary", words(glossary.NUMBER_WORDS | of_capabilities | glossary.RUN_WORDS)),
    ]
    for shown, record in reversed(measured):  # of two after the same section the first one stays first
        position = next(position for position, (anchor, _, _) in enumerate(page) if anchor == shown.after)
        block = _section(shown.block, record, is_folded=shown.is_folded(record))
        page.insert(position + 1, (shown.stage, shown.name, block))
    return [Section(anchor, name, block) for anchor, name, block in page if block is not None]


def _section(block: Callable[[Any], Block], record: Any, *, is_folded: bool) -> Block | None:
    return None if record is None else block(record)._replace(is_folded=is_folded)


def _policy_in_training(record: Mapping[str, Any]) -> Block:
    block = rlhf.rlhf_block(record)
    return block._replace(title="A policy trained against this reward model", text=(block.title, *block.text))


CONTEXT = Block("Accuracy in context", figures=("accuracy_in_context",))
CALIBRATION = Block("Calibration: are its probabilities right?", figures=("reliability_diagram",), is_folded=True)
LENGTH = Block("Reward against length", figures=("reward_by_length",), is_folded=True)
PARTS = (
    ("observations", "judgements", "Judgements", judgements.judgements_block, None),
    ("logged", "logged", "Logged answers", logged.logged_block, 2),
    ("policy", "policy", "Policy", policy.policy_block, 3),
    ("rlhf", "rlhf", "Trained policy", _policy_in_training, 4),
)
"""Parts of the results that may be None: anchor, name, block, and the evidence level at which the section is open."""


def _checks(results: Results) -> Block:
    title = "Checks: what the verdict rests on"
    if not results["gate"]:
        return Block(title, text=("No check was made.",))
    labelled = Block(
        "Checks on labelled pairs, not part of this verdict",
        text=("The verdict rests on samples of the policy, because the model will be used to rank those.",),
        tables=(checks_table(results["label_gate"]),),
        is_folded=True,
    )
    parts = (labelled,) if results["policy"] and results["label_gate"] else ()
    return Block(title, tables=(checks_table(results["gate"]),), parts=parts)


def _metrics(results: Results) -> Block:
    """All metrics of both splits in the order of the registry."""
    splits = [results["metrics"], *([] if results["ood_metrics"] is None else [results["ood_metrics"]])]
    return Block("All held-out metrics", tables=(metrics_table(splits),), is_folded=True)


def _training(results: Results) -> Block:
    symptoms = [(symptom["symptom"], symptom["diagnosis"], symptom["advice"]) for symptom in results["diagnoses"]]
    nothing = (
        "No known symptom of a bad run (overfitting, reversed labels, a loss that is stuck or explodes, late "
        "oscillation) was seen."
    )
    truncation = record_blocks({"texts cut to fit the model": results["training"]["truncation"]}, "texts cut")
    return Block(
        "Training",
        text=() if symptoms else (nothing,),
        figures=("training_curves",),
        tables=(Table(("seen", "diagnosis", "advice"), symptoms, left=range(3)),) if symptoms else (),
        parts=[Block("The run in numbers", tables=(facts(_training_facts(results)),)), *truncation],
        is_folded=not symptoms,
    )


def _original_score(scores: Mapping[str, Any]) -> Block:
    parts = [
        (Named(*term), "not measured" if scores[name] is None else numbers.decimal(scores[name]))
        for name, term in glossary.READINESS.items()
    ]
    formed = "weighted sum of the parts"
    if scores["landscape_score"] is None:
        formed = "weighted sum of the other three parts over the sum of their weights"
    overall = (Named("overall", formed), numbers.decimal(scores["overall_score"]))
    return Block(
        f"The original readiness score ({scores['version']}): no verdict",
        text=(glossary.READINESS_WEAKNESS,),
        tables=(Table(("part", "score"), [*parts, overall]),),
        findings=scores["recommendations"],
        is_folded=True,
    )


def _audit(audit: Mapping[str, Any]) -> Block:
    renamed = {AUDIT_KEYS.get(key, key): value for key, value in audit.items()}
    parts = sorted(record_blocks(renamed, "overview"), key=lambda block: not block.findings)  # warnings first
    return Block("Data audit", parts=parts, is_folded=not (parts and parts[0].findings))


def _provenance(results: Results) -> Block:
    stages = [
        (
            stage["name"],
            "cached" if stage["cached"] else "computed",
            numbers.duration(stage["wall_seconds"]),
            Named(stage["path"], f"key {stage['key']}"),
        )
        for stage in results["stages"]
    ]
    config = yaml.safe_dump(dict(results["config"]), sort_keys=False, allow_unicode=True, width=100)
    return Block(
        "Provenance: how to get this result again",
        tables=(Table(("stage", "this run", "took", "artifact"), stages, left=(0, 1, 3)),),
        findings=[spent] if (spent := _device_time(results["stages"])) else [],
        parts=[
            Block("Environment", tables=(facts(results["environment"]),)),
            Block("Configuration (YAML)", code=config, is_folded=True),
        ],
        is_folded=True,
    )


def _question(results: Results) -> str:
    """State in one sentence the question that the configuration asks."""
    config, training = results["config"], results["training"]
    model = config.get("model", {}).get("name", "the model")
    source = config.get("data", {}).get("source")
    data = "the synthetic benchmark" if source == GOLD else f"“{source or 'the data'}”"
    tested = f" and tested on {tested_on(results)}" if "pairwise_accuracy" in results["metrics"] else ""
    pairs, passes = pairs_and_passes(training)
    return (
        f"A reward model based on “{model}” was trained on {pairs} of {data} in {passes}{tested}. The question: "
        "may a policy be optimised against it?"
    )


def _device_time(stages: Sequence[StageResult]) -> str:
    """Time of the device that the stages took, in one sentence; empty where one is not known."""
    seconds = [stage["device_seconds"] for stage in stages]
    known = [value for value in seconds if value is not None]
    if len(known) < len(seconds):
        return ""
    return f"They held a device for {numbers.duration(sum(known))}."


def _training_facts(results: Results) -> dict[str, str]:
    training = results["training"]
    best = training["best_value"]
    metric = training["best_metric"]
    if metric is None or best is None:
        chosen = "none was chosen by validation pairs: the last step was kept"
    else:
        chosen = f"{metric} {numbers.text(best, metric_spec(metric.rpartition('/')[2]).unit)}"
    return {
        "optimizer steps": numbers.count(training["steps"]),
        "kept checkpoint": f"step {numbers.count(training['best_step'])} ({chosen})",
        "stopped because": training["stop_reason"].replace("_", " "),
        "trained on": trained_on(training),
        "parameters": numbers.count(training["num_parameters"]),
        "speed": f"{numbers.decimal(training['pairs_per_second'])} pairs/s",
        "time": numbers.duration(training["wall_seconds"]),
    }
