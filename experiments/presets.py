"""Whole pipeline runs by name: `rm-opt run --preset NAME`, each one a change of the defaults with its reason.

What is said here of each is what `rm-opt presets` shows.

All but h100 and h200 fix the token budget, which is otherwise chosen from free memory: micro-batches then round alike
on every machine.
"""

from dataclasses import dataclass

from rmcore.config.active import ActiveConfig
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.evaluate import EvaluateConfig
from rmcore.config.landscape import CurvaturePart, LandscapeConfig
from rmcore.config.model import FROM_POLICY, LoraSettings, ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.config.readiness import ReadinessConfig
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.config.train import TrainConfig
from rmcore.config.validation import ValidationConfig
from rmcore.core.hardware import HARDWARE

QUICK_PARTS: tuple[CurvaturePart, ...] = ("normalized", "gauss_newton", "noise")
"""On a CPU, where a Hessian product with a pretrained model takes seconds; `rm-opt analyze` measures the others."""
ON_A_CPU = LandscapeConfig(parts=QUICK_PARTS, num_pairs=8, lanczos_steps=10, trace_probes=4, top_k=3)
"""Curvature of a pretrained model: it decides nothing, so it does not take longer than the training."""

# A reward model of the gold world that is worth optimising against: more pairs and steps than the demo has.
WORLD = DataConfig(gold=GoldConfig(num_prompts=4000), eval_limit=1000)
GOOD = TrainConfig(
    optimizer="muon", lr=2e-3, steps=300, pairs_per_step=32, eval_every=100, warmup_steps=20, token_budget=8192
)


def labelled_where_the_policy_is(length_bias: float) -> DataConfig:
    """Pairs of the gold world whose answers have the tail that the policy's samples have."""
    gold = GoldConfig(num_prompts=8000, tail_share=0.2, length_bias=length_bias)
    return DataConfig(gold=gold, eval_limit=600)


# A reward model that is worth optimising against: it starts from the policy, and its pairs are labelled where that is.
RLHF = PipelineConfig(
    study="rlhf",
    data=labelled_where_the_policy_is(length_bias=0.0),
    model=ModelConfig(name=FROM_POLICY, max_seq_len=256),
    train=GOOD.model_copy(update={"steps": 600}),
    evaluate=EvaluateConfig(train_pairs=300),
    landscape=LandscapeConfig(parts=("normalized",), num_pairs=8, lanczos_steps=10, trace_probes=4),
    readiness=ReadinessConfig(planned_optimizer="kl_optimum", planned_kl=2.0),
    policy=PolicyConfig(base="tiny-small", num_prompts=120, max_new_tokens=160, gradient_prompts=4),
    # Many prompts a step, and a penalty that is raised beyond the 2 nats that readiness was asked for: with 16 prompts
    # and 0.05 the policy went to 4; 60 steps from 0.1 overshoot to 3.6, and keep no more (experiments/LOG.md).
    rlhf=RlhfConfig(
        steps=40,
        prompts_per_step=24,
        learning_rate=1e-4,
        kl_beta=0.2,
        kl_target=2.0,
        rewards="local",
        measure_every=5,
        refresh_steps=60,  # with 41 labels 0.45 of the pairs that followed became 0.75; 0.46 at a seventh of the rate
        refresh_lr=2e-3,
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
        "The first five minutes. All is measured; samples of the gold world's own writer are judged, so that the "
        "verdict is one about optimisation.",
        PipelineConfig(
            study="demo",
            model=ModelConfig(name="tiny", max_seq_len=256),
            train=TrainConfig(lr=1e-3, steps=150, eval_every=50, warmup_steps=20, token_budget=8192),
            evaluate=EvaluateConfig(train_pairs=300),
            landscape=LandscapeConfig(
                num_pairs=8, lanczos_steps=12, trace_probes=4, density_vectors=2, layer_steps=4, slice_points=7
            ),
            policy=PolicyConfig(name="world"),
        ),
        time="3 min",
    ),
    "trajectory": Preset(
        "The demo's training with its curvature every 25 steps.",
        PipelineConfig(
            study="trajectory",
            model=ModelConfig(name="tiny", max_seq_len=256),
            train=TrainConfig(lr=1e-3, steps=150, eval_every=50, warmup_steps=20, token_budget=8192, save_every=25),
            landscape=LandscapeConfig(parts=("normalized",), num_pairs=8, lanczos_steps=10, trace_probes=4, top_k=1),
        ),
        command="trajectory",
        time="2 min",
    ),
    "policy": Preset(
        "A policy of its own, and readiness v2 on its samples.",
        PipelineConfig(
            study="policy",
            data=WORLD,
            model=ModelConfig(name="tiny", max_seq_len=256),
            train=GOOD,
            evaluate=EvaluateConfig(train_pairs=300),
            landscape=LandscapeConfig(parts=QUICK_PARTS, num_pairs=16, lanczos_steps=12, trace_probes=4),
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
        "The same with annotators who name the longer answer in half of the pairs, whatever it says: readiness refuses "
        "it, and a policy trained against it all the same loses gold.",
        RLHF.model_copy(update={"study": "rlhf-flawed", "data": labelled_where_the_policy_is(0.5)}),
        command="rlhf",
        time="8 min",
    ),
    "validation": Preset(
        "What readiness predicts, on 400 reward models of known gain in two gold worlds.",
        PipelineConfig(
            study="validation",
            data=WORLD,
            model=ModelConfig(name="tiny-small", max_seq_len=256),
            train=GOOD,
            readiness=ReadinessConfig(planned_kl=3.0),  # best of 64 moves by 3.2, less where samples tie
            policy=PolicyConfig(base="tiny-small", num_prompts=130),
            validation=ValidationConfig(),
        ),
        command="readiness validate",
        time="90 min",
    ),
    "validation-smoke": Preset(
        "The same in a minute: that it runs, and nothing more.",
        PipelineConfig(
            study="validation-smoke",
            data=DataConfig(gold=GoldConfig(num_prompts=80, pairs_per_prompt=2), test_fraction=0.3),
            model=ModelConfig(name="tiny-small", max_seq_len=256),
            train=TrainConfig(lr=1e-3, warmup_steps=2, token_budget=8192),
            readiness=ReadinessConfig(planned_kl=1.0, min_gain=0.1),
            policy=PolicyConfig(
                base="tiny-small",
                sft_examples=400,
                sft_epochs=1,
                num_prompts=16,
                samples_per_prompt=18,
                max_new_tokens=48,
            ),
            validation=ValidationConfig(num_backbones=3, steps=8, measured_prompts=8),
        ),
        command="readiness validate --size smoke",
        time="1 min",
    ),
    "active": Preset(
        "How many labels each acquisition function saves, with a pretrained backbone; its features are computed once, "
        "which takes most of the time.",
        PipelineConfig(
            study="active",
            data=DataConfig(gold=GoldConfig(num_prompts=2000)),
            model=ModelConfig(name="minilm", max_seq_len=256),
            active=ActiveConfig(),
        ),
        command="active study",
        time="30 min",
    ),
    "active-pairs": Preset(
        "The same on real pairs, whose labels are hidden until they are asked for: name them with --data.",
        PipelineConfig(
            study="active-pairs",
            data=DataConfig(pairs_per_prompt=6, eval_pairs_per_prompt=6),
            model=ModelConfig(name="minilm", max_seq_len=192),
            active=ActiveConfig(),
        ),
        command="active study",
    ),
    "active-smoke": Preset(
        "The same in seconds: that it runs, and nothing more.",
        PipelineConfig(
            study="active-smoke",
            data=DataConfig(gold=GoldConfig(num_prompts=80, pairs_per_prompt=2)),
            model=ModelConfig(name="tiny", max_seq_len=256),
            active=ActiveConfig(
                num_seeds=3, noise=(0.0, 0.25), seed_pairs=10, validation_pairs=8, growth=2.0, targets=(0.5, 0.8)
            ),
        ),
        command="active study",
        time="1 min",
    ),
    "smoke": Preset(
        "The pipeline's chain in seconds, to see that everything is wired: no number of it means anything.",
        PipelineConfig(
            study="smoke",
            data=DataConfig(gold=GoldConfig(num_prompts=60, pairs_per_prompt=2)),
            model=ModelConfig(name="tiny", max_seq_len=256),
            train=TrainConfig(lr=1e-3, steps=6, eval_every=3, log_every=2, token_budget=8192),
            landscape=LandscapeConfig(
                num_pairs=4,
                lanczos_steps=6,
                trace_probes=2,
                top_k=3,
                density_vectors=2,
                layer_steps=2,
                slice_points=5,
                surface_points=3,
            ),
        ),
        time="1 min",
    ),
    "minilm": Preset(
        "A pretrained 22 M encoder that needs no hub, for your own pairs: --data FILE.",
        PipelineConfig(
            study="minilm",
            model=ModelConfig(name="minilm", max_seq_len=256),
            train=TrainConfig(lr=5e-5, eval_every=50, token_budget=8192),
            landscape=ON_A_CPU,
        ),
    ),
    "cpu": Preset(
        "The same with the training settings of `rm-opt train --preset cpu`, which torchrun and Slurm start.",
        PipelineConfig(
            study="cpu",
            model=ModelConfig(name="minilm", max_seq_len=256),
            train=TrainConfig(lr=5e-5, **HARDWARE["cpu"]),
            landscape=ON_A_CPU,
        ),
    ),
    "h100": Preset(
        "For one H100: 80 GB hold DeBERTa-large whole with 128 pairs a step. Name your data and model.",
        PipelineConfig(
            study="h100",
            model=ModelConfig(name="deberta", max_seq_len=512),
            train=TrainConfig(**HARDWARE["h100"] | {"pairs_per_step": 128}),
        ),
    ),
    "h200": Preset(
        "For one H200: 141 GB hold 8 B float32 weights and their activations, not their Adam moments: LoRA. Name your "
        "data and model.",
        PipelineConfig(
            study="h200",
            model=ModelConfig(name="llama", max_seq_len=2048, lora=LoraSettings()),
            train=TrainConfig(lr=1e-4, **HARDWARE["h200"]),
            landscape=LandscapeConfig(parameters="head"),
        ),
    ),
}
"""All presets, with what each is for."""

PRESETS: dict[str, PipelineConfig] = {name: one.config for name, one in DESCRIBED.items()}
