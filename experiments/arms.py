"""Arms: re-validated changes of a base config."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel

from rmcore.config.pipeline import Changes, PipelineConfig


@dataclass(frozen=True, slots=True)
class Arm:
    """One recipe: a change of the base."""

    name: str
    changes: Changes
    config: PipelineConfig
    merged: tuple[str, ...] = ()
    """Names of declared arms that turned out to be this one."""


def merge_equal(arms: Sequence[Arm]) -> list[Arm]:
    """Keep the first of arms with equal configs; the others' names are noted on it."""
    kept: dict[str, Arm] = {}
    for arm in arms:
        text = arm.config.model_dump_json()
        first = kept.get(text)
        kept[text] = arm if first is None else replace(first, merged=(*first.merged, arm.name))
    return list(kept.values())


def shown_changes(base: BaseModel, config: BaseModel, prefix: str = "") -> Changes:
    """The settings in which `config` differs from `base`, by dotted name, with their new values."""
    found: Changes = {}
    for name in type(base).model_fields:
        before, after = getattr(base, name), getattr(config, name)
        if before == after:
            continue
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            found |= shown_changes(before, after, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = after.model_dump() if isinstance(after, BaseModel) else after
    return found
