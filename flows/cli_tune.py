"""`rm-opt tune`: the best reward model for these pairs within a budget."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows import cli_start
from flows.cli_common import Flow, FlowOptions, run_configured, settings_of
from flows.hub_names import require_hub_names
from flows.settings import PRESET, load_config
from rmcore.cli.options import options
from rmcore.config.files import read_mapping
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.cost import money_text, price_per_hour
from rmcore.core.errors import ConfigError
from rmcore.core.progress import duration
from rmcore.study.objectives import Objective
from rmcore.study.search_space import Choices, Space, default_space, parse_space, read_space, settings_line, text_of
from tasks.home import home

DEFAULT_PRESET = "minilm"
BUDGET = "60m"


@options()
def tune(
    given: FlowOptions,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="Your pairs: a file, a datasets folder or a hub name.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Backbone: a folder, a hub name or minilm.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help=f"Time for all of it, the confirmation included: 90s, 60m, 1.5h; default: {BUDGET}."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many trials; without --budget, only then.")
    ] = None,
    space: Annotated[
        Path | None, typer.Option(help="YAML file with the settings to search; default: a small space, see --plan.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help=f"What is compared on validation pairs: {', '.join(get_args(Objective))}.")
    ] = "accuracy",
    name: Annotated[
        str | None, typer.Option(help="Name of the search; the same one resumes. Default: study and objective.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=2, max=100, help="Fresh seeds that winner and defaults are trained with in the end.")
    ] = 3,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Database of the search, an SQLAlchemy URL without a password; default: a file of this home."
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"The defaults that trials change, see `rm-opt presets`; default: {DEFAULT_PRESET}.",
            autocompletion=cli_start.preset_names,
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only show the space, how many trials fit, and how long they would take.")
    ] = False,
) -> None:
    """Search for the best settings on your pairs within a budget.

    Trials that fall behind are given up after a ninth or a third of their steps. The winner is trained anew with fresh
    seeds and measured, beside the defaults, on pairs that no trial saw. Goes on where it was stopped.

    Example: rm-opt tune --data pairs.parquet --model minilm --budget 60m
    """
    chosen = checked_objective(objective)
    if storage is not None:
        from rmcore.study.search import require_no_password

        require_no_password(storage)
    if preset is None and (given.config is None or PRESET not in read_mapping(given.config, "write settings by name")):
        preset = DEFAULT_PRESET
    assignments = settings_of({"data.source": data, "model.name": model})
    searched = None if space is None else read_space(space)
    until = BUDGET if budget is None and trials is None else budget
    if plan:
        config = load_config(preset, given.config, [*assignments, *(given.set_ or [])])
        require_hub_names(config)
        print_plan(config, searched, until, trials, seeds)
        return
    outcome = run_configured(
        _load,
        preset,
        given,
        assignments,
        budget=until,
        trials=trials,
        objective=chosen,
        space=searched,
        name=name,
        seeds=seeds,
        storage=storage,
    )
    print_outcome(outcome)


def _load() -> Flow:
    from flows.tune import tune as flow

    return flow


def checked_objective(text: str) -> Objective:
    """The objective of that name.

    Raises:
        ConfigError: there is none.
    """
    for one in get_args(Objective):
        if one == text:
            found: Objective = one
            return found
    raise ConfigError(f"--objective {text}: there is none of that name; take one of {', '.join(get_args(Objective))}.")


def print_plan(
    config: PipelineConfig,
    searched: dict[str, Any] | None,
    budget: str | None,
    trials: int | None,
    seeds: int,
) -> None:
    """Show what would be searched, how many trials fit in the budget, and what they would cost.

    Raises:
        ConfigError: the space cannot be used, or the budget is below one trial.
    """
    from flows.tune_plan import tuned_base, tuning_plan
    from rmcore.core.store import Store

    base = tuned_base(config)
    space = default_space(base) if searched is None else parse_space(searched, base)
    found = tuning_plan(base, Store(home() / "store"), home(), seeds=seeds, budget=budget)
    Console().print(space_table(space, base))
    for problem in found.problems:
        print(f"time unknown: {problem}")
    if found.times is None:
        return
    print(f"a trial     about {duration(found.times.prepare + found.times.train)} if it runs to its end")
    if found.budget is not None:
        found.budget.check()
        whole, halved = found.budget.num_trials()
        print(f"confirmed   {seeds} fresh seeds of winner and defaults: about {duration(found.budget.confirmation())}")
        print(f"trials      {whole} if all run to their end, about {halved} if two of three are given up at each rung")
        _print_cost("costs       at most ", found.budget.seconds)
    if trials is not None:
        print(f"at most     {trials} trials")


def space_table(space: Space, base: PipelineConfig) -> Table:
    """A space as a table beside the defaults."""
    from rmcore.study.search_space import value_of

    table = Table("setting", "default", "searched", title="Space")
    for name, one in space.settings.items():
        if isinstance(one, Choices):
            shown = ", ".join(text_of(value) for value in one.values)
        else:
            shown = f"{text_of(one.low)} to {text_of(one.high)}{', logarithmic' if one.log else ''}"
            shown += "".join(f", times a factor of {other}" for other in one.scale)
        table.add_row(escape(name), text_of(value_of(base, name)), escape(shown))
    return table


def _print_cost(named: str, seconds: float) -> None:
    money = money_text(seconds, price_per_hour())
    print(f"{named}{duration(seconds)} of a device{f', {money}' if money else ''}")


def print_outcome(outcome: dict[str, Any]) -> None:
    """Show the verdict, what the winner is, what it cost, and where to look."""
    from flows.pipeline import shown_path
    from rmcore.reporting.html.tuning import SHORT_HEADINGS, short_rows

    results = outcome["results"]
    table = Table(*SHORT_HEADINGS)
    for row in short_rows(results):
        table.add_row(*(escape(cell) for cell in row))
    print()
    Console().print(table)
    print(results["headline"])
    print(f"winner      trial {results['winner']['trial']}: {settings_line(results['winner']['settings'])}")
    states = [one["state"] for one in results["trials"]]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print(f"trials      {len(states)}: {counted}")
    _print_total(results["cost"])
    print(f"recipe      {shown_path(outcome['recipe'])}")
    print(f"report      {shown_path(outcome['report'])}")
    if outcome["mlflow_url"] is not None:
        print(f"MLflow      {outcome['mlflow_url']}")


def _print_total(cost: dict[str, Any]) -> None:
    money = money_text(cost["device_seconds"], cost["price_per_hour"])
    search, confirmation = duration(cost["search_seconds"]), duration(cost["confirmation_seconds"])
    print(f"cost        {search} of trials, {confirmation} of confirmation{f', {money}' if money else ''}")
