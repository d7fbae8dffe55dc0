"""Parts that the commands which start a flow with a config share: their options, the start, and the summary."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from flows.settings import require_names
from rmcore.cli.common import print_verdict
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ServiceError
from rmcore.core.files import write_text
from rmcore.reporting.html.cards import tested_on, trained_on
from tasks.home import configure_environment

FIGURES = ("overoptimization", "reliability", "rlhf", "label_efficiency", "label_savings")
"""Those that are worth opening first."""


@dataclass(frozen=True, slots=True)
class FlowOptions:
    """Options of each command that starts a flow: changes of its preset, and where the outcome is written."""

    config: Annotated[Path | None, typer.Option(help="YAML file with settings that change the preset.")] = None
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one setting: train.lr=1e-4. May be repeated.")
    ] = None
    summary: Annotated[Path | None, typer.Option(help="Write everything that was found to this JSON file.")] = None


def prepare_terminal() -> None:
    """Set the environment of a command that runs a flow in this terminal, before Prefect is imported."""
    os.environ["RM_OPT_CONSOLE"] = "1"
    configure_environment()


def say_start(name: str, parts: str) -> None:
    """Say at once what is begun: on a busy machine its first part starts most of a minute later."""
    print(f"starting    {name}: Prefect and the libraries are loaded, then its {parts} begin", flush=True)


def settings_of(given: Mapping[str, str | int | float | None]) -> list[str]:
    """The settings behind a command's options, those that were given, in the form of `--set`.

    As JSON: a path is text, whatever YAML would read in it.
    """
    return [f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None]


def run_configured(
    flow: str,
    preset: str | None,
    given: FlowOptions,
    assignments: Sequence[str] = (),
    recorded: PipelineConfig | None = None,
    **own: Any,
) -> dict[str, Any]:
    """Run a flow under a preset, and write its outcome to a file if one is named.

    Args:
        flow: `module:name`; Prefect reads its address when it is imported, so not before that is known.
        preset: what is changed; None: what the config file names, or the demo.
        given: by the user; --set has the last word.
        assignments: what the command's own options change, in the form of --set.
        recorded: settings of a run that is resumed, in place of a preset's.
        own: arguments of the flow besides its settings.

    Raises:
        ConfigError, pydantic.ValidationError: the config cannot be used.
        ModelError, DataError: a model or data of the hub are not to be had.
        ServiceError: Prefect's API failed.
    """
    prepare_terminal()
    from flows.prefect_api import choose_api
    from flows.settings import base_preset, changes_of, load_config, named_source

    changes = [*assignments, *(given.set_ or [])]
    settings = load_config(preset, given.config, changes, recorded)
    require_names(settings)
    changed = base_preset(preset, given.config, named_source(changes))
    summary = given.summary
    if summary is not None:
        summary.parent.mkdir(parents=True, exist_ok=True)
        summary.touch()  # a path that cannot be written is refused before hours are spent
    say_start(f"{settings.study}-seed{settings.seed}", "stages")
    choose_api()
    from flows.console import quiet_prefect

    module, _, name = flow.partition(":")
    started = getattr(import_module(module), name)
    quiet_prefect()
    with prefect_in_use("stages"):
        outcome: dict[str, Any] = started(preset=changed, overrides=changes_of(changed, settings), **own)
    if summary is not None:
        write_text(summary, json.dumps(outcome, indent=1) + "\n")
    return outcome


@contextmanager
def prefect_in_use(results: str) -> Iterator[None]:
    """Run flows inside, and say in one sentence what is kept of their `results` where Prefect's server fails or goes.

    Raises:
        ServiceError: Prefect's API failed.
    """
    from prefect.exceptions import PrefectException

    from flows.prefect_api import end_without_server

    advice = f"Finished {results} are stored: run the same command again."
    try:
        with end_without_server(advice):
            yield
    except (httpx.HTTPError, PrefectException) as error:
        raise ServiceError(f"Prefect's API failed during the run ({error}). {advice}") from error


def print_places(outcome: dict[str, Any]) -> None:
    """Say what was computed and where it is."""
    from flows.pipeline import shown_path

    executed = outcome["executed"]
    print(f"computed    {', '.join(executed) if executed else 'nothing: every stage was cached'}")
    for name in FIGURES:
        if name in outcome["figures"]:
            print(f"figure      {shown_path(outcome['figures'][name])}")
    if outcome["report"] is not None:
        print(f"report      {shown_path(outcome['report'])}")
    print(f"record      {shown_path(outcome['folder'])}")
    print_pages(outcome)


def print_pages(outcome: dict[str, Any]) -> None:
    """Say where a run is in MLflow and in Prefect, where a server shows it."""
    for name, address in outcome["pages"].items():
        print(f"{name:<11} {address}")


def print_reported(outcome: dict[str, Any]) -> None:
    """Say what a whole pipeline run came to and where it is."""
    from flows.pipeline import shown_path

    results = outcome["results"]
    accuracy = results["metrics"]["pairwise_accuracy"]
    interval = "" if accuracy["ci_low"] is None else f" [{accuracy['ci_low']:.3f}, {accuracy['ci_high']:.3f}]"
    executed = outcome["executed"]
    print()
    print(f"computed    {', '.join(executed) if executed else 'nothing: every stage was cached'}")
    print(f"accuracy    {accuracy['value']:.3f}{interval} on {tested_on(results)}")
    over = results["metrics"]["accuracy_over_baseline"]
    if over["value"] is not None:
        length = results["metrics"]["longer_wins_accuracy"]["value"]
        longer = "both answers equally long" if length is None else f"longer answer {length:.3f}"
        ends = "" if over["ci_low"] is None else f" [{over['ci_low']:+.3f}, {over['ci_high']:+.3f}]"
        print(f"baselines   chance 0.500, {longer}; accuracy minus best baseline {over['value']:+.3f}{ends}")
    print(f"trained on  {trained_on(results['training'])}")
    print_verdict(results["verdict"], results["next_rung"])
    print(f"report      {shown_path(outcome['report'])}")
    print(f"checkpoint  {shown_path(outcome['checkpoint'])}")
    if outcome["model_version"] is not None:
        print(f"registered  rm-{results['study']} version {outcome['model_version']} in MLflow")
    if outcome["pages"]:
        print_pages(outcome)
    else:
        print_how_to_see()


def print_how_to_see() -> None:
    """Say how the pages of what ran without services are seen."""
    from flows.pipeline import shown_path

    program = shown_path(sys.argv[0]) if os.path.dirname(sys.argv[0]) else "rm-opt"
    print(f"UIs         `{program} up` starts the Prefect and MLflow UIs on this machine and prints their addresses")
