"""The stages of a pipeline and what their keys contain. Imports no torch: a cached run must not pay for it.

    prepare -> train -> evaluate -> landscape -> readiness                       the pipeline
               policy -> samples -> optimize -> readiness_v2                     where a policy is given
                         samples -> optimize -> grpo                             where the policy is trained on
                         samples -> population -> validation                     the study of what readiness predicts
    prepare -> features -> active, active_check                                  the study of what choosing labels saves

(Registration in MLflow follows; it is not a stage of the store, because its outcome lives in MLflow.)
"""

import importlib.metadata
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rmcore.config.pipeline import RUN_ONLY_FIELDS, PipelineConfig
from rmcore.config.policy import MEASURING_FIELDS, SAMPLING_FIELDS
from rmcore.core.fingerprints import code_digests
from rmcore.core.store import ArtifactRef
from rmcore.stages.referenced import (
    data_content,
    fit_content,
    function_content,
    labeller_content,
    model_content,
    sampled_content,
    sft_content,
    trained_content,
    trained_policy_content,
)
from rmcore.training.resume import FINISHED_FILE


@dataclass(frozen=True, slots=True)
class Stage:
    """What makes one stage: its code, its share of the config, its place in the chain."""

    name: str
    upstream: tuple[str, ...]
    config_fields: tuple[str, ...]
    """Top-level fields of PipelineConfig that affect the outcome."""
    outcome: tuple[str, ...]
    """Globs of the files that downstream stages read; their content is the artifact's digest."""
    libraries: tuple[str, ...] = ()
    """Packages whose major.minor version enters the key."""
    without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings inside those fields that change no outcome file, by field."""
    kept: tuple[str, ...] = ()
    """Globs of what an attempt that was cut off leaves for the next one to go on from."""
    finished: str = ""
    """File that such a stage writes last; without it, it was cut off whatever it reported."""
    on_device: bool = False
    """Runs a model, so the device type enters the key and one slot of the device is taken."""
    content: Callable[[PipelineConfig], dict[str, str]] = lambda config: {}
    """Digests of what the config names by address, by dotted setting; they stand in for the address in the key."""

    @property
    def module(self) -> str:
        """Module with this stage's `run(config, upstream, out, tracker, report)`."""
        return f"rmcore.stages.{self.name}"


TORCH = ("torch", "transformers")
STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("prepare", (), ("seed", "data"), ("*.parquet", "label_ceiling.json"), content=data_content),
        Stage(
            "train",
            ("prepare",),
            ("seed", "model", "train"),
            ("best/*",),
            libraries=TORCH,
            without={"train": RUN_ONLY_FIELDS},
            kept=("best", "resume", "step_*"),
            finished=FINISHED_FILE,
            on_device=True,
            content=trained_content,
        ),
        Stage(
            "evaluate",
            ("prepare", "train"),
            ("seed", "evaluate"),
            ("rewards.parquet", "metrics.json"),
            libraries=TORCH,
            on_device=True,
            content=function_content,
        ),
        Stage(
            "landscape",
            ("prepare", "train"),
            ("seed", "landscape"),
            ("spectrum.json", "curvature.json"),
            libraries=TORCH,
            on_device=True,
            content=function_content,
        ),
        Stage("readiness", ("evaluate", "landscape"), ("readiness",), ("readiness.json",)),
        Stage(
            "policy",
            ("prepare",),
            ("seed", "policy"),
            ("policy.json", "model/*"),
            libraries=TORCH,
            without={"policy": (*SAMPLING_FIELDS, *MEASURING_FIELDS)},
            on_device=True,
            content=sft_content,
        ),
        Stage(
            "samples",
            ("prepare", "policy"),
            ("seed", "policy"),
            ("samples.parquet",),
            libraries=TORCH,
            without={"policy": MEASURING_FIELDS},
            kept=("drawn.jsonl",),
            on_device=True,
            content=sampled_content,
        ),
        Stage(
            "optimize",
            ("prepare", "train", "policy", "samples"),
            ("seed", "evaluate", "policy", "readiness"),
            ("rewards.parquet", "optimize.json"),
            libraries=TORCH,
            without={"policy": SAMPLING_FIELDS},
            on_device=True,
            content=function_content,
        ),
        Stage(
            "readiness_v2",
            ("evaluate", "landscape", "optimize", "readiness"),
            ("readiness",),
            ("readiness.json",),
            content=fit_content,
        ),
        Stage(
            "grpo",
            ("prepare", "train", "policy", "samples", "optimize"),
            ("seed", "train", "evaluate", "policy", "rlhf"),
            ("rlhf.json", "model/*"),
            libraries=(*TORCH, "trl"),
            without={"train": RUN_ONLY_FIELDS, "rlhf": ("wait_seconds", "micro_batch_size")},
            kept=("seed_*",),
            on_device=True,
            content=trained_policy_content,
        ),
        Stage(
            "population",
            ("prepare", "policy", "samples"),
            ("seed", "model", "train", "readiness", "validation"),
            ("rows.parquet",),
            libraries=TORCH,
            without={"train": RUN_ONLY_FIELDS},
            kept=("rows_*.parquet",),
            on_device=True,
            content=trained_content,
        ),
        Stage("validation", ("population",), ("seed", "readiness", "validation"), ("validation.json",)),
        Stage(
            "features",
            ("prepare",),
            ("seed", "model"),
            ("pairs.parquet", "differences.npy"),
            libraries=TORCH,
            kept=("part_*.npy",),
            on_device=True,
            content=model_content,
        ),
        Stage(
            "active",
            ("features",),
            ("seed", "active"),
            ("active.json",),
            without={"active": ("check",)},
            kept=("seed_*.json",),
            content=labeller_content,
        ),
        Stage(
            "active_check",
            ("features",),
            ("seed", "model", "train", "active"),
            ("check.json",),
            libraries=TORCH,
            without={"train": RUN_ONLY_FIELDS},
            kept=("check_*.json",),
            on_device=True,
            content=lambda config: model_content(config) | labeller_content(config),
        ),
    )
}
PIPELINE = ("prepare", "train", "evaluate", "landscape", "readiness")
POLICY = ("policy", "samples", "optimize")
"""What a policy adds before readiness is judged again."""


def pipeline_stages(config: PipelineConfig) -> tuple[str, ...]:
    """Stages of a pipeline run in order: with a policy its judged samples decide about readiness."""
    if config.policy is None:
        return PIPELINE
    judged = ("readiness_v2",) if is_judged(config) else ()
    return (*PIPELINE, *POLICY, *judged, *(() if config.rlhf is None else ("grpo",)))


def is_judged(config: PipelineConfig) -> bool:
    """Whether someone gives the policy's samples the gold reward."""
    policy = config.policy
    if policy is None:
        return False
    return policy.samples is not None or policy.judge is not None or config.data.source == "gold"


def device_type(name: str) -> str:
    """Resolve `auto` to cpu or cuda without importing torch: a CUDA build and a visible NVIDIA GPU make cuda."""
    if name != "auto":
        return name
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    driver = Path("/proc/driver/nvidia/gpus")
    has_gpu = driver.is_dir() and any(driver.iterdir())
    return "cuda" if has_gpu and not hidden and "+cpu" not in importlib.metadata.version("torch") else "cpu"


def stage_inputs(stage: Stage, config: PipelineConfig, upstream: Mapping[str, ArtifactRef]) -> dict[str, Any]:
    """Everything that can affect the outcome of a stage: what its key digests and its manifest records."""
    surroundings = stage_surroundings(stage, config)
    settings = config.model_dump(mode="json")
    for name in surroundings["content"]:
        group, setting = name.split(".")
        settings[group][setting] = "by content"
    for group, names in stage.without.items():
        settings[group] = settings[group] and {
            name: value for name, value in settings[group].items() if name not in names
        }
    return {
        "stage": stage.name,
        "config": {name: settings[name] for name in stage.config_fields},
        "upstream": {name: upstream[name].digest for name in stage.upstream},
        **surroundings,
    }


def stage_surroundings(stage: Stage, config: PipelineConfig) -> dict[str, Any]:
    """What affects the outcome of a stage beside settings and upstream: named content, libraries, code, device."""
    surroundings: dict[str, Any] = {
        "content": stage.content(config),
        "versions": {name: _minor_version(name) for name in stage.libraries},
        "code": code_digests(stage.module),
    }
    return surroundings | ({"device": device_type(config.device)} if stage.on_device else {})


def slug(stage: Stage, config: PipelineConfig) -> str:
    """Readable part of an artifact's folder name."""
    source = Path(config.data.source).name
    return {
        "prepare": f"{source}-seed{config.seed}",
        "train": f"{Path(config.model.name).name}-{source}-seed{config.seed}",
    }.get(stage.name, f"{config.study}-seed{config.seed}")


@cache  # a running process keeps the version that it imported, and reading the metadata takes 40 ms a library
def _minor_version(package: str) -> str:
    return ".".join(importlib.metadata.version(package).split(".")[:2])
