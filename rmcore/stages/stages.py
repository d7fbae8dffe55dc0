"""The stages of a pipeline: what each is given, and so what its key has. Imports no torch, which a cached run must not.

How they follow one another is in `rmcore.stages.order`; the code of each is `run` in the module of its name.
(Registration in MLflow follows. It is not a stage, because its outcome is stored in MLflow.)
"""

from typing import Annotated, Literal

from rmcore.config.base import Names, Settings
from rmcore.config.data import DataConfig, Shortcut
from rmcore.config.evaluate import EvaluateConfig, ReadinessConfig
from rmcore.config.judging import JudgingConfig
from rmcore.config.model import ModelConfig
from rmcore.config.rlhf import RlhfConfig
from rmcore.config.train import TrainConfig
from rmcore.core.capabilities import modules
from rmcore.core.metrics import METRICS
from rmcore.core.store import ArtifactRef
from rmcore.stages.stage import STAGES, Device, Measuring, Stage, stage
from rmcore.training.resume import FINISHED_FILE

CURVATURE = "lambda_max"
"""Metric of a capability that readiness takes where it was measured."""


class Training(Settings):
    """All that the training of a reward model on given pairs depends on, and no artifact; the precision is chosen."""

    seed: int
    device: Device
    model: ModelConfig
    train: TrainConfig
    attribute_weights: dict[str, float] | None


class Answering(Stage):
    """Arguments of a stage in which the policy, or the synthetic benchmark's writer, answers prompts."""

    prepared: ArtifactRef
    policy: ArtifactRef
    seed: int
    device: Device
    is_gold: bool
    """Whether the pairs are the synthetic benchmark's."""
    writer_shortcut: Shortcut | None
    """Shortcut of the synthetic benchmark's writer, where that is the policy."""
    policy_name: Annotated[str, Names("file")]
    engine: Literal["auto", "vllm", "generate"]
    temperature: float
    max_new_tokens: int
    num_prompts: int


class Judged(Stage):
    """Arguments of a stage that requests judgements, or weighs existing ones by the audit of their judge."""

    judge: Annotated[str | None, Names("judge")]
    judging: JudgingConfig | None


@stage("prepare", outcome=("*.parquet", "label_ceiling.json"))
class PrepareStage(Stage):
    """Raw preference data in, audited and split pairs out."""

    data: DataConfig
    seed: int


@stage("train", outcome=("best/*",), kept=("best", "resume", "step_*"), finished=FINISHED_FILE)
class TrainStage(Training, Stage):
    """Prepared pairs in, a checkpoint out."""

    prepared: ArtifactRef
    policy: ArtifactRef | None
    """A policy that was fine-tuned here, where the reward model starts from it."""


@stage("evaluate", outcome=("rewards.parquet", "metrics.json"))
class EvaluateStage(Measuring):
    """How good the rewards are on held-out pairs."""

    evaluate: EvaluateConfig
    seed: int


@stage("readiness", outcome=("readiness.json",))
class ReadinessStage(Stage):
    """The verdict on a reward model from labelled data."""

    prepared: ArtifactRef
    evaluated: ArtifactRef
    curvature: ArtifactRef | None
    num_resamples: int
    seed: int


@stage("policy", outcome=("policy.json", "model/*"))
class PolicyStage(Stage):
    """The policy that is to be optimised, fine-tuned here or named."""

    prepared: ArtifactRef
    seed: int
    device: Device
    demonstrated_shortcut: Shortcut | None
    """Shortcut of the synthetic benchmark whose answers `sft` learns; None: responses of the pairs."""
    drawn_from: Annotated[str | None, Names("file")]
    """The policy that samples are drawn from; None where they are given, and nothing is computed with one."""
    base: Annotated[str, Names("file")]
    sft_examples: int


@stage("samples", outcome=("samples.parquet", "unjudged.parquet", "left_out.json"), kept=("drawn.jsonl",))
class SamplesStage(Answering, Judged):
    """Answers of the policy to held-out prompts, with the scores of a judge."""

    samples_per_prompt: int
    samples: Annotated[str | None, Names("file")]
    judge_column: str
    topic_column: str | None


@stage("overoptimization", outcome=("rewards.parquet", "overoptimization.json"))
class OveroptimizationStage(Measuring, Judged):
    """The effect on the true reward of choosing among the samples by the reward model."""

    samples: ArtifactRef
    judged_by: str
    judge_ceiling: float | None
    num_resamples: int
    planned_kl: float
    seed: int


@stage("readiness_v2", outcome=("readiness.json",))
class ReadinessV2Stage(Judged):
    """The verdict where a policy is given, from its samples."""

    evaluated: ArtifactRef
    overoptimization: ArtifactRef
    readiness: ReadinessConfig


@stage(
    "confirmation",
    outcome=("confirmation.json",),
    kept=("unit.json", "drawn_*.jsonl", "served_*.json", "judged_*.jsonl"),
)
class ConfirmationStage(Measuring, Answering, Judged):
    """Best-of-n served on fresh prompts."""

    fresh_prompts: int
    people: str | None
    planned_kl: float
    min_gain: float


@stage("grpo", outcome=("rlhf.json", "model/*"), libraries=("trl",), kept=("seed_*",))
class GrpoStage(Measuring, Judged):
    """The policy, trained against the reward model."""

    policy: ArtifactRef
    samples: ArtifactRef
    overoptimization: ArtifactRef
    seed: int
    is_gold: bool
    policy_name: Annotated[str, Names("file")]
    temperature: float
    max_new_tokens: int
    num_resamples: int
    rlhf: RlhfConfig


def stage_of_metric(metric: str) -> str | None:
    """Return the capability's stage whose record has a metric; None: nothing here measures it."""
    return METRICS[metric].stage if metric in METRICS else None


OPTIONAL = tuple(one.name for file in modules("stage") for one in STAGES.values() if one.__module__ == file.__name__)
"""Stages of capabilities, each of which runs where a config has the section of its name."""
