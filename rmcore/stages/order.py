"""The order of the stages, once: for runs, plans and tests. Imports no torch.

prepare -> train -> evaluate -> readiness                                    the pipeline
           those of capabilities that are requested                          before readiness if that takes a number
           policy -> samples -> overoptimization -> readiness_v2             where a policy is given
           policy -> train                                                   where the reward model starts from it
                     samples -> overoptimization -> grpo                     where the policy is trained on
           policy -> confirmation                                            where best-of-n is served

A flow requests some of them by name, and what these read is requested with them.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rmcore.config.base import Settings
from rmcore.config.model import FROM_POLICY, TINY_SIZES
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import SFT, WORLD, PolicyConfig
from rmcore.core.errors import ConfigError
from rmcore.core.hardware import choose_precision, device_type
from rmcore.core.store import ArtifactRef
from rmcore.stages import stages
from rmcore.stages.stage import Measuring, Stage, once
from rmcore.stages.stages import CURVATURE, OPTIONAL, STAGES, stage_of_metric

Run = Callable[[Stage], ArtifactRef]
"""Gives the artifact of a stage: by running it, from the store, or, in a plan, one that is not there (`missing`)."""
POLICY = ("policy", "samples", "overoptimization")
"""Stages that a policy adds before readiness is assessed again."""
Section = TypeVar("Section")
REFUSALS = {
    "policy": "there is no policy in this config, so nothing would be sampled; start from preset policy, or set "
    "policy.name to sft, a folder or a hub name.",
    "rlhf": "there is no training of a policy in this config; set rlhf.steps, or start from preset rlhf.",
}
"""Messages about a config that lacks a section, by the section's name."""


class _Order:
    """Each stage of a config as a property, which has it run after those that it reads, once.

    Args:
        config: of the run.
        run: runs a stage, or plans it.
        given: artifacts by stage that are taken instead.
    """

    def __init__(self, config: PipelineConfig, run: Run, given: Mapping[str, ArtifactRef]) -> None:
        self.given_config, self.config, self.run = config, settled(config), run
        vars(self).update(given)  # where `once` keeps its values

    @once
    def prepare(self) -> ArtifactRef:
        return self._run(stages.PrepareStage(data=self.config.data, seed=self.config.seed))

    @once
    def train(self) -> ArtifactRef:
        policy = self.policy if starts_from_sft(self.config) else None
        return self._run(stages.TrainStage(prepared=self.prepare, policy=policy, **dict(training_of(self.config))))

    @once
    def evaluate(self) -> ArtifactRef:
        return self._run(stages.EvaluateStage(**self._model, evaluate=self.config.evaluate, seed=self.config.seed))

    @once
    def readiness(self) -> ArtifactRef:
        return self._run(
            stages.ReadinessStage(
                prepared=self.prepare,
                evaluated=self.evaluate,
                curvature=self._measured(CURVATURE),
                num_resamples=self.config.evaluate.num_resamples,
                seed=self.config.seed,
            )
        )

    @once
    def policy(self) -> ArtifactRef:
        config, policy = self.config, required_policy(self.config)
        return self._run(
            stages.PolicyStage(
                prepared=self.prepare,
                seed=config.seed,
                device=config.device,
                demonstrated_shortcut=config.data.gold.shortcut if config.is_gold else None,
                drawn_from=policy.name if policy.samples is None else None,
                base=policy.base,
                sft_examples=policy.sft_examples,
            )
        )

    @once
    def samples(self) -> ArtifactRef:
        policy = required_policy(self.config)
        judged = {"judge": policy.asked_judge, "judging": policy.asked_judging}
        return self._run(stages.SamplesStage(**(_named(stages.SamplesStage, policy) | self._answering | judged)))

    @once
    def overoptimization(self) -> ArtifactRef:
        config, policy = self.config, required_policy(self.config)
        values = _named(stages.OveroptimizationStage, config, config.evaluate, config.readiness, policy)
        judged = {"judge": policy.verdict_judge, "judging": policy.verdict_judging, "judged_by": config.judged_by}
        read = self._model | {"samples": self.samples}
        return self._run(stages.OveroptimizationStage(**(values | judged | read)))

    @once
    def readiness_v2(self) -> ArtifactRef:
        policy = required_policy(self.config)
        return self._run(
            stages.ReadinessV2Stage(
                evaluated=self.evaluate,
                overoptimization=self.overoptimization,
                readiness=self.config.readiness,
                judge=policy.verdict_judge,
                judging=policy.verdict_judging,
            )
        )

    @once
    def confirmation(self) -> ArtifactRef:
        policy = required_policy(self.config)
        values = _named(stages.ConfirmationStage, policy, self.config.readiness)
        judged = {"judging": policy.verdict_judging}
        return self._run(stages.ConfirmationStage(**(values | judged | self._model | self._answering)))

    @once
    def grpo(self) -> ArtifactRef:
        config, policy, _ = self.config, required_policy(self.config), required(self.config.rlhf, "rlhf")
        values = _named(stages.GrpoStage, config.evaluate, policy, config)
        own = {"is_gold": config.is_gold, "policy_name": policy.name, "judging": policy.verdict_judging}
        read = {"overoptimization": self.overoptimization, "policy": self.policy, "samples": self.samples}
        return self._run(stages.GrpoStage(**(values | own | self._model | read)))

    def run_stage(self, name: str) -> ArtifactRef:
        """Return the artifact of a stage by its name; that of a capability is given settings by the names of fields."""
        if name in OPTIONAL and name not in vars(self):
            stage, config = STAGES[name], self.config
            settings = section(config, name)  # before what it reads is made
            own = {field: getattr(config, field) for field in stage.model_fields.keys() - Measuring.model_fields.keys()}
            given = self._model if issubclass(stage, Measuring) else {"prepared": self.prepare}
            vars(self)[name] = self._run(stage(**(given | own | {name: settings})))
        found: ArtifactRef = getattr(self, name)
        return found

    def _measured(self, metric: str) -> ArtifactRef | None:
        """Return the artifact whose record has a capability's metric; None where the config does without it."""
        name = stage_of_metric(metric)
        return None if name is None or getattr(self.config, name) is None else self.run_stage(name)

    @property
    def _model(self) -> dict[str, Any]:
        """The fields of `Measuring`."""
        model, device = self.config.model, self.config.device
        loaded = {"device": device, "trust_remote_code": model.trust_remote_code, "render_fn": model.render_fn}
        return {"prepared": self.prepare, "trained": self.train, **loaded}

    @property
    def _answering(self) -> dict[str, Any]:
        """The fields of `Answering`."""
        config, policy = self.config, required_policy(self.config)
        return {
            **_named(stages.Answering, policy, config),
            **{"prepared": self.prepare, "policy": self.policy, "policy_name": policy.name},
            "is_gold": config.is_gold,
            "writer_shortcut": config.data.gold.shortcut if policy.name == WORLD else None,
        }

    def _run(self, stage: Stage) -> ArtifactRef:
        config = self.given_config
        source, model = Path(config.data.source).name, Path(config.model.name).name
        named = {"prepare": source, "train": f"{model}-{source}"}.get(stage.name, config.study)
        return self.run(stage.changed(slug=f"{named}-seed{config.seed}"))


def _named(stage: type[Stage], *sections: Settings) -> dict[str, Any]:
    """Return the fields of a stage that sections have under the same names; of several the last one counts."""
    return {
        name: getattr(one, name) for one in sections for name in stage.model_fields if name in type(one).model_fields
    }


def request(
    names: Iterable[str], config: PipelineConfig, run: Run, given: Mapping[str, ArtifactRef] | None = None
) -> None:
    """Have the stages `names` run, each after those that it reads.

    Raises:
        ConfigError: the config has no section that one of them needs.
    """
    order = _Order(config, run, given or {})
    for name in names:
        order.run_stage(name)


def resolve(
    names: Iterable[str], config: PipelineConfig, given: Mapping[str, ArtifactRef] | None = None
) -> dict[str, Stage]:
    """Return the stages that `request` would run, in order, and run none of them. Raises as `request`."""
    planned: dict[str, Stage] = {}

    def note(stage: Stage) -> ArtifactRef:
        planned[stage.name] = stage
        return missing(stage)

    request(names, config, note, given)
    return planned


def drawn(names: Iterable[str], config: PipelineConfig) -> str:
    """Draw the stages that `request` would run, one a line, with those that it follows. Raises as `request`."""
    planned = resolve(names, config).values()
    return "\n".join(f"{', '.join(stage.upstream)} ──> {stage.name}".removeprefix(" ──> ") for stage in planned)


def stage_of(name: str, config: PipelineConfig, upstream: Mapping[str, ArtifactRef] | None = None) -> Stage:
    """Return stage `name` of a config with the artifacts `upstream`, others being missing. Raises as `request`."""
    return resolve([name], config, {stage: ref for stage, ref in (upstream or {}).items() if stage != name})[name]


def missing(stage: Stage) -> ArtifactRef:
    """Return the name of an artifact that is not there."""
    return ArtifactRef(stage.name, "", "", "")


def pipeline_stages(config: PipelineConfig) -> tuple[str, ...]:
    """Return the stages of a pipeline run in order. With a policy, its judged samples decide about readiness."""
    if config.policy is None or only_starts_reward_model(config):
        return tuple(resolve(labelled_stages(config), config))
    judged = ("readiness_v2",) if is_judged(config) else ()
    trained = () if config.rlhf is None else ("grpo",)
    return tuple(resolve((*labelled_stages(config), *POLICY, *judged, *trained), config))


def labelled_stages(config: PipelineConfig) -> tuple[str, ...]:
    """Return the stages that need no policy; the optional ones only if the config has their section."""
    return ("train", "evaluate", "readiness", *(name for name in OPTIONAL if getattr(config, name) is not None))


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


def starts_from_sft(config: PipelineConfig) -> bool:
    """Return whether the reward model starts from a policy that this pipeline fine-tunes first."""
    return config.model.name == FROM_POLICY and required_policy(config).name == SFT


def settled(config: PipelineConfig) -> PipelineConfig:
    """Return the config with a precision in place of `auto`, and a given policy's name as the model's name.

    Keys contain the chosen precision, and every host computes in it.
    """
    name = config.started_from
    if config.train.precision == "auto":
        chosen = choose_precision(device_type(config.device), tiny=name in TINY_SIZES)
        config = config.model_copy(update={"train": config.train.model_copy(update={"precision": chosen})})
    if config.model.name != FROM_POLICY or starts_from_sft(config):
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"name": name})})


def training_of(config: PipelineConfig) -> stages.Training:
    """Return what the training of a config's reward model depends on, settled."""
    config = settled(config)
    return stages.Training(
        seed=config.seed,
        device=config.device,
        model=config.model,
        train=config.train,
        attribute_weights=config.data.attribute_weights,
    )


def required(section: Section | None, name: str) -> Section:
    """Return the section `name` of a config.

    Raises:
        ConfigError: the config does without it.
    """
    if section is None:
        raise ConfigError(REFUSALS[name])
    return section


def required_policy(config: PipelineConfig) -> PolicyConfig:
    """Return the policy's settings. Raises as `required`."""
    return required(config.policy, "policy")


def section(config: PipelineConfig, name: str) -> Any:
    """Return the settings of a capability's stage; the usual ones where a config has none."""
    usual: Any = STAGES[name].model_fields[name].annotation
    settings = getattr(config, name)
    return usual() if settings is None else settings
