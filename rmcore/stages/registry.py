"""The stages of a pipeline and what their keys contain. Imports no torch: a cached run must not pay for it.

    prepare -> train -> evaluate -> readiness                                    the pipeline
                        landscape                                                where curvature is requested
               probe                                                             where probes are requested
               benchmark                                                         where benchmarks are named
               policy -> samples -> overoptimization -> readiness_v2             where a policy is given
               policy -> train                                                   where the reward model starts from it
                         samples -> overoptimization -> grpo                     where the policy is trained on
               policy -> confirmation                                            where best-of-n is served

(Registration in MLflow follows. It is not a stage, because its outcome is stored in MLflow.)
"""

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rmcore.config.model import FROM_POLICY
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.digests import make_key
from rmcore.core.fingerprints import code_digests
from rmcore.core.store import ArtifactRef
from rmcore.stages.reads import keyed, masked, settled, starts_from_sft
from rmcore.stages.requirements import REQUIRED, curvature_settings
from rmcore.training.resume import FINISHED_FILE


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: what it reads, its code, its place in the chain."""

    name: str
    upstream: tuple[str, ...]
    reads: tuple[str, ...]
    """Settings, sections and properties of a config that the stage sees, by dotted path; its key has all of them."""
    outcome: tuple[str, ...]
    """Globs of the files that downstream stages read; their content is the artifact's digest."""
    libraries: tuple[str, ...] = ()
    """Packages whose major.minor version enters the key."""
    hidden: tuple[str, ...] = ()
    """Modules that the stage imports and whose code does not enter the key."""
    kept: tuple[str, ...] = ()
    """Globs of the files that an interrupted attempt leaves for the next one to resume from."""
    finished: str = ""
    """File that such a stage writes last; without it the attempt was interrupted, whatever it reported."""

    @property
    def module(self) -> str:
        """Module with this stage's `run(settings, upstream, out, tracker, report)`."""
        return f"rmcore.stages.{self.name}"

    def needs(self, config: PipelineConfig) -> tuple[str, ...]:
        """Return the stages that it reads under a config.

        The curvature is among them only if it is measured, the policy also if the reward model starts from it.
        """
        from_policy = self.name == "train" and starts_from_sft(config)
        upstream = tuple(name for name in self.upstream if name != "landscape" or config.landscape is not None)
        return (*upstream, "policy") if from_policy else upstream

    @property
    def on_device(self) -> bool:
        """Whether it runs a model, so the device type enters the key and one slot of the device is taken."""
        return "device" in self.reads


TORCH = ("torch", "transformers")
LOADED = ("device", "model.trust_remote_code", "model.render_fn")
"""Settings of a stage that loads a trained reward model."""
SAMPLING = ("writer_shortcut", "policy.name", "policy.engine", "policy.temperature", "policy.max_new_tokens")
"""Settings of a stage that samples from the policy, or from the synthetic benchmark's writer."""
JUDGED = ("policy.judge", "policy.verdict_judging")
"""Settings of a stage that requests judgements and gives a verdict."""
AUDITED = ("policy.verdict_judge", "policy.verdict_judging")
"""Settings of a stage that weights existing judgements by the judge's audit, and requests none."""
HIDDEN_OF_TRAINING = ()
STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("prepare", (), ("seed", "data"), ("*.parquet", "label_ceiling.json")),
        Stage(
            "train",
            ("prepare",),
            ("seed", "device", "model", "train", "data.attribute_weights"),
            ("best/*",),
            libraries=TORCH,
            hidden=HIDDEN_OF_TRAINING,
            kept=("best", "resume", "step_*"),
            finished=FINISHED_FILE,
        ),
        Stage(
            "evaluate",
            ("prepare", "train"),
            ("seed", *LOADED, "evaluate"),
            ("rewards.parquet", "metrics.json"),
            libraries=TORCH,
        ),
        Stage("landscape", ("prepare", "train"), ("seed", *LOADED, "landscape"), ("spectrum.json",), libraries=TORCH),
        Stage("probe", ("prepare", "train"), ("seed", *LOADED, "probe"), ("probe.json",), libraries=TORCH),
        Stage(
            "readiness", ("prepare", "evaluate", "landscape"), ("seed", "evaluate.num_resamples"), ("readiness.json",)
        ),
        Stage(
            "benchmark",
            ("prepare", "train"),
            (*LOADED, "benchmark"),
            ("benchmark.json", "rewards_*.parquet"),
            libraries=TORCH,
        ),
        Stage(
            "policy",
            ("prepare",),
            ("seed", "device", "demonstrated_shortcut", "policy.drawn_from", "policy.base", "policy.sft_examples"),
            ("policy.json", "model/*"),
            libraries=TORCH,
        ),
        Stage(
            "samples",
            ("prepare", "policy"),
            (
                *("seed", "device", "is_gold", *SAMPLING, "policy.num_prompts", "policy.samples_per_prompt"),
                *("policy.samples", "policy.judge_column", "policy.topic_column"),
                *("policy.asked_judge", "policy.asked_judging"),
            ),
            ("samples.parquet", "unjudged.parquet", "left_out.json"),
            libraries=TORCH,
            kept=("drawn.jsonl",),
        ),
        Stage(
            "overoptimization",
            ("prepare", "train", "samples"),
            (
                *("seed", *LOADED, "judged_by", "policy.judge_ceiling", *AUDITED),
                *("evaluate.num_resamples", "readiness.planned_kl"),
            ),
            ("rewards.parquet", "overoptimization.json"),
            libraries=TORCH,
        ),
        Stage(
            "readiness_v2", ("evaluate", "landscape", "overoptimization"), ("readiness", *AUDITED), ("readiness.json",)
        ),
        Stage(
            "confirmation",
            ("prepare", "train", "policy"),
            (
                *("seed", *LOADED, "is_gold", *SAMPLING, *JUDGED, "policy.num_prompts", "policy.fresh_prompts"),
                *("policy.people", "readiness.planned_kl", "readiness.min_gain"),
            ),
            ("confirmation.json",),
            libraries=TORCH,
            kept=("unit.json", "drawn_*.jsonl", "served_*.json", "judged_*.jsonl"),
        ),
        Stage(
            "grpo",
            ("prepare", "train", "policy", "samples", "overoptimization"),
            (
                *("seed", *LOADED, "is_gold", *JUDGED, "policy.name", "policy.temperature", "policy.max_new_tokens"),
                *("evaluate.num_resamples", "rlhf"),
            ),
            ("rlhf.json", "model/*"),
            libraries=(*TORCH, "trl"),
            kept=("seed_*",),
        ),
    )
}
POLICY = ("policy", "samples", "overoptimization")
"""Stages that a policy adds before readiness is assessed again."""


def pipeline_stages(config: PipelineConfig) -> tuple[str, ...]:
    """Return the stages of a pipeline run in order. With a policy, its judged samples decide about readiness."""
    measured = labelled_stages(config)
    if config.policy is None or only_starts_reward_model(config):
        return in_order(measured, config)
    judged = ("readiness_v2",) if is_judged(config) else ()
    return in_order((*measured, *POLICY, *judged, *(() if config.rlhf is None else ("grpo",))), config)


def labelled_stages(config: PipelineConfig) -> tuple[str, ...]:
    """Return the stages that need no policy, in order; the optional ones only if the config has their section."""
    curvature = () if config.landscape is None else ("landscape",)
    optional = {"probe": config.probe, "benchmark": config.benchmark}
    more = (name for name, settings in optional.items() if settings is not None)
    return ("prepare", "train", "evaluate", *curvature, "readiness", *more)


def in_order(names: Iterable[str], config: PipelineConfig) -> tuple[str, ...]:
    """Return the stages so that each follows those it needs: the policy first if training starts from it."""
    listed = tuple(names)
    if "train" not in listed or not starts_from_sft(config):
        return listed
    rest = [name for name in listed if name != "policy"]
    place = rest.index("train")
    return (*rest[:place], "policy", *rest[place:])


def only_starts_reward_model(config: PipelineConfig) -> bool:
    """Return whether the policy only provides the weights from which the reward model starts.

    Its samples are not judged then, and it is not trained.
    """
    return config.model.name == FROM_POLICY and config.rlhf is None and not is_judged(config)


def is_judged(config: PipelineConfig) -> bool:
    """Return whether the policy's samples are judged."""
    policy = config.policy
    if policy is None:
        return False
    return policy.samples is not None or policy.judge is not None or config.is_gold


@dataclass(frozen=True, slots=True)
class StageCall:
    """One stage with a config and upstream artifacts: everything that it receives, and its key."""

    stage: Stage
    config: PipelineConfig
    """Settled (`rmcore.stages.reads`); the stage sees only what it reads."""
    upstream: Mapping[str, ArtifactRef]
    slug: str
    """Readable part of the artifact's folder name."""
    inputs: Mapping[str, Any]
    """Everything that can affect the outcome, as the manifest records it."""
    key: str
    """Digest of `inputs`."""

    @property
    def device(self) -> str | None:
        """Device that it runs a model on; None: it runs none."""
        return self.config.device if self.stage.on_device else None

    @property
    def num_processes(self) -> int:
        """Number of processes that run it together, each on its own GPU where it runs a model."""
        return self.config.train.num_processes if self.stage.name == "train" else 1


def stage_config(name: str, config: PipelineConfig) -> PipelineConfig:
    """Return the config that stage `name` receives: settled, and reading a setting that it does not declare raises.

    Raises:
        ConfigError: the config has no section that the stage needs.
    """
    return masked(_complete(name, config), name, STAGES[name].reads)


def stage_settings(name: str, config: PipelineConfig) -> dict[str, Any]:
    """Return the settings of stage `name` as they enter its key.

    Raises:
        ConfigError: the config has no section that the stage needs.
        RmcoreError: a file, model or function that the settings name does not exist.
    """
    return keyed(_complete(name, config), STAGES[name].reads)


def _complete(name: str, config: PipelineConfig) -> PipelineConfig:
    for section in {path.partition(".")[0] for path in STAGES[name].reads} & REQUIRED.keys():
        REQUIRED[section](config)
    if name == "landscape":
        config = config.model_copy(update={"landscape": curvature_settings(config)})
    return settled(config)


def stage_call(name: str, config: PipelineConfig, upstream: Mapping[str, ArtifactRef]) -> StageCall:
    """Return settings and key of stage `name`; `upstream` may hold more artifacts than the stage reads.

    Files and models that the settings name are read here for their digests, so this is called once per stage.

    Raises:
        ConfigError: the config has no section that the stage needs.
        RmcoreError: a file, model or function that the settings name does not exist.
    """
    stage = STAGES[name]
    read = {needed: upstream[needed] for needed in stage.needs(config)}
    inputs = {
        "stage": stage.name,
        "config": stage_settings(name, config),
        "upstream": {name: ref.digest for name, ref in read.items()},
        **stage_code(stage),
    }
    return StageCall(stage, settled(config), read, _slug(name, config), inputs, make_key(inputs))


def stage_code(stage: Stage) -> dict[str, dict[str, str]]:
    """Return the versions and code digests that affect a stage's outcome in addition to settings and upstream."""
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


@cache  # a process keeps the version that it imported, and reading the metadata takes 40 ms per library
def _minor_version(package: str) -> str:
    return ".".join(importlib.metadata.version(package).split(".")[:2])
