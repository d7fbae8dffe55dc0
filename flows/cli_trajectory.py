"""`rm-opt trajectory`: the curvature of the loss at each saved checkpoint of a training."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flows.cli_common import Flow, FlowOptions, run_configured
from rmcore.cli.options import options


@options()
def trajectory(
    given: FlowOptions,
    preset: Annotated[str, typer.Option(help="Start from a named run; it must set train.save_every.")] = "trajectory",
) -> None:
    """Train, and measure the curvature of the loss at every saved checkpoint.

    train.save_every says which those are; pairs and random vectors are the same at each. Cached like `rm-opt run`.

    Example: rm-opt trajectory --preset minilm --set train.save_every=100
    """
    print_outcome(run_configured(_load_flow, preset, given))


def _load_flow() -> Flow:
    from flows.trajectory import trajectory as flow

    return flow


def print_outcome(outcome: dict[str, Any]) -> None:
    """Show the table, what it must not be read as, and where the figure lies."""
    from flows.checkpoints import CAPTION, HEADINGS, shown_row
    from flows.pipeline import shown_path

    executed = outcome["executed"]
    table = Table(*HEADINGS)
    for row in outcome["results"]["checkpoints"]:
        table.add_row(*shown_row(row))
    print()
    Console().print(table)
    print(CAPTION)
    print(f"computed    {', '.join(executed) if executed else 'nothing: every checkpoint was measured before'}")
    print(f"figure      {shown_path(outcome['figure'])}")
    print(f"table       {shown_path(outcome['table'])}")
    if outcome["mlflow_url"] is not None:
        print(f"MLflow      {outcome['mlflow_url']}")
