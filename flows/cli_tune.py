"""`rm-opt tune`: the best reward model for these pairs."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows import cli_start
from flows.cli_common import Flow, FlowOptions, run_configured, settings_of
from flows.settings import PRESET
from rmcore.cli.options import options
from rmcore.config.files import read_mapping
from rmcore.core.errors import ConfigError
from rmcore.study.tuning import Objective

DEFAULT_PRESET = "minilm"
SPACE_HELP = "write for example `train.lr: {low: 1.0e-6, high: 1.0e-4, log: true}`"


@options()
def tune(
    given: FlowOptions,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="Your pairs: a file, a datasets folder or a hub name.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Backbone: a folder, a hub name or minilm.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many, the defaults included.")] = 20,
    space: Annotated[
        Path | None, typer.Option(help="YAML file with the settings to search; default: a small space.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help=f"What is compared on validation pairs: {', '.join(get_args(Objective))}.")
    ] = "accuracy",
    name: Annotated[
        str | None, typer.Option(help="Name of the search; the same one continues it. Default: study and objective.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=2, max=100, help="Fresh seeds that winner and defaults are trained with in the end.")
    ] = 3,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"The defaults that trials change, see `rm-opt run --presets`; default: {DEFAULT_PRESET}.",
            autocompletion=cli_start.preset_names,
        ),
    ] = None,
) -> None:
    """Search for the best settings on your pairs.

    The winner and the defaults are trained with fresh seeds and compared on pairs that no trial saw. A search that was
    stopped continues where it was.

    Example: rm-opt tune --data pairs.parquet --model minilm
    """
    chosen = next((one for one in get_args(Objective) if one == objective), None)
    if chosen is None:
        raise ConfigError(
            f"--objective {objective}: there is none of that name; choose {' or '.join(get_args(Objective))}."
        )
    if preset is None and (given.config is None or PRESET not in read_mapping(given.config, "write settings by name")):
        preset = DEFAULT_PRESET
    assignments = settings_of({"data.source": data, "model.name": model})
    searched = None if space is None else read_mapping(space, SPACE_HELP)
    outcome = run_configured(
        _load,
        preset,
        given,
        assignments,
        trials=trials,
        objective=chosen,
        space=searched,
        name=name,
        seeds=seeds,
    )
    print_outcome(outcome)


def _load() -> Flow:
    from flows.tune import tune as flow

    return flow


def print_outcome(outcome: dict[str, Any]) -> None:
    """Show the verdict, what the winner is, what it cost, and where to look."""
    from flows.pipeline import shown_path
    from rmcore.reporting.html.tuning import ARM_HEADINGS, arm_rows, cost_text
    from rmcore.study.search import settings_line

    results = outcome["results"]
    table = Table(*ARM_HEADINGS)
    for row in arm_rows(results):
        table.add_row(*map(escape, row))
    print()
    Console().print(table)
    print(results["headline"])
    print(f"winner      trial {results['winner_trial']}: {settings_line(results['winner'])}")
    states = [one["state"] for one in results["trials"]]
    print(f"trials      {', '.join(f'{states.count(state)} {state}' for state in dict.fromkeys(states))}")
    print(f"cost        {cost_text(results)}")
    print(f"recipe      {shown_path(outcome['recipe'])}")
    print(f"report      {shown_path(outcome['report'])}")
    if outcome["mlflow_url"] is not None:
        print(f"MLflow      {outcome['mlflow_url']}")
