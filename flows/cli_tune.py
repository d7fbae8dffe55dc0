"""`rm-opt tune`: the best reward model for these pairs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows import cli_start
from flows.cli_common import FlowOptions, run_configured, settings_of
from flows.settings import PRESET
from rmcore.cli.common import print_block
from rmcore.cli.options import options
from rmcore.config.files import read_mapping
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
    objective: Annotated[Objective, typer.Option(help="What is compared on validation pairs.")] = "accuracy",
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
    if preset is None and (given.config is None or PRESET not in read_mapping(given.config, "write settings by name")):
        preset = DEFAULT_PRESET
    outcome = run_configured(
        "flows.tune:tune",
        preset,
        given,
        settings_of({"data.source": data, "model.name": model}),
        trials=trials,
        objective=objective,
        space=None if space is None else read_mapping(space, SPACE_HELP),
        name=name,
        seeds=seeds,
    )
    print_outcome(outcome)


def print_outcome(outcome: dict[str, Any]) -> None:
    """Show the verdict, what the winner is, what it cost, and where to look."""
    from flows.pipeline import shown_path
    from rmcore.reporting.html.tuning import cost_text, tuning_block

    results = outcome["results"]
    worth, settings = tuning_block(results).parts
    print()
    print_block(worth)
    print_block(settings)
    print(results["headline"])
    states = [one["state"] for one in results["trials"]]
    print(f"trials      {', '.join(f'{states.count(state)} {state}' for state in dict.fromkeys(states))}")
    print(f"cost        {cost_text(results)}")
    print(f"recipe      {shown_path(outcome['recipe'])}")
    print(f"report      {shown_path(outcome['report'])}")
    if outcome["mlflow_url"] is not None:
        print(f"MLflow      {outcome['mlflow_url']}")
