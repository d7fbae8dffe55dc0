"""Settings of the probes: edits of answers that must not pay."""

from typing import Annotated

from pydantic import Field

from rmcore.config.base import Names, Settings
from rmcore.core.named_function import source_file_digest


def _rules(names: tuple[str, ...]) -> list[str]:
    return [f"{name} {source_file_digest('probe.rules', name)}" if ":" in name else name for name in names]


class ProbeConfig(Settings):
    """Probes: edits of answers that must not pay. Left out: none is made. They decide nothing. With
    them the report says what each sentence of the worst mistakes adds.
    """

    rules: Annotated[tuple[str, ...], Names(_rules)] = ()
    """Rules by name, or module:function of your own; all built-in ones where none is named."""
    pairs_per_prompt: int | None = Field(default=1, ge=1, le=1_000_000)
    """Most held-out pairs of one prompt: each rule costs as much as scoring them again. Left out (null): all."""
