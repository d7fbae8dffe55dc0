"""`rm-opt run`: the whole pipeline; and `rm-opt init`: a file with the settings of a run that has a name."""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel

from experiments.presets import DESCRIBED
from flows import cli_runs
from flows.cli_common import FlowOptions, print_reported, run_configured, settings_of
from flows.settings import (
    DEFAULT_PRESET,
    OWN_DATA_PRESET,
    PRESET,
    base_preset,
    load_config,
    named_source,
    require_names,
)
from flows.unfinished import recorded_config
from rmcore.cli.common import setting
from rmcore.cli.options import options
from rmcore.config.files import setting_text
from rmcore.config.pipeline import GROUPS, PipelineConfig
from rmcore.core.errors import ConfigError

FILE = Path("rm-opt.yaml")
"""Below the current folder."""
COMMON = (
    *("study", "seed", "device"),
    *("data.source", "data.eval_source", "data.limit", "data.prompt_column", "data.chosen_column"),
    *("data.rejected_column", "data.validation_fraction", "data.test_fraction"),
    *("model.name", "model.max_seq_len", "model.lora", "model.head_only"),
    *("train.epochs", "train.steps", "train.pairs_per_step", "train.optimizer", "train.lr", "train.warmup_steps"),
    *("train.token_budget", "train.precision", "train.eval_every", "train.early_stopping_patience"),
    "train.save_every",
    *(f"{name}.{field}" for name, group in GROUPS.items() for field in group.common),
    *("policy.name", "policy.samples"),
)
"""Settings that most runs change, group by group."""
WIDTH = 100


def settings_text(preset: str) -> str:
    """The common settings of a preset as YAML, each below its help; reads back as exactly that preset.

    Raises:
        ConfigError: there is no such preset.
    """
    if preset not in DESCRIBED:
        raise ConfigError(f"no preset {preset!r}; there are {', '.join(DESCRIBED)}.")
    config = DESCRIBED[preset].config
    lines = _comment(
        "Settings of `rm-opt run`, written by `rm-opt init`. In this folder the command reads them by itself; "
        "--set train.lr=1e-4 has the last word, and with --config or --preset this file is not read. A setting that is "
        "left out is as the preset has it; null means none.",
        "",
    )
    lines += ["", *_comment(f"Preset. {DESCRIBED[preset].purpose} `rm-opt run --presets` lists all.", "")]
    lines.append(f"{PRESET}: {preset}")
    for group in dict.fromkeys(name.rpartition(".")[0] for name in COMMON):
        lines.append("")
        names = [name.rpartition(".")[2] for name in COMMON if name.rpartition(".")[0] == group]
        owner: BaseModel | None = getattr(config, group) if group else config
        if group:
            lines += _comment(str(PipelineConfig.model_fields[group].description), "")
            lines.append(f"{group}:" if owner is not None else f"{group}: null")
        for name in names if owner is not None else []:
            lines += _setting(owner, name, "  " if group else "")
    return "\n".join(lines) + "\n"


def write_settings(file: Path, preset: str) -> None:
    """Write `settings_text` to a new file.

    Raises:
        ConfigError: the file exists, or there is no such preset.
    """
    text = settings_text(preset)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{file} exists, and settings are never overwritten; edit it, or move it away and write it again."
        ) from None


def _setting(owner: Any, name: str, indent: str) -> list[str]:
    field = type(owner).model_fields[name]
    several = get_origin(field.annotation) is tuple
    choices = [one for part in (field.annotation, *get_args(field.annotation)) for one in _choices(part)]
    named = f" {'Any' if several else 'One'} of: {', '.join(map(str, choices))}." if choices else ""
    said = str(field.description) + named
    value = owner.model_dump(mode="json")[name]
    return [*_comment(said, indent), f"{indent}{name}: {setting_text(value)}"]


def _choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _comment(text: str, indent: str) -> list[str]:
    wrapped = textwrap.wrap(" ".join(text.split()), WIDTH - len(indent) - 2, break_long_words=False)
    return [f"{indent}# {line}" for line in wrapped]


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


@options()
def run(
    given: FlowOptions,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Start from a named run, see --presets; default: {DEFAULT_PRESET}.", autocompletion=preset_names
        ),
    ] = None,
    presets: Annotated[
        bool, typer.Option("--presets", is_eager=True, callback=show_presets, help="List the named runs and exit.")
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
    changes = [*chosen, *(given.set_ or [])]
    if resume is None:
        given = with_found_settings(given, preset)
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
