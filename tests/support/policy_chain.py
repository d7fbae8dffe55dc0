"""The smallest chain of stages with a policy, each made once and kept, for the tests of those stages."""

from pathlib import Path

from experiments.presets import PRESETS
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.evaluate import EvaluateConfig
from rmcore.config.landscape import LandscapeConfig
from rmcore.config.policy import PolicyConfig
from rmcore.config.readiness import ReadinessConfig
from rmcore.core.store import ArtifactRef, Store
from rmcore.stages.registry import STAGES, pipeline_stages, stage_call
from rmcore.stages.run import run_stage

SMOKE = PRESETS["smoke"]
CONFIG = SMOKE.model_copy(
    update={
        "device": "cpu",
        "data": DataConfig(gold=GoldConfig(num_prompts=60, pairs_per_prompt=1), test_fraction=0.2),
        "evaluate": EvaluateConfig(num_resamples=100, train_pairs=20),
        "landscape": LandscapeConfig(num_pairs=3, lanczos_steps=4, trace_probes=2, top_k=2),
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
        if name in self.given:
            return self.given[name]
        refs = {needed: self.ref(needed) for needed in STAGES[name].needs(self.config)}
        call = stage_call(name, self.config, refs)
        with self.store.lock(call.key):  # another process of the tests may be at it
            if self.store.find(name, call.key) is None:
                outcome, is_resumable = call.stage.outcome, bool(call.stage.kept)
                with self.store.publish(name, call.slug, call.inputs, outcome=outcome, resumable=is_resumable) as out:
                    run_stage(name, call.config, {needed: Path(ref.path) for needed, ref in refs.items()}, out)
                self.executed.append(name)
        return self.store.ref(name, call.key)

    def folder(self, name: str) -> Path:
        """Where the artifact of one stage lies."""
        return Path(self.ref(name).path)

    def key(self, name: str) -> str:
        """Of the stage's artifact; only what is upstream of it is made."""
        refs = {needed: self.ref(needed) for needed in STAGES[name].needs(self.config)}
        return stage_call(name, self.config, refs).key

    def all(self) -> list[str]:
        """Make everything of the config; the stages that had to run."""
        for name in pipeline_stages(self.config):
            self.ref(name)
        return self.executed
