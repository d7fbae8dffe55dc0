"""The settings file of a folder: what `rm-opt init` writes and `rm-opt run` finds."""

import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from experiments.presets import DESCRIBED
from flows.settings import PRESET
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
