"""The result of a run in a few lines of Markdown, for a terminal and for Prefect's artifact view."""

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.benchmarks import benchmarks_block
from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.cards import headline_cards
from rmcore.reporting.html.logged import logged_block
from rmcore.reporting.html.markdown import bullets, escape, table
from rmcore.reporting.schema import Results


def summary_markdown(results: Results) -> str:
    """Verdict, headline numbers with 95 % intervals, reasons, and where everything is."""
    verdict = results["verdict"]
    lines = [f"# {escape(verdict['headline'])}", ""]
    lines += [f"Evidence level {verdict['rung']} of 4: {escape(verdict['evidence'])}", ""]
    lines.append(f"{escape(results['run_name'])} · study {escape(results['study'])} · seed {results['seed']}")
    cards = headline_cards(results)
    rows = [(escape(card.label), card.value, escape(card.interval.removeprefix("95 %: "))) for card in cards]
    lines += ["", table(("number", "value", "95 % interval"), rows, right={1})]
    if verdict["reasons"]:
        lines += ["", "What speaks against it:", ""]
        lines.append(bullets(escape(reason) for reason in verdict["reasons"]))
    if (more := results["next_rung"]) is not None:
        command = more["command"].replace("`", "")
        lines += [
            "",
            f"Next step: {escape(more['evidence'])}:",
            "",
            f"    {command}",
        ]
        lines += ["", f"It costs {escape(more['cost'])}."]
    if results["benchmarks"] is not None:
        lines += ["", markdown(benchmarks_block(results["benchmarks"]), 2)]
    if results["logged"] is not None:
        lines += ["", markdown(logged_block(results["logged"]), 2)]
    stages = []
    for stage in results["stages"]:
        took = "cached" if stage["cached"] else numbers.duration(stage["wall_seconds"])
        path = stage["path"].replace("`", "").replace("|", "/")
        stages.append((escape(stage["name"]), took, f"`{path}`"))
    lines += ["", table(("stage", "took", "where"), stages, right={1})]
    return "\n".join(lines) + "\n"
