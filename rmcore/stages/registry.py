"""The stages of a pipeline and what their keys contain. Imports no torch: a cached run must not pay for it.

    prepare -> train -> evaluate -> readiness                                    the pipeline
                        landscape                                                where curvature is requested
               probe                                                             where probes are asked for
               explain                                                           where mistakes are to be explained
               benchmark                                                         where benchmarks are named
               policy -> samples -> overoptimization -> readiness_v2             where a policy is given
               policy -> train                                                   where the reward model starts from it
                         samples -> overoptimization -> grpo                     where the policy is trained on
               policy -> confirmation                                            where best-of-n is served

(Registration in MLflow follows; it is not a stage of the store, because its outcome lives in MLflow.)
"""

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.digests import make_key
from rmcore.core.fingerprints import code_digests
from rmcore.core.store import ArtifactRef
from rmcore.stages import settings as of_stage
from rmcore.stages.settings import DeviceSettings, StageSettings
from rmcore.training.resume import FINISHED_FILE


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its settings, its code, its place in the chain."""

    name: str
    upstream: tuple[str, ...]
    settings: type[StageSettings]
    """All of a config that the stage is given, and how the key has it."""
    outcome: tuple[str, ...]
    """Globs of the files that downstream stages read; their content is the artifact's digest."""
    libraries: tuple[str, ...] = ()
    """Packages whose major.minor version enters the key."""
    hidden: tuple[str, ...] = ()
    """Modules that the stage imports and whose code does not enter the key."""
    kept: tuple[str, ...] = ()
    """Globs of what an attempt that was cut off leaves for the next one to resume from."""
    finished: str = ""
    """File that such a stage writes last; without it, it was cut off whatever it reported."""

    @property
    def module(self) -> str:
        """Module with this stage's `run(settings, upstream, out, tracker, report)`."""
        return f"rmcore.stages.{self.name}"

    def needs(self, config: PipelineConfig) -> tuple[str, ...]:
        """Stages that it reads under a config: its upstream, and the policy where the reward model starts from it.

        The curvature only where it is measured.
        """
        from_policy = self.name == "train" and of_stage.starts_from_sft(config)
        upstream = tuple(name for name in self.upstream if name != "landscape" or config.landscape is not None)
        return (*upstream, "policy") if from_policy else upstream

    @property
    def on_device(self) -> bool:
        """Whether it runs a model, so the device type enters the key and one slot of the device is taken."""
        return issubclass(self.settings, DeviceSettings)


TORCH = ("torch", "transformers")
HIDDEN_OF_TRAINING = (
    "rmcore.landscape.trajectory",  # what is measured on the way changes no weight
)
STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("prepare", (), of_stage.PrepareSettings, ("*.parquet", "label_ceiling.json")),
        Stage(
            "train",
            ("prepare",),
            of_stage.TrainSettings,
            ("best/*",),
            libraries=TORCH,
            hidden=HIDDEN_OF_TRAINING,
            kept=("best", "resume", "step_*"),
            finished=FINISHED_FILE,
        ),
        Stage(
            "evaluate",
            ("prepare", "train"),
            of_stage.EvaluateSettings,
            ("rewards.parquet", "metrics.json"),
            libraries=TORCH,
        ),
        Stage(
            "landscape",
            ("prepare", "train"),
            of_stage.LandscapeSettings,
            ("spectrum.json",),
            libraries=TORCH,
        ),
        Stage("probe", ("prepare", "train"), of_stage.ProbeSettings, ("probe.json",), libraries=TORCH),
        Stage("explain", ("prepare", "train"), of_stage.ExplainSettings, ("explain.json",), libraries=TORCH),
        Stage("readiness", ("prepare", "evaluate", "landscape"), of_stage.ReadinessSettings, ("readiness.json",)),
        Stage(
            "benchmark",
            ("prepare", "train"),
            of_stage.BenchmarkSettings,
            ("benchmark.json", "rewards_*.parquet"),
            libraries=TORCH,
        ),
        Stage("policy", ("prepare",), of_stage.PolicySettings, ("policy.json", "model/*"), libraries=TORCH),
        Stage(
            "samples",
            ("prepare", "policy"),
            of_stage.SamplesSettings,
            ("samples.parquet",),
            libraries=TORCH,
            kept=("drawn.jsonl",),
        ),
        Stage(
            "overoptimization",
            ("prepare", "train", "samples"),
            of_stage.OveroptimizationSettings,
            ("rewards.parquet", "overoptimization.json"),
            libraries=TORCH,
        ),
        Stage(
            "readiness_v2",
            ("evaluate", "landscape", "overoptimization"),
            of_stage.ReadinessV2Settings,
            ("readiness.json",),
        ),
        Stage(
            "confirmation",
            ("prepare", "train", "policy"),
            of_stage.ConfirmationSettings,
            ("confirmation.json",),
            libraries=TORCH,
            kept=("unit.json", "drawn_*.jsonl", "served_*.json", "judged_*.jsonl"),
        ),
        Stage(
            "grpo",
            ("prepare", "train", "policy", "samples", "overoptimization"),
            of_stage.GrpoSettings,
            ("rlhf.json", "model/*"),
            libraries=(*TORCH, "trl"),
            kept=("seed_*",),
        ),
    )
}
POLICY = ("policy", "samples", "overoptimization")
"""Stages that a policy adds before readiness is judged again."""


def pipeline_stages(config: PipelineConfig) -> tuple[str, ...]:
    """Stages of a pipeline run in order: with a policy its judged samples decide about readiness."""
    measured = labelled_stages(config)
    if config.policy is None:
        return in_order(measured, config)
    judged = ("readiness_v2",) if is_judged(config) else ()
    return in_order((*measured, *POLICY, *judged, *(() if config.rlhf is None else ("grpo",))), config)


def labelled_stages(config: PipelineConfig) -> tuple[str, ...]:
    """Stages of a pipeline that need no policy, in order; what most runs do without is there where it is set."""
    curvature = () if config.landscape is None else ("landscape",)
    asked = {"probe": config.probe, "explain": config.explain, "benchmark": config.benchmark}
    more = (name for name, settings in asked.items() if settings is not None)
    return ("prepare", "train", "evaluate", *curvature, "readiness", *more)


def in_order(names: Iterable[str], config: PipelineConfig) -> tuple[str, ...]:
    """Stages in an order in which each comes after what it needs: the policy first where the reward model needs it."""
    listed = tuple(names)
    if "train" not in listed or not of_stage.starts_from_sft(config):
        return listed
    rest = [name for name in listed if name != "policy"]
    place = rest.index("train")
    return (*rest[:place], "policy", *rest[place:])


def is_judged(config: PipelineConfig) -> bool:
    """Whether the policy's samples get a gold reward."""
    policy = config.policy
    if policy is None:
        return False
    return policy.samples is not None or policy.judge is not None or config.data.source == "gold"


@dataclass(frozen=True, slots=True)
class StageCall:
    """One stage under its own settings, on upstream artifacts: all that it is given, and its key."""

    stage: Stage
    settings: StageSettings
    upstream: Mapping[str, ArtifactRef]
    slug: str
    """Readable part of the artifact's folder name."""
    inputs: Mapping[str, Any]
    """Everything that can affect the outcome, as the manifest records it."""
    key: str
    """Digest of `inputs`."""


def stage_call(name: str, config: PipelineConfig, upstream: Mapping[str, ArtifactRef]) -> StageCall:
    """Settings and key of stage `name` in a pipeline; `upstream` may have more than the stage reads.

    What the settings name by address is read here, so this is called once a stage.

    Raises:
        ConfigError: the config has no section that the stage needs.
        RmcoreError: something that the settings name is not there.
    """
    stage = STAGES[name]
    settings = stage.settings.of(config)
    read = {needed: upstream[needed] for needed in stage.needs(config)}
    inputs = {
        "stage": stage.name,
        "config": settings.keyed(),
        "upstream": {name: ref.digest for name, ref in read.items()},
        **stage_code(stage),
    }
    return StageCall(stage, settings, read, _slug(name, config), inputs, make_key(inputs))


def stage_code(stage: Stage) -> dict[str, dict[str, str]]:
    """Digest what affects a stage's outcome beside settings and upstream: its libraries and its code."""
    return {
        "versions": {name: _minor_version(name) for name in stage.libraries},
        "code": code_digests(stage.module, stage.hidden),
    }


def _slug(name: str, config: PipelineConfig) -> str:
    source = Path(config.data.source).name
    return {
        "prepare": f"{source}-seed{config.seed}",
        "train": f"{Path(config.model.name).name}-{source}-seed{config.seed}",
    }.get(name, f"{config.study}-seed{config.seed}")


@cache  # a running process keeps the version that it imported, and reading the metadata takes 40 ms a library
def _minor_version(package: str) -> str:
    return ".".join(importlib.metadata.version(package).split(".")[:2])
