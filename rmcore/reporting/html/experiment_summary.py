"""An experiment in a few lines of Markdown: for Prefect's run page and, as it is, for the log of experiments."""

from collections import Counter

from rmcore.core.cost import money_text
from rmcore.reporting.experiment_schema import ArmResult, ExperimentResults, HypothesisResult, MetricInfo
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.arms import main_metrics
from rmcore.reporting.figures.claims import VERDICTS, claimed, decided_by, subject, tally
from rmcore.reporting.figures.quantities import SEED_INTERVAL, TWO_SEEDS, claim_estimate, claim_reason, mean_estimate
from rmcore.reporting.html.markdown import escape, table, text_table


def experiment_markdown(results: ExperimentResults) -> str:
    """One dated entry: question, registration, every verdict (refuted ones too), arms, cost, command, link."""
    day = results["created"].partition("T")[0]
    registration = results["registration"]
    title = f"{day} · {results['name']} ({results['size']}): {results['title']}"
    lines = [f"## {escape(title)}", ""]
    lines += [escape(results["question"]), ""]
    frozen = f"Registration {registration['number']}, `{_code(registration['hash'][:12])}`, frozen "
    lines += [frozen + escape(registration["frozen_at"]) + "."]
    lines += [f"- changed since the one before: {escape(change)}" for change in registration["changes"]]
    looks = results["looks"]
    after = f", after {results['looks_taken']} of {len(looks)} looks" if len(looks) > 1 else ""
    lines += ["", f"**{escape(tally(results['hypotheses']) + after)}.**", ""]
    lines += [*_verdicts(results), *_arms(results), _cost(results), ""]
    lines += [*(f"- {escape(note)}" for note in results["notes"]), *([""] if results["notes"] else [])]
    lines += [f"Run again: `{_code(results['command'])}`"]
    link = web_address(results["mlflow_url"])
    if link is not None:
        lines += ["", f"[Cells in MLflow](<{_address(link)}>)"]
    return "\n".join(lines) + "\n"


def metric_info(results: ExperimentResults, name: str) -> MetricInfo:
    """Look up label, unit and direction of a metric; one that is not reported keeps its own name."""
    return results["metrics"].get(name, {"label": name, "unit": "", "higher_is_better": None})


def finished_seeds(results: ExperimentResults) -> Counter[str]:
    """Count the seeds under which each arm finished."""
    return Counter(cell["arm"] for cell in results["cells"] if cell["status"] != "failed")


def measured(item: HypothesisResult, unit: str) -> tuple[str, str]:
    """A hypothesis' value and its interval with what it holds under (empty where there is none)."""
    value, bounds = claim_estimate(item, unit)
    has_ends = bounds not in ("", TWO_SEEDS)
    return value, " ".join(filter(None, (bounds, item.get("condition") if has_ends else None)))


def web_address(address: str | None) -> str | None:
    """The address if a browser may follow it as a page: anything else, such as javascript:, is no link."""
    return address if address is not None and address.startswith(("http://", "https://")) else None


def _verdicts(results: ExperimentResults) -> list[str]:
    if not results["hypotheses"]:
        return []
    headings = ("claim", "verdict", "measured (95 % interval)", "claimed", "why")
    rows = []
    for item in results["hypotheses"]:
        info = metric_info(results, item["metric"])
        value, bounds = measured(item, info["unit"])
        seen = f"{value} ({bounds or 'no interval'}): {info['label']}, {subject(item)}"
        claim, words = f"{item['name']}: {item['claim']}", VERDICTS[item["verdict"]].words
        closed = f"Closed at {item['closed']}." if item["closed"] else ""
        would_decide = decided_by(item, results["sizes"].get(item["name"]), results["cells"])
        why = " ".join(filter(None, (claim_reason(item), closed, would_decide)))
        rows.append((claim, words, seen, claimed(item, info["unit"]), why))
    return [text_table(headings, rows), ""]


def _arms(results: ExperimentResults) -> list[str]:
    names = main_metrics(list(results["metrics"]), results["hypotheses"])
    if not names:
        return []
    labels = [escape(results["metrics"][name]["label"]) for name in names]
    rows = []
    for arm in results["arms"]:
        title = escape(arm["name"]) + (" (control)" if arm["is_control"] else "")
        values = [_mean(arm, name, results["metrics"][name]["unit"]) for name in names]
        rows.append([title, *values])
    means = table(("arm", *labels), rows, right=range(1, len(names) + 1))
    seeds = escape(", ".join(map(str, results["seeds"])))
    return [means, "", f"Means over seeds {seeds}{_fewer(results)}, {SEED_INTERVAL}.", ""]


def _fewer(results: ExperimentResults) -> str:
    """Name the arms that finished under fewer seeds than were taken, in brackets: closed early, or cells failed."""
    finished = finished_seeds(results)
    arms = [arm["name"] for arm in results["arms"] if finished[arm["name"]] < len(results["seeds"])]
    return f" (fewer: {escape(', '.join(f'{name} {finished[name]}' for name in arms))})" if arms else ""


def _mean(arm: ArmResult, name: str, unit: str) -> str:
    metric = arm["metrics"].get(name)
    if metric is None:
        return numbers.MISSING
    value, bounds = mean_estimate(name, metric, unit)
    return value + (f" ({bounds})" if bounds else "")


def _cost(results: ExperimentResults) -> str:
    cost = results["cost"]
    estimated = cost["estimated_seconds"]
    spent = money_text(cost["device_seconds"], cost["price_per_hour"])
    before = "without an estimate" if estimated is None else f"estimated {numbers.duration(estimated)}"
    return (
        f"{cost['num_computed']} cells computed, {cost['num_cached']} cached, {cost['num_failed']} failed; this run "
        f"took {numbers.duration(cost['run_seconds'])} ({before}), all artifacts "
        f"{numbers.duration(cost['measured_seconds'])}, of which a device {numbers.duration(cost['device_seconds'])}"
        f"{f' ({spent})' if spent else ''}."
    )


def _code(text: str) -> str:
    """One line that can stand between back quotes."""
    return " ".join(text.replace("`", "'").split())


def _address(link: str) -> str:
    """The address without what would end a Markdown link."""
    for sign, code in ((" ", "%20"), ("<", "%3C"), (">", "%3E"), ("`", "%60"), ("|", "%7C"), ("\n", ""), ("\r", "")):
        link = link.replace(sign, code)
    return link
