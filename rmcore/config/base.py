"""The base of all settings: frozen, and unknown names are refused."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MAX_WHOLE = 2**53
"""Largest size of a whole number in settings: up to it all of them are exact as JSON's double-precision numbers."""
Threshold = Annotated[float, Field(gt=0, lt=1)]
RUN_ONLY: Final = "run only"
"""Mark of a field, `Annotated[int, RUN_ONLY]`, that says how something is computed and changes no outcome."""

Kind = Literal["audit", "device", "file", "function", "judge", "pairs", "rewards", "rubric", "weights"]


@dataclass(frozen=True)
class Names:
    """Mark of a field whose value only names something, which counts by its content."""

    kind: Kind | Callable[[Any], Any]
    """Gives the digest of the content, or is the name of what does (`rmcore.stages.stage`)."""


class Settings(BaseModel):
    """Base of all settings: immutable, no unknown keys, field help from the docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    common: ClassVar[tuple[str, ...]] = ()
    """Fields of a capability's section that `rm-opt init` writes down."""
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings that a capability's section begins with in a preset or a size of experiments, by the name of that."""

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        """Give a section without help of its own the first paragraph of its settings' docstring."""
        for field in cls.model_fields.values():
            for kind in (field.annotation, *get_args(field.annotation)):
                if field.description is None and isinstance(kind, type) and issubclass(kind, Settings):
                    field.description = str(inspect.getdoc(kind)).partition("\n\n")[0]

    @classmethod
    def run_only(cls) -> frozenset[str]:
        """Fields that change no outcome: no part of a key, and free when a training is resumed."""
        return frozenset(name for name, field in cls.model_fields.items() if RUN_ONLY in field.metadata)

    def keyed(self) -> dict[str, Any]:
        """The fields that can change an outcome, at any depth, JSON-ready."""
        kept = self.model_dump(mode="json", exclude=set(self.run_only()))
        groups = {name: value for name in kept if isinstance(value := getattr(self, name), Settings)}
        return kept | {name: group.keyed() for name, group in groups.items()}

    def named(self, path: str = "") -> Iterator[tuple[str, Kind | Callable[[Any], Any], Any]]:
        """Yield each name in the fields of `keyed`, at any depth: dotted path, kind of what it names, and the name."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if RUN_ONLY in field.metadata:
                continue
            if isinstance(value, Settings):
                yield from value.named(f"{path}{name}.")
            elif value is not None:
                kinds = (mark.kind for mark in field.metadata if isinstance(mark, Names))
                yield from ((f"{path}{name}", kind, value) for kind in kinds)

    @field_validator("*", mode="after")
    @classmethod
    def _whole_numbers_are_exact(cls, value: Any) -> Any:
        """A number of steps of 31 digits would end as an overflow somewhere else, or in an hour's loop."""
        if _holds_huge(value):
            raise ValueError(
                f"a whole number beyond {MAX_WHOLE:,} is given, which no setting needs, and JSON and the forms of a "
                "browser no longer hold exactly; write a smaller one"
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, given: Any, info: ValidationInfo) -> Any:
        """Pydantic would count true as 1: `steps: true` would train for one step."""
        if _holds_truth(given):
            asked = _types(cls.model_fields[str(info.field_name)].annotation)
            if asked & {int, float} and not asked & {bool, Any}:
                raise ValueError(
                    "true or false is given where a number is required, and would count as 1 or 0; write the number"
                )
        return given


def _types(annotation: Any) -> set[Any]:
    """All types that an annotation names; what models have in them is theirs to check."""
    return {annotation} if not get_args(annotation) else set().union(*map(_types, get_args(annotation)))


def _holds_huge(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_huge, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_huge, value))
    return isinstance(value, int) and abs(value) > MAX_WHOLE


def _holds_truth(given: Any) -> bool:
    if isinstance(given, Mapping):
        return any(map(_holds_truth, given.values()))
    return isinstance(given, bool) or (isinstance(given, list | tuple) and any(map(_holds_truth, given)))
