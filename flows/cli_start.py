"""`rm-opt run --presets` and `rm-opt init`: which runs have a name, and a file with the settings of one."""

from dataclasses import replace
from typing import Annotated

import typer

from experiments.presets import DESCRIBED
from flows.cli_common import FlowOptions
from flows.settings import OWN_DATA_PRESET
from flows.settings_file import FILE, write_settings
from rmcore.config.pipeline import PipelineConfig


def preset_names(incomplete: str) -> list[str]:
    """List the presets' names that the shell completes to."""
    return [name for name in DESCRIBED if name.startswith(incomplete)]


def show_presets(shown: bool) -> None:
    """List the runs that have a name: what each is for, its model, its time on two cores."""
    if not shown:
        return
    width = max(map(len, DESCRIBED))
    for name, one in DESCRIBED.items():
        by = "" if one.command == "run" else f"rm-opt {one.command}: "
        first = one.purpose.partition(". ")[0].partition(": ")[0].removesuffix(".")
        print(f"{name:<{width}}  {by}{first} ({_model(one.config)}, {one.time or 'by your pairs'})")
    print("rm-opt run --preset NAME starts one; --set train.lr=1e-4 changes a setting; rm-opt init writes them down")
    raise typer.Exit


def _model(config: PipelineConfig) -> str:
    adapted = ", LoRA" if config.model.lora is not None else ""
    policy = f"; policy: {config.policy.name}" if config.policy is not None else ""
    return f"{config.model.name}{adapted}{policy}"


def init(
    preset: Annotated[
        str, typer.Option(help="Whose settings, see `rm-opt run --presets`.", autocompletion=preset_names)
    ] = OWN_DATA_PRESET,
) -> None:
    """Write rm-opt.yaml here: the common settings, with their help, for `rm-opt run`.

    A file that is there is never overwritten. Change data.source to your pairs, then: rm-opt run
    """
    write_settings(FILE, preset)
    print(f"settings    {FILE}: the common ones of the preset {preset}, each with what it means")
    print("next        name your pairs in data.source and change what else you like; then, in this folder: rm-opt run")


def with_found_settings(given: FlowOptions, preset: str | None) -> FlowOptions:
    """The options with the settings file of the current folder in them, where there is one and nothing else is named.

    Says what is read, or why what is there is not.
    """
    if not FILE.is_file():
        return given
    if preset is None and given.config is None:
        print(f"settings    {FILE} of this folder; another preset or file: --preset, --config")
        return replace(given, config=FILE)
    print(f"settings    {FILE} of this folder is not read: {'--config' if given.config else '--preset'} is given")
    return given
