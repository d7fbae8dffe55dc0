"""Arms: re-validated changes of a base config."""

import copy
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from rmcore.config.pipeline import PipelineConfig

Changes = dict[str, Any]
"""New values by dotted setting; a whole group may be given as a mapping, an optional group as null."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One recipe: a change of the base."""

    name: str
    changes: Changes
    config: PipelineConfig
    merged: tuple[str, ...] = ()
    """Names of declared arms that turned out to be this one."""


def change_config(base: PipelineConfig, changes: Changes) -> PipelineConfig:
    """The base with `changes`, validated again as a whole.

    Raises:
        ValueError: a name is no setting.
        pydantic.ValidationError: a value is not allowed, alone or beside the others.
    """
    tree = copy.deepcopy(base.model_dump())
    for setting, value in changes.items():
        *groups, name = setting.split(".")
        place: Any = tree
        for group in groups:
            place = _step_into(place, group, setting)
        _step_into(place, name, setting)
        place[name] = value
    return PipelineConfig.model_validate(tree)


def _step_into(place: Any, name: str, setting: str) -> Any:
    if not isinstance(place, dict) or name not in place:
        if not isinstance(place, dict):
            raise ValueError(f"no setting {setting!r}: before .{name} stands a value or null; give the whole group")
        near = difflib.get_close_matches(name, list(place), n=1)
        raise ValueError(f"no setting {setting!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    return place[name]


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
