"""The smallest chain of stages with a policy, each made once and kept, for the tests of those stages."""

from pathlib import Path

from experiments.presets import PRESETS
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.evaluate import EvaluateConfig, ReadinessConfig
from rmcore.config.policy import PolicyConfig
from rmcore.core.store import ArtifactRef, Store
from rmcore.stages.order import pipeline_stages, request, stage_of
from rmcore.stages.run import run_stage
from rmcore.stages.stage import Stage

SMOKE = PRESETS["smoke"]
CONFIG = SMOKE.model_copy(
    update={
        "device": "cpu",
        "data": DataConfig(gold=GoldConfig(num_prompts=60, pairs_per_prompt=1), test_fraction=0.2),
        "evaluate": EvaluateConfig(num_resamples=100, train_pairs=20),
        "readiness": ReadinessConfig(planned_kl=0.4),
        "policy": PolicyConfig(
            sft_examples=130, num_prompts=8, samples_per_prompt=8, max_new_tokens=24,
            engine="generate",
        ),
    }
)  # fmt: skip


def changed(config=CONFIG, **groups):
    """The config with some settings of some groups changed: `policy={"temperature": 2.0}`."""
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=settings) if isinstance(settings, dict) else settings
            for name, settings in groups.items()
        }
    )


class Chain:
    """Artifacts of a config in a store, made when they are asked for, in this process."""

    def __init__(self, store: Store, config=CONFIG, given: dict[str, ArtifactRef] | None = None):
        self.store, self.config, self.given = store, config, given or {}
        self.executed: list[str] = []

    def with_config(self, **groups) -> "Chain":
        """The same store under a changed config."""
        return Chain(self.store, changed(self.config, **groups), self.given)

    def ref(self, name: str) -> ArtifactRef:
        """The artifact of one stage and, before, of all it needs."""
        refs = dict(self.given)

        def make(stage: Stage) -> ArtifactRef:
            key, outcome, is_resumable = stage.key, stage.outcome, bool(stage.kept)
            with self.store.lock(key):  # another process of the tests may be at it
                if self.store.find(stage.name, key) is None:
                    with self.store.publish(
                        stage.name, stage.slug, stage.inputs, outcome=outcome, resumable=is_resumable
                    ) as out:
                        run_stage(stage, out)
                    self.executed.append(stage.name)
            refs[stage.name] = self.store.ref(stage.name, key)
            return refs[stage.name]

        request([name], self.config, make, self.given)
        return refs[name]

    def upstream(self, name: str) -> dict[str, ArtifactRef]:
        """The artifacts that one stage reads."""
        return {needed: self.ref(needed) for needed in stage_of(name, self.config).upstream}

    def folder(self, name: str) -> Path:
        """Where the artifact of one stage lies."""
        return Path(self.ref(name).path)

    def key(self, name: str) -> str:
        """Of the stage's artifact; only what is upstream of it is made."""
        return stage_of(name, self.config, self.upstream(name)).key

    def all(self) -> list[str]:
        """Make everything of the config; the stages that had to run."""
        for name in pipeline_stages(self.config):
            self.ref(name)
        return self.executed
