"""The report of an experiment for a reader who was not there: sections of a page, and a dated entry in Markdown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rmcore.config.files import setting_text
from rmcore.reporting.experiment_schema import ArmResult, CellResult, ExperimentResults, MetricInfo
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.arms import arm_styles, main_metrics
from rmcore.reporting.figures.claims import (
    SEED_INTERVAL,
    VERDICTS,
    claim_reason,
    claimed,
    mean_estimate,
    measured,
    subject,
    tally,
)
from rmcore.reporting.html.blocks import Block, Named, Section, Table, facts, markdown, words
from rmcore.reporting.html.cards import gate_row
from rmcore.reporting.html.glossary import EXPERIMENT_WORDS
from rmcore.reporting.html.note import address
from rmcore.reporting.html.page import date, write_page

TEMPLATE = "experiment.html.j2"
CAPTIONS = {
    "forest_plot": "Each claim on its own scale. A claim is supported when its whole interval is inside the shaded "
    "side, refuted when all of it is outside, and inconclusive when it contains the threshold.",
    "arm_intervals": "Means and intervals of each arm alone. The claims are judged on paired differences, which are "
    "more precise than two separate intervals: overlap here does not mean that there is no difference.",
    "learning_curves": "Validation accuracy and training loss by step. The mean of an arm ends where its first seed "
    "stopped.",
}
_DETECTABLE = (
    "A true value this far from the threshold would have been found four times out of five (80 % power) with these "
    "seeds and prompts. A smaller distance can remain undetected, so “inconclusive” means “too small a matrix to "
    "tell”, not “no effect”. p: two-sided, of a value equal to the threshold; Holm: adjusted for all claims of this "
    "experiment."
)
_KEY, _CELL_KEY = 12, 8  # characters of a digest that are shown


def write_experiment_report(results: ExperimentResults, figures: Mapping[str, Path], out: Path) -> Path:
    """Write the self-contained report of an experiment to `out`; returns `out`.

    Args:
        results: everything to show, see rmcore.reporting.experiment_schema.
        figures: PNG files by name, those of CAPTIONS; missing ones are mentioned.
        out: HTML file to write; its folder is made.

    Raises:
        DataError: a figure is not a readable PNG file.
    """
    failed = _num_failed(results)
    values = {
        "results": results,
        "created": date(results["created"]),
        "short_hash": results["registration"]["hash"][:_KEY],
        "tally": tally(results["hypotheses"]),
        "finished": f"{len(results['cells']) - failed} of {len(results['cells'])} finished",
        "link": _web_address(results["mlflow_url"]),
        "sections": sections(results),
    }
    return write_page(TEMPLATE, values, figures, CAPTIONS, out)


def sections(results: ExperimentResults) -> list[Section]:
    """The sections of the page in reading order: the answer, what failed, the arms; the rest is folded."""
    means, further = _arms(results)
    known, main = _measured_metrics(results)
    unmeasured = [info["label"] for name, info in results["metrics"].items() if name not in known]
    arms = Block(
        "Arms: what was compared",
        text=(
            f"Means over seeds, {SEED_INTERVAL}. Each arm is the base configuration with its changes.",
            *([f"Not measured in any cell: {', '.join(unmeasured)}."] if unmeasured else []),
        ),
        tables=(means, *([further] if len(known) > len(main) else [])),
        parts=[Block("The changes and bands of each arm", tables=(_changes(results),))],
    )
    costs = Table(("", "", ""), _cost(results), left=range(3))
    figures = Block("Figures", figures=("arm_intervals", "learning_curves"))
    notes = Block("Notes", findings=results["notes"])
    if not results["notes"]:
        notes = Block("Notes", text=("No arms were merged, and no cell is missing.",))
    return [
        Section("answer", "The answer", _answer(results)),
        Section("notes", "Notes", notes),
        Section("arms", "Arms", arms),
        Section("figures", "Figures", figures),
        Section("cells", "Cells", _cells(results)),
        Section("registration", "Registration", _registration(results)),
        Section("cost", "Cost", Block("Cost", tables=(costs,), is_folded=True)),
        Section("again", "Run it again", _again(results)),
        Section("glossary", "Glossary", words(EXPERIMENT_WORDS)),
    ]


def experiment_markdown(results: ExperimentResults) -> str:
    """One dated entry: question, registration, every verdict (refuted ones too), arms, cost, command, link."""
    registration = results["registration"]
    means, _ = _arms(results)
    seeds = f"Means over seeds {', '.join(map(str, results['seeds']))}, {SEED_INTERVAL}."
    entry = Block(
        f"{results['created'].partition('T')[0]} · {results['name']} ({results['size']}): {results['title']}",
        text=(
            results["question"],
            f"Registration {registration['number']}, {registration['hash'][:_KEY]}, of {registration['frozen_at']}.",
            f"{tally(results['hypotheses'])}.",
        ),
        tables=[table for table in (_claims(results), means) if table.rows],
        findings=[
            *([seeds] if results["metrics"] else []),
            *(f"changed since the registration before: {change}" for change in registration["changes"]),
            "; ".join(f"{name}: {value}" for name, value, _ in _cost(results)),
            *results["notes"],
        ],
        code=" ".join(results["command"].split()),
    )
    link = _web_address(results["mlflow_url"])
    return markdown(entry, 2) + "\n" + (f"\n[Cells in MLflow]({address(link)})\n" if link is not None else "")


def _answer(results: ExperimentResults) -> Block:
    failed, num_cells = _num_failed(results), len(results["cells"])
    lines = [f"{failed} of {num_cells} cells failed: see Notes and Cells."] if failed else []
    if not results["hypotheses"]:
        nothing = "No claim was registered: this experiment describes its arms and decides nothing."
        return Block("The answer", text=(nothing,), findings=lines)
    return Block(
        "The answer", figures=("forest_plot",), tables=(_claims(results),), findings=lines, parts=(_judged(results),)
    )


def _num_failed(results: ExperimentResults) -> int:
    return sum(cell["status"] == "failed" for cell in results["cells"])


def _claims(results: ExperimentResults) -> Table:
    rows = []
    for item in results["hypotheses"]:
        info = _metric_info(results, item["metric"])
        value, bounds = measured(item, info["unit"])
        claim = Named(f"{item['name']}: {item['claim']}", f"{info['label']}, {subject(item)}", is_kept=True)
        seen = Named(value, bounds or "no interval", is_kept=True)
        side, why = claimed(item, info["unit"]), claim_reason(item)
        rows.append((VERDICTS[item["verdict"]].words, claim, seen, side, why))
    return Table(("result", "claim", "measured (95 % interval)", "claimed", "why"), rows, left=range(5))


def _judged(results: ExperimentResults) -> Block:
    """How each claim was judged, with the effect that this matrix could have detected and the one that it measured."""
    tests, methods = [], []
    for item in results["hypotheses"]:
        unit, comparison = _metric_info(results, item["metric"])["unit"], item["comparison"]
        value = numbers.finite(item["value"])
        seen = None if value is None else abs(value - item["threshold"])
        over = f"{numbers.count(item['num_seeds'])} seed{'' if item['num_seeds'] == 1 else 's'}"
        over += "" if item["num_prompts"] is None else f", {numbers.count(item['num_prompts'])} prompts"
        methods.append((item["name"], over, item["method"]))
        away = [numbers.distance(distance, unit, comparison) for distance in (item["smallest_detectable"], seen)]
        chances = map(numbers.decimal, (item["p"], item["p_holm"]))
        tests.append((item["name"], numbers.text(item["threshold"], unit, comparison), *away, *chances))
    headings = ("claim", "threshold", "smallest detectable", "measured distance", "p", "p, Holm")
    tables = (Table(("claim", "over", "interval"), methods, left=range(3)), Table(headings, tests))
    title = "How each claim was judged, and which effects could have been detected"
    return Block(title, text=(_DETECTABLE,), tables=tables, is_folded=True)


def _arms(results: ExperimentResults) -> tuple[Table, Table]:
    """The means of every arm over its seeds: of the main metrics, and of all others that were measured."""
    infos, colours = results["metrics"], _colours(results)
    finished = Counter(cell["arm"] for cell in results["cells"] if cell["status"] != "failed")
    known, main = _measured_metrics(results)

    def means(names: Sequence[str], title: str = "") -> Table:
        rows: list[tuple[str | Named, ...]] = [
            (
                Named(arm["name"] + (" (control)" if arm["is_control"] else ""), "", colour=colours[arm["name"]]),
                f"{finished[arm['name']]} of {len(results['seeds'])}",
                *(_mean(name, arm, infos[name]["unit"]) for name in names),
            )
            for arm in results["arms"]
        ]
        return Table(("arm", "seeds", *(infos[name]["label"] for name in names)), rows, title=title)

    return means(main), means([name for name in known if name not in main], "Further metrics")


def _measured_metrics(results: ExperimentResults) -> tuple[list[str], list[str]]:
    """The metrics that any arm or cell has a value of, and the main ones of them."""
    means = [{name: metric["value"] for name, metric in arm["metrics"].items()} for arm in results["arms"]]
    values = [*means, *(cell["metrics"] for cell in results["cells"])]
    known = [name for name in results["metrics"] if any(of_arm.get(name) is not None for of_arm in values)]
    return known, main_metrics(known, results["hypotheses"])


def _mean(name: str, arm: ArmResult, unit: str) -> Named:
    """A mean over seeds and its interval, or why there is none."""
    metric = arm["metrics"].get(name)
    if metric is None:
        return Named(numbers.MISSING, "not measured")
    value, bounds = mean_estimate(name, metric, unit)
    return Named(value, bounds or metric["reason"] or "no interval", is_kept=bool(bounds))


def _changes(results: ExperimentResults) -> Table:
    rows = []
    for arm in results["arms"]:
        lines = []
        for setting, value in arm["changes"].items():
            before: Any = results["base"]
            parts = setting.split(".")
            while parts and isinstance(before, Mapping) and parts[0] in before:
                before = before[parts.pop(0)]
            lines.append(f"{setting}: {'' if parts else f'{setting_text(before, 4)} → '}{setting_text(value, 4)}")
        lines += [f"also declared as {', '.join(arm['merged'])}"] if arm["merged"] else []
        bands = "\n".join(f"{name}: {band}" for name, band in arm["bands"].items())
        rows.append((arm["name"], "\n".join(lines) or "the base, unchanged", bands))
    return Table(("arm", "base → arm", "bands"), rows, left=range(3))


def _cells(results: ExperimentResults) -> Block:
    """Every cell by arm as declared, then by seed, with its numbers; the folders of its artifacts are folded."""
    infos, colours = results["metrics"], _colours(results)
    _, main = _measured_metrics(results)
    order = {arm["name"]: position for position, arm in enumerate(results["arms"])}
    rows, findings, folders = [], [], []
    for cell in sorted(results["cells"], key=lambda cell: (order.get(cell["arm"], len(order)), cell["seed"])):
        name = f"{cell['arm']} {cell['seed']}"
        failed = Named("✗ failed", cell["error"] or "no reason was recorded")
        checks = [gate_row(check) for check in cell["gate"]]
        unmet = [f"{check['label']} {check['value']}: {check['text']}" for check in checks if not check["passed"]]
        rows.append(
            (
                Named(name, "", colour=colours.get(cell["arm"], "")),
                failed if cell["status"] == "failed" else cell["status"],
                *(_cell_value(metric, cell, infos[metric]["unit"]) for metric in main),
                f"{len(checks) - len(unmet)}/{len(checks)}" if checks else numbers.MISSING,
                numbers.duration(cell["device_seconds"]),
                cell["key"][:_CELL_KEY] if cell["key"] else numbers.MISSING,
            )
        )
        findings += [(name, condition) for condition in unmet]
        findings += [(name, "{symptom}: {diagnosis}; {advice}".format(**seen)) for seen in cell["diagnoses"]]
        folders += [(name, stage, path) for stage, path in cell["paths"].items()]
    labels = [infos[metric]["label"] for metric in main]
    headings = ("arm, seed", "status", *labels, "gate", "device time", "key")
    tables = [
        Table(headings, rows, left=(0, 1)),
        Table(("cell", "finding"), findings, left=range(2), title="Conditions that are not met, and diagnoses"),
        Table(("cell", "stage", "folder"), folders, left=range(3), title="Folders of the artifacts"),
    ]
    about = (
        "Gate: how many of the conditions that a model must meet before it is scaled up are met. Device time: of all "
        "artifacts of a cell, shared ones too."
    )
    filled = [table for table in tables if table.rows]
    return Block("Cells: every arm under every seed", text=(about,), tables=filled, is_folded=True)


def _cell_value(name: str, cell: CellResult, unit: str) -> str:
    if cell["status"] == "failed":
        return ""
    return numbers.estimate(name, {"value": cell["metrics"].get(name), "ci_low": None, "ci_high": None}, unit)[0]


def _registration(results: ExperimentResults) -> Block:
    registration = results["registration"]
    frozen, number = date(registration["frozen_at"]), registration["number"]
    about = (
        f"Claims, metrics, thresholds, arms and seeds were frozen on {frozen}, before the first cell ran. Cells that "
        "another run had computed before are counted under Notes."
    )
    changes = [f"changed since the registration before: {change}" for change in registration["changes"]]
    first = "It is the first registration of this experiment and size."
    rows = {"registration": str(number), "digest": registration["hash"], "frozen": frozen, "file": registration["path"]}
    title = "Registration: what was fixed before the first cell ran"
    return Block(
        title,
        text=(about,),
        tables=(facts(rows),),
        findings=changes or ([first] if number == 1 else ["No difference from the registration before was recorded."]),
        is_folded=True,
    )


def _cost(results: ExperimentResults) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of the time and the cells of the matrix."""
    cost = results["cost"]
    estimated, took = numbers.finite(cost["estimated_seconds"]), cost["run_seconds"]
    against = f"; it took {numbers.decimal(took / estimated)} times that" if estimated else ""
    no_estimate = "no throughput was known, so none was made" if estimated is None else "made before the first cell ran"
    return [
        ("cells computed", numbers.count(cost["num_computed"]), "in this run"),
        ("cached", numbers.count(cost["num_cached"]), "found finished"),
        ("failed", numbers.count(cost["num_failed"]), "run the command again: only these are repeated"),
        ("this run", numbers.duration(took), "wall time of the command"),
        ("estimate", numbers.duration(estimated), f"of this run; {no_estimate}{against}"),
        ("all artifacts", numbers.duration(cost["measured_seconds"]), "one that several cells share counts once"),
        ("device time", numbers.duration(cost["device_seconds"]), "that part of them during which a device was held"),
    ]


def _again(results: ExperimentResults) -> Block:
    base = yaml.safe_dump(dict(results["base"]), sort_keys=False, allow_unicode=True, width=100)
    return Block(
        "Run it again",
        text=("Finished cells are found by their content and not run again; only missing ones are.",),
        code=results["command"],
        parts=[
            Block("Environment", tables=(facts(results["environment"]),), is_folded=True),
            Block("Base configuration (YAML)", code=base, is_folded=True),
        ],
        is_folded=True,
    )


def _colours(results: ExperimentResults) -> dict[str, str]:
    """The colour of each arm, as the figures have it."""
    main = next(((name, info["higher_is_better"]) for name, info in results["metrics"].items()), ("", None))
    return {name: look.colour for name, look in arm_styles(results["arms"], *main).items()}


def _metric_info(results: ExperimentResults, name: str) -> MetricInfo:
    """Look up label, unit and direction of a metric; one that is not reported keeps its own name."""
    return results["metrics"].get(name, {"label": name, "unit": "", "higher_is_better": None})


def _web_address(address: str | None) -> str | None:
    """The address if a browser may follow it as a page: anything else, such as javascript:, is no link."""
    return address if address is not None and address.startswith(("http://", "https://")) else None
