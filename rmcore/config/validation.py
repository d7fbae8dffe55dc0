"""Settings of the study of what readiness predicts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Settings

HEADS_PER_BACKBONE = 5
"""Reward models of the study for each backbone: the head it was trained with, and `rmcore.policy.grpo.defects`."""
StudiedWorld = Literal["length", "flattery", "claims"]


class ValidationConfig(Settings):
    """The study of what readiness predicts: a population of small reward models whose true gain is known."""

    worlds: tuple[StudiedWorld, StudiedWorld] = ("flattery", "claims")
    """Shortcuts of the two gold worlds that have such a population each; they stand in for data.gold.shortcut."""
    num_backbones: int = Field(default=40, ge=2, le=40)
    """Quickly trained backbones of each world, with a defect of their training or none; five reward heads on each."""
    steps: int = Field(default=160, ge=2)
    """Optimizer steps of each backbone."""
    measured_prompts: int = Field(default=50, ge=2)
    """Prompts whose judged samples the scores may see; the gain is taken on all others."""

    @property
    def num_models(self) -> int:
        """Reward models of the study, over its worlds."""
        return len(self.worlds) * self.num_backbones * HEADS_PER_BACKBONE

    @model_validator(mode="after")
    def _worlds_differ(self) -> Self:
        if self.worlds[0] == self.worlds[1]:
            raise ValueError(f"both worlds have the shortcut {self.worlds[0]}, so they are one; name another")
        return self
