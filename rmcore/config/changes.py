"""Changes of a config by dotted name, validated again as a whole."""

import copy
import difflib
from typing import Any

from rmcore.config.pipeline import PipelineConfig

Changes = dict[str, Any]
"""New values by dotted setting; a whole group may be given as a mapping, an optional group as null."""


def change_config(base: PipelineConfig, changes: Changes) -> PipelineConfig:
    """The base with `changes`, validated again as a whole.

    Raises:
        ValueError: a name is no setting.
        pydantic.ValidationError: a value is not allowed, alone or besides the others.
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
            raise ValueError(f"no setting {setting!r}: before .{name} is a value or null; give the whole group")
        near = difflib.get_close_matches(name, list(place), n=1)
        raise ValueError(f"no setting {setting!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    return place[name]
