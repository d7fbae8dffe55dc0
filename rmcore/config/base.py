"""The base of all settings: frozen, and unknown names are refused."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Threshold = Annotated[float, Field(gt=0, lt=1)]


class Settings(BaseModel):
    """Base of all settings: immutable, no unknown keys, field help from the docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Pydantic would count true as 1: `steps: true` would train for one step."""
        if _holds_truth(given):
            asked = _types(cls.model_fields[str(info.field_name)].annotation)
            if asked & {int, float} and not asked & {bool, Any}:
                raise ValueError(
                    "true or false is given where a number is asked for, and would count as 1 or 0; write the number"
                )
        return given


def _types(annotation: Any) -> set[Any]:
    """All types that an annotation names; what models have in them is theirs to check."""
    return {annotation} if not get_args(annotation) else set().union(*map(_types, get_args(annotation)))


def _holds_truth(given: Any) -> bool:
    if isinstance(given, Mapping):
        return any(map(_holds_truth, given.values()))
    return isinstance(given, bool) or (isinstance(given, list | tuple) and any(map(_holds_truth, given)))
