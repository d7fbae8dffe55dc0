"""`rm-opt readiness overoptimize`: whether the true reward follows the proxy, and up to where."""

from pathlib import Path
from typing import Annotated

import typer

from rmcore.cli.common import print_block, write_report_json
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
    from rmcore.reporting.html.policy import curves_block

    record, drawn = curves_of_file(
        samples, prompt=prompt, gold=gold, proxies=proxy, out=out, max_n=max_n, num_resamples=num_resamples, seed=seed
    )
    print_block(curves_block(record), is_whole=True)
    for file in drawn.values():
        print(f"figure      {file}")
    write_json(out / "overoptimization.json", record)
    write_report_json(json_out, record)
