"""Settings of the probes: edits of answers that must not pay."""

from typing import Annotated

from pydantic import Field

from rmcore.config.base import Names, Settings


class ProbeConfig(Settings):
    """Metamorphic tests of the trained reward model on held-out pairs (rmcore/probes)."""

    rules: Annotated[tuple[str, ...], Names("rules")] = ()
    """Rules by name, or module:function of your own; all built-in ones where none is named."""
    pairs_per_prompt: int | None = Field(default=1, ge=1)
    """Most held-out pairs of one prompt: each rule costs as much as scoring them again. Left out (null): all."""
