"""The result of a run in a few lines of Markdown, for a terminal and for Prefect's artifact view."""

import re

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.cards import headline_cards
from rmcore.reporting.html.schema import Results

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def summary_markdown(results: Results) -> str:
    """Verdict, headline numbers with 95 % intervals, reasons, and where everything is."""
    verdict = results["verdict"]
    lines = [f"# {escape(verdict['headline'])}", ""]
    lines.append(f"{escape(results['run_name'])} · study {escape(results['study'])} · seed {results['seed']}")
    lines += ["", "| number | value | 95 % interval |", "| --- | ---: | --- |"]
    for card in headline_cards(results):
        lines.append(f"| {escape(card.label)} | {card.value} | {escape(card.interval.removeprefix('95 %: '))} |")
    if verdict["reasons"]:
        lines += ["", "What speaks against it:", ""]
        lines += [f"- {escape(reason)}" for reason in verdict["reasons"]]
    lines += ["", "| stage | took | where |", "| --- | ---: | --- |"]
    for stage in results["stages"]:
        took = "cached" if stage["cached"] else numbers.duration(stage["wall_seconds"])
        lines.append(f"| {escape(stage['name'])} | {took} | `{stage['path'].replace('`', '').replace('|', '/')}` |")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """One line of Markdown that shows `text` as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.splitlines()))
