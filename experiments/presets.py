"""Whole pipeline runs by name: `rm-opt run --preset NAME`, each one a change of the defaults with its reason.

What is said here of each is what `rm-opt run --presets` shows.

All but h100 and h200 fix the token budget, which is otherwise chosen from the memory of the device: micro-batches then
round alike on every machine.
"""

from dataclasses import dataclass

from rmcore.config.data import NO_PAIRS, DataConfig, GoldConfig
from rmcore.config.evaluate import EvaluateConfig, ReadinessConfig
from rmcore.config.model import FROM_POLICY, LoraSettings, ModelConfig
from rmcore.config.pipeline import PipelineConfig, sections
from rmcore.config.policy import PolicyConfig
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.config.train import TrainConfig
from rmcore.core.hardware import HARDWARE, hopper_pairs

OWN = DataConfig(source=NO_PAIRS)
# A reward model of the gold world that is worth optimising against: more pairs and steps than the demo has.
WORLD = DataConfig(gold=GoldConfig(num_prompts=4000), eval_limit=1000)
GOOD = TrainConfig(
    optimizer="muon", lr=2e-3, steps=300, pairs_per_step=32, eval_every=100, warmup_steps=20, token_budget=8192
)


def labelled_where_the_policy_is(length_bias: float) -> DataConfig:
    """Pairs of the synthetic benchmark whose answers have the tail that the policy's samples have."""
    gold = GoldConfig(num_prompts=8000, tail_share=0.2, length_bias=length_bias)
    return DataConfig(gold=gold, eval_limit=600)


# A reward model that is worth optimising against: it starts from the policy, and its pairs are labelled where that is.
RLHF = PipelineConfig(
    study="rlhf",
    data=labelled_where_the_policy_is(length_bias=0.0),
    model=ModelConfig(name=FROM_POLICY, max_seq_len=256),
    train=GOOD.model_copy(update={"steps": 600}),
    evaluate=EvaluateConfig(train_pairs=300),
    readiness=ReadinessConfig(planned_optimizer="kl_optimum", planned_kl=2.0),
    policy=PolicyConfig(base="tiny-small", num_prompts=120, max_new_tokens=160),
    # Many prompts a step, and a penalty that rises beyond the 2 nats that readiness was judged at: with 16 prompts
    # and 0.05 the policy went to 4; 60 steps from 0.1 overshoot to 3.6, and keep no more (experiments/log/rlhf.md).
    rlhf=RlhfConfig(
        steps=40,
        prompts_per_step=24,
        learning_rate=1e-4,
        kl_beta=0.2,
        kl_target=2.0,
        rewards="local",
        measure_every=5,
        num_prompts=24,
        samples_per_prompt=4,
        watch=WatchConfig(),
    ),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A run with a name."""

    purpose: str
    """Purpose, in one or two sentences."""
    config: PipelineConfig
    command: str = "run"
    """The command that starts from it, without `rm-opt` and --preset."""
    time: str | None = None
    """How long it takes on two idle cores; None: it is for pairs of your own, whose number decides."""


DESCRIBED: dict[str, Preset] = {
    "demo": Preset(
        "The first five minutes. All is measured; samples of the synthetic benchmark's own writer are judged, so that "
        "the verdict is one about optimisation.",
        PipelineConfig(
            study="demo",
            model=ModelConfig(name="tiny", max_seq_len=256),
            train=TrainConfig(lr=1e-3, steps=150, eval_every=50, warmup_steps=20, token_budget=8192),
            evaluate=EvaluateConfig(train_pairs=300),
            policy=PolicyConfig(name="world"),
        ),
        time="3 min",
    ),
    "policy": Preset(
        "A policy of its own, and readiness v2 on its samples.",
        PipelineConfig(
            study="policy",
            data=WORLD,
            model=ModelConfig(name="tiny", max_seq_len=256),
            train=GOOD,
            evaluate=EvaluateConfig(train_pairs=300),
            policy=PolicyConfig(),
        ),
        time="15 min",
    ),
    "rlhf": Preset(
        "From preferences to a policy, cold: reward model, readiness, GRPO against it.",
        RLHF,
        command="rlhf",
        time="8 min",
    ),
    "rlhf-flawed": Preset(
        "The same with annotators who prefer length: in half of the pairs they name the longer answer, whatever it "
        "says. Readiness refuses it, and a policy trained against it all the same loses the true reward.",
        RLHF.model_copy(update={"study": "rlhf-flawed", "data": labelled_where_the_policy_is(0.5)}),
        command="rlhf",
        time="8 min",
    ),
    "smoke": Preset(
        "The pipeline's chain in seconds, to see that everything is wired: no number of it means anything.",
        PipelineConfig(
            study="smoke",
            data=DataConfig(gold=GoldConfig(num_prompts=60, pairs_per_prompt=2)),
            model=ModelConfig(name="tiny", max_seq_len=256),
            train=TrainConfig(lr=1e-3, steps=6, eval_every=3, log_every=2, token_budget=8192),
            **sections("smoke"),
        ),
        time="1 min",
    ),
    "minilm": Preset(
        "A pretrained 22 M encoder that needs no hub, for your own pairs: --data FILE.",
        PipelineConfig(
            study="minilm",
            data=OWN,
            model=ModelConfig(name="minilm", max_seq_len=256),
            train=TrainConfig(lr=5e-5, epochs=None, eval_every=50, token_budget=8192),
        ),
    ),
    "cpu": Preset(
        "The settings of `rm-opt train --preset cpu`, which torchrun and Slurm start.",
        PipelineConfig(
            study="cpu",
            data=OWN,
            model=ModelConfig(name="minilm", max_seq_len=256),
            train=TrainConfig(lr=5e-5, epochs=None, **HARDWARE["cpu"]),
        ),
    ),
    "h100": Preset(
        "For one H100: 80 GB hold DeBERTa-large whole with 128 pairs a step; 7 B want 32, 13 B 16 "
        "(train.pairs_per_step). Name your data and model.",
        PipelineConfig(
            study="h100",
            data=OWN,
            model=ModelConfig(name="deberta", max_seq_len=512),
            train=TrainConfig(**HARDWARE["h100"], pairs_per_step=hopper_pairs(435_000_000)),
        ),
    ),
    "h200": Preset(
        "For one H200: 141 GB hold 8 B float32 weights and their activations, not their Adam moments: LoRA. Name your "
        "data and model.",
        PipelineConfig(
            study="h200",
            data=OWN,
            model=ModelConfig(name="llama", max_seq_len=2048, lora=LoraSettings()),
            train=TrainConfig(lr=1e-4, **HARDWARE["h200"], pairs_per_step=hopper_pairs(8_000_000_000)),
        ),
    ),
}
"""All presets, with what each is for."""

PRESETS: dict[str, PipelineConfig] = {name: one.config for name, one in DESCRIBED.items()}
