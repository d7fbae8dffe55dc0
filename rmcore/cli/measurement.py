"""Commands that measure a checkpoint on a file of pairs, made of the stages that do (`rmcore.stages.measurement`)."""

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.common import print_block, write_report_json
from rmcore.cli.inputs import Checkpoint, Data, JsonOut, ModelReading, PairReading, Seed
from rmcore.cli.options import field_options, given, options
from rmcore.config.pipeline import GROUPS
from rmcore.core.progress import progress_bar


def __getattr__(name: str) -> Any:
    """Give the command of the capability `name` that has none of its own; its folder's docstring is the help."""
    if name not in GROUPS:
        raise AttributeError(f"{__name__} has no {name!r}: PipelineConfig has no section of that name")
    return measuring_command(name, inspect.getdoc(import_module(f"rmcore.{name}")) or "")


def measuring_command(
    name: str, help_text: str, *own: inspect.Parameter, panel: str | None = None, whole_weights: str = ""
) -> Callable[..., None]:
    """Make a command that measures any checkpoint on a file of pairs as a stage measures that of a run.

    Args:
        name: of the stage, whose settings are options.
        help_text: of the command.
        own: further options, which do not change what is measured.
        panel: heading of the settings in the help; None: among the options.
        whole_weights: why the weights have to be float32; empty: they need not.
    """
    section, fields = GROUPS[name], tuple(GROUPS[name].model_fields)

    @options(*own, *field_options(section, fields, panel=panel))
    def command(
        checkpoint: Checkpoint,
        data: Data,
        reading: PairReading,
        model: ModelReading,
        out: Annotated[
            Path | None, typer.Option("--out", "-o", help="Also write the record and its figures into this folder.")
        ] = None,
        json_out: JsonOut = None,
        seed: Seed = 0,
        **settings: Any,
    ) -> None:
        from rmcore.reporting.html.blocks import capabilities_shown
        from rmcore.stages.stages import STAGES

        stage: Any = STAGES[name]
        model = model.in_float32(whole_weights) if whole_weights else model
        pairs = reading.read(data)
        record = measure(name, model.load(checkpoint), pairs, section(**given(settings, fields)), seed)
        write_report_json(json_out, {**model.named(checkpoint), "data": data, **record})
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            stage.write(record, out)
        print(f"{checkpoint} on {record.get('num_pairs', len(pairs))} pairs of {data}")
        for shown in capabilities_shown():
            if shown.stage == name:
                print_block(shown.block(record))
        if out is not None:
            print(f"written     {out}")

    command.__doc__ = help_text
    return command


def measure(name: str, rm: Any, pairs: Any, settings: Any, seed: int) -> dict[str, Any]:
    """Measure a model on pairs as the stage `name` does, with a bar of its progress; gives the record."""
    from rmcore.stages.stages import STAGES

    stage: Any = STAGES[name]
    with progress_bar(name) as report:
        record: dict[str, Any] = stage.measure(rm, pairs, settings, seed=seed, report=report)
    return record
