"""`rm-opt readiness overoptimize`: whether the true reward follows the proxy, and up to where."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rmcore.cli.common import write_report_json
from rmcore.cli.inputs import JsonOut, Seed


def overoptimize(
    samples: Annotated[
        Path, typer.Option(help="Samples of a policy, several a prompt: Parquet, CSV, JSON or JSONL, one row a sample.")
    ],
    gold: Annotated[str, typer.Option(help="Column of the true reward: a judge's, or people's.")],
    proxy: Annotated[list[str], typer.Option(help="Column of a reward model's rewards. May be repeated.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures and the record.")],
    prompt: Annotated[str, typer.Option(help="Column that samples of one prompt share.")] = "prompt",
    max_n: Annotated[int, typer.Option(min=4, max=100_000, help="Largest n of best-of-n.")] = 64,
    num_resamples: Annotated[
        int, typer.Option(min=100, max=100_000, help="Resamples of the bootstrap over prompts.")
    ] = 1000,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Show proxy and true reward against KL, and where the true reward turns.

    For best-of-n and for the KL-regularised optimum. Nothing is sampled or trained: stored samples are re-weighted,
    exactly. Score them with `rm-opt score`.

    Example:
    rm-opt readiness overoptimize --samples scored.parquet --proxy reward --judge --out curves
    """
    from rmcore.core.files import write_json
    from rmcore.policy.curves import curves_of_file

    record, drawn = curves_of_file(
        samples, prompt=prompt, gold=gold, proxies=proxy, out=out, max_n=max_n, num_resamples=num_resamples, seed=seed
    )
    for name, curves in record["proxies"].items():
        _show(name, curves)
        print(f"figure      {drawn[name]}")
    write_json(out / "overoptimization.json", record)
    write_report_json(json_out, record)


def _show(name: str, curves: list[dict[str, Any]]) -> None:
    from rmcore.reporting.figures.numbers import interval
    from rmcore.reporting.figures.overoptimization import NAMES, finding

    for curve in curves:
        table = Table(
            "n" if curve["method"] == "best_of_n" else "1 / beta",
            "KL, nats",
            "proxy gain",
            "gain of the true reward (95 %)",
        )
        for index, point in enumerate(curve["points"]):
            mark = " *" if index == curve["best"] else ""
            gold = f"{point['gold']['value']:+.3f} {interval(point['gold'])}{mark}"
            table.add_row(f"{point['setting']:.4g}", f"{point['kl']:.3f}", f"{point['proxy']['value']:+.3f}", gold)
        print(f"\n{name}, {NAMES[curve['method']]}: {finding(curve)}")
        Console().print(table)
        print("gains are in standard deviations within prompts")
