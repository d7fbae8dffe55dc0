"""The result of a run in a few lines of Markdown, for a terminal and for Prefect's artifact view."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Table, capabilities_shown, markdown
from rmcore.reporting.html.cards import headline_cards
from rmcore.reporting.html.logged import logged_block
from rmcore.reporting.schema import Results


def summary_markdown(results: Results) -> str:
    """Verdict, headline numbers with 95 % intervals, reasons, the next step, and where everything is."""
    verdict, more = results["verdict"], results["next_rung"]
    rows = [(card.label, card.value, card.interval.removeprefix("95 %: ")) for card in headline_cards(results)]
    stages = [
        (one["name"], "cached" if one["cached"] else numbers.duration(one["wall_seconds"]), one["path"])
        for one in results["stages"]
    ]
    parts = []
    if verdict["reasons"]:
        parts.append(Block("What speaks against it", findings=verdict["reasons"]))
    if more is not None:
        text = (f"{more['evidence']}. It costs {more['cost']}.", *([more["so_far"]] if "so_far" in more else []))
        parts.append(Block("Next step", text=text, code=more["command"]))
    records: Mapping[str, Any] = results
    told = [one for one in capabilities_shown() if one.in_summary and records.get(one.stage) is not None]
    parts += [one.block(records[one.stage]) for one in told]
    if results["logged"] is not None:
        parts.append(logged_block(results["logged"]))
    parts.append(Block("Artifacts", tables=(Table(("stage", "took", "where"), stages, left=(0, 2)),)))
    run = f"{results['run_name']} · study {results['study']} · seed {results['seed']}"
    return (
        markdown(
            Block(
                verdict["headline"],
                text=(f"Evidence level {verdict['rung']} of 4: {verdict['evidence']}", run),
                tables=(Table(("number", "value", "95 % interval"), rows, left=(0, 2)),),
                parts=parts,
            )
        )
        + "\n"
    )
