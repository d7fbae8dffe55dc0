"""`rm-opt run`: the whole pipeline."""

import json
from typing import Annotated

import typer

from flows import cli_runs, cli_start
from flows.cli_common import FlowOptions, print_reported, run_configured, settings_of
from flows.hub_names import require_names
from flows.settings import DEFAULT_PRESET, OWN_DATA_PRESET, base_preset, load_config, named_source
from flows.unfinished import recorded_config
from rmcore.cli.common import setting
from rmcore.cli.options import options
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError


@options()
def run(
    given: FlowOptions,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Start from a named run, see --presets; default: {DEFAULT_PRESET}.",
            autocompletion=cli_start.preset_names,
        ),
    ] = None,
    presets: Annotated[
        bool,
        typer.Option("--presets", is_eager=True, callback=cli_start.show_presets, help="List the named runs and exit."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help=f"Your pairs: a file, a datasets folder or a hub name. The default preset is then {OWN_DATA_PRESET}.",
        ),
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(
            help="Answers with a judge's scores, ranks or comparisons, several a prompt, for evidence level 2."
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--from",
            "--resume",
            help="Take the settings of this run, see `rm-opt runs`, and change some by --set: "
            "--set train.epochs=5. An unfinished one continues where it was stopped.",
            autocompletion=cli_runs.run_names,
        ),
    ] = None,
    device: Annotated[str | None, setting(PipelineConfig, "device")] = None,
    logger: Annotated[
        list[str] | None,
        typer.Option(
            "--logger", help="Send the curves to tensorboard or wandb, as well as to MLflow. May be repeated."
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say which stages would run, why, and about how long they would take.")
    ] = False,
) -> None:
    """Run the whole pipeline on preference pairs, to a verdict and a report.

    Its stages: prepare, train, evaluate, readiness, report, register. Those that are cached are not redone.
    Settings that `rm-opt init` wrote into this folder are read, unless --config or --preset is given.

    Example: rm-opt run --data pairs.csv --set study=mine
    """
    recorded: PipelineConfig | None = None
    chosen = settings_of({"data.source": data, "device": device, "evaluate.answers": answers})
    chosen += [f"loggers={json.dumps(logger)}"] if logger else []
    changes = [*chosen, *(given.set_ or [])]
    if resume is None:
        given = cli_start.with_found_settings(given, preset)
        if preset is None and given.config is None and base_preset(None, None, named_source(changes)) != DEFAULT_PRESET:
            print(f"preset      {OWN_DATA_PRESET}: for pairs of your own; `rm-opt run --presets` lists others")
    elif preset is not None or given.config is not None:
        raise ConfigError("--from has all settings of a run; leave out --preset and --config, or change one by --set.")
    else:
        recorded = recorded_config(resume, cli_runs.named_runs())
        print(f"settings    of the run {recorded.study}-seed{recorded.seed}")
    if plan:
        config = load_config(preset, given.config, changes, recorded)
        require_names(config)
        cli_runs.print_plan(config)
    else:
        print_reported(run_configured("flows.pipeline:pipeline", preset, given, assignments=chosen, recorded=recorded))
