"""`rm-opt presets | init`: which runs have a name, and a file with the settings of one."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.presets import DESCRIBED, Preset
from flows.cli_common import FlowOptions
from flows.settings_file import FILE, OWN_DATA_PRESET, write_settings
from rmcore.config.pipeline import PipelineConfig


def preset_names(incomplete: str) -> list[str]:
    """List the presets' names that the shell completes to."""
    return [name for name in DESCRIBED if name.startswith(incomplete)]


def presets() -> None:
    """List the runs that have a name: what each is for, its data and model, its time."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    table.add_column("what it is for", ratio=1)
    for heading, width in (("data", 14), ("model", 11), ("on two cores", 12)):
        table.add_column(heading, width=width)
    for name, one in DESCRIBED.items():
        purpose = one.purpose if one.command == "run" else f"{one.purpose} Started by `rm-opt {one.command}`."
        table.add_row(
            name, escape(purpose), escape(_data(one)), escape(_model(one.config)), one.time or "by your pairs"
        )
    Console().print(table)
    print(
        "rm-opt run --preset NAME starts one, --set train.lr=1e-4 changes a setting of it, rm-opt init writes them down"
    )


def _data(preset: Preset) -> str:
    data = preset.config.data
    named = f"gold world, {data.gold.num_prompts:,} prompts" if data.source == "gold" else data.source
    return named if preset.time else f"yours; else {named}"


def _model(config: PipelineConfig) -> str:
    adapted = ", LoRA" if config.model.lora is not None else ""
    policy = f"; policy: {config.policy.name}" if config.policy is not None else ""
    return f"{config.model.name}{adapted}{policy}"


def init(
    preset: Annotated[
        str, typer.Option(help="Whose settings, see `rm-opt presets`.", autocompletion=preset_names)
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
