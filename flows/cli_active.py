"""`rm-opt active study`: what choosing labels saves on these pairs."""

from typing import Annotated, Any

import typer

from flows.cli_common import (
    FlowOptions,
    print_findings,
    print_places,
    run_configured,
    settings_of,
)
from rmcore.cli.active import app
from rmcore.cli.options import options


@app.command()  # beside `propose` and `ingest`
@options()
def study(
    given: FlowOptions,
    preset: Annotated[
        str, typer.Option(help="active (gold world), active-pairs (for your own pairs), active-smoke.")
    ] = "active",
    data: Annotated[
        str | None, typer.Option(help="Your labelled pairs in place of the preset's: their labels are hidden.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Backbone: a checkpoint, a folder or a hub name.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Paired seeds; below 10 nothing is claimed.")] = None,
) -> None:
    """Compare acquisition functions with random choice, and say how many labels each saved, with intervals.

    Labels of the pairs are hidden and revealed when asked for; heads are retrained on features that are computed once.
    Goes on where it was stopped. Examples:

    rm-opt active study

    rm-opt active study --preset active-pairs --data pairs.parquet --model out/best
    """
    own = {"data.source": data, "model.name": model, "active.num_seeds": seeds}
    wanted = settings_of(own) + (["data.eval_source=null"] if data is not None else [])
    outcome = run_configured(_load, preset, given, wanted)
    from rmcore.reporting.html.active import SHORT_HEADINGS, active_findings, short_rows

    print_findings(SHORT_HEADINGS, short_rows(outcome["results"]), active_findings(outcome["results"]))
    print_places(outcome)


def _load() -> Any:
    from flows.active_learning import active_learning

    return active_learning
