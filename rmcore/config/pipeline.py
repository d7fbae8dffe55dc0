"""Every setting of the platform: one frozen pydantic tree, whose sections have a file each.

The sentence under a field is its help text on the command line and in the Prefect form. docs/training.md gives
the trainer's defaults in one table. Unknown keys and values are errors.
"""

import copy
import difflib
from collections.abc import Iterator
from typing import Any, Self, get_args

from pydantic import Field, model_validator

from rmcore.config.base import Settings
from rmcore.config.data import GOLD, DataConfig
from rmcore.config.evaluate import EvaluateConfig, ReadinessConfig
from rmcore.config.judging import judge_name
from rmcore.config.model import FROM_POLICY, ModelConfig
from rmcore.config.policy import SFT, WORLD, PolicyConfig
from rmcore.config.rlhf import RlhfConfig
from rmcore.config.train import TrainConfig
from rmcore.landscape.settings import LandscapeConfig
from rmcore.probes.settings import ProbeConfig
from rmcore.suites.settings import BenchmarkConfig

DEVICES = r"^(auto|cpu|cuda(:\d{1,3})?)$"
"""Names of devices that are allowed."""


class PipelineConfig(Settings):
    """One pipeline run: data, model, training, measurement and verdict."""

    study: str = Field(default="demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,60}$")
    """Name of the study: the MLflow experiment is `rm/<study>`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds the head, the data order, the splits and the synthetic benchmark."""
    device: str = Field(default="auto", pattern=DEVICES)
    """Where torch runs: auto takes a GPU where there is one; cpu, cuda, or one GPU of several: cuda:1."""
    data: DataConfig = DataConfig()
    """The preference pairs."""
    model: ModelConfig = ModelConfig()
    """The reward model."""
    train: TrainConfig = TrainConfig()
    """Training."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation."""
    landscape: LandscapeConfig | None = None
    readiness: ReadinessConfig = ReadinessConfig()
    """Readiness for reinforcement learning."""
    benchmark: BenchmarkConfig | None = None
    probe: ProbeConfig | None = None
    policy: PolicyConfig | None = None
    """The policy to be optimised. Without it, and without its judged samples, no verdict says "ready"."""
    rlhf: RlhfConfig | None = None
    """Training of the policy against the reward model; needs a policy."""

    @model_validator(mode="after")
    def _reward_model_has_something_to_start_from(self) -> Self:
        if self.model.name != FROM_POLICY:
            return self
        if self.policy is None or self.policy.name == WORLD or self.policy.samples is not None:
            raise ValueError(
                "model.name=policy starts the reward model from the policy's weights, and there are none: set "
                "policy.name to sft, a folder or a hub name (without policy.samples), or name another model"
            )
        return self

    @model_validator(mode="after")
    def _policy_can_do_what_is_asked(self) -> Self:
        if self.rlhf is not None and (self.policy is None or self.policy.samples is not None):
            raise ValueError(
                "rlhf trains a policy, and there is none; set policy.name to sft, a folder or a hub name, and leave "
                "policy.samples out"
            )
        if self.policy is not None and self.policy.name == WORLD:
            if not self.is_gold:
                raise ValueError(
                    f"policy.name=world is the synthetic benchmark's own writer and answers none of the prompts of "
                    f"{self.data.source}; name a causal model, or a file of samples in policy.samples, or leave the "
                    "policy out (policy=null) for a verdict on labelled pairs alone"
                )
            if self.rlhf is not None:
                raise ValueError(
                    "policy.name=world has no weights, so nothing can be trained or started from it; set policy.name "
                    "to sft, a folder or a hub name"
                )
        return self

    @model_validator(mode="after")
    def _policy_stays_where_readiness_looked(self) -> Self:
        if self.rlhf is not None and (self.rlhf.kl_target or 0.0) > self.readiness.planned_kl:
            raise ValueError(
                f"rlhf.kl_target={self.rlhf.kl_target:g} holds the policy further away than readiness is judged at "
                f"(readiness.planned_kl={self.readiness.planned_kl:g} nats); raise that, or lower the target"
            )
        return self

    @property
    def is_gold(self) -> bool:
        """Whether the pairs are the synthetic benchmark's, which also draws prompts and judges if nobody else does."""
        return self.data.source == GOLD

    @property
    def started_from(self) -> str:
        """Name of the model whose weights the reward model starts from, before any fine-tuning here."""
        if self.model.name != FROM_POLICY or self.policy is None:
            return self.model.name
        return self.policy.base if self.policy.name == SFT else self.policy.name

    @property
    def judged_by(self) -> str:
        """Who judges the policy's samples, as people read it."""
        if self.policy is not None and self.policy.samples is not None:
            return f"column {self.policy.judge_column} of the given samples"  # the file may be renamed
        if self.policy is not None and self.policy.judge is not None:
            return judge_name(self.policy.judge)
        return "the synthetic benchmark" if self.is_gold else "nobody"

    @property
    def needs_policy(self) -> bool:
        """Whether anything is computed with the policy itself: not where its samples are given."""
        return self.policy is not None and self.policy.samples is None


def _groups(model: type[Settings], name: str = "") -> Iterator[tuple[str, type[Settings]]]:
    yield name, model
    for field_name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield from _groups(kind, f"{name}.{field_name}".removeprefix("."))


GROUPS = dict(_groups(PipelineConfig))
"""Groups of settings by dotted name; "" is the whole."""


def sections(name: str) -> dict[str, Any]:
    """Return the sections of capabilities that a preset, or a size of experiments, has: fields of `PipelineConfig`."""
    return {field: group(**group.usual[name]) for field, group in GROUPS.items() if name in group.usual}


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
