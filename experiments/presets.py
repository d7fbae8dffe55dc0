"""Whole pipeline runs by name: `rm-opt run --preset NAME`, each one a change of the defaults with its reason.

All but h100 and h200 fix the token budget, which is otherwise chosen from free memory: micro-batches then round alike
on every machine.
"""

from rmcore.config.pipeline import (
    ActiveConfig,
    CurvaturePart,
    DataConfig,
    EvaluateConfig,
    GoldConfig,
    LandscapeConfig,
    LoraSettings,
    ModelConfig,
    PipelineConfig,
    PolicyConfig,
    ReadinessConfig,
    RlhfConfig,
    TrainConfig,
    ValidationConfig,
)
from rmcore.config.policy import FROM_POLICY
from rmcore.core.hardware import HARDWARE

QUICK_PARTS: tuple[CurvaturePart, ...] = ("normalized", "gauss_newton", "noise")
"""On a CPU, where a Hessian product with a pretrained model takes seconds; `rm-opt analyze` measures the others."""

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
    rlhf=RlhfConfig(prompts_per_step=16, learning_rate=1e-4, kl_beta=0.05),
)

PRESETS: dict[str, PipelineConfig] = {
    # The first five minutes: gold world and tiny model, everything measured, samples of the world's own writer judged,
    # so that the verdict is one about optimisation; about three minutes on two cores.
    "demo": PipelineConfig(
        study="demo",
        model=ModelConfig(name="tiny", max_seq_len=256),
        train=TrainConfig(lr=1e-3, steps=150, eval_every=50, warmup_steps=20, token_budget=8192),
        evaluate=EvaluateConfig(train_pairs=300),
        landscape=LandscapeConfig(
            num_pairs=16, lanczos_steps=12, trace_probes=4, density_vectors=2, layer_steps=4, slice_points=11
        ),
        policy=PolicyConfig(name="world"),
    ),
    # The demo's training with its curvature every 25 steps: `rm-opt trajectory`, about two minutes on two cores.
    "trajectory": PipelineConfig(
        study="trajectory",
        model=ModelConfig(name="tiny", max_seq_len=256),
        train=TrainConfig(lr=1e-3, steps=150, eval_every=50, warmup_steps=20, token_budget=8192, save_every=25),
        landscape=LandscapeConfig(parts=("normalized",), num_pairs=8, lanczos_steps=10, trace_probes=4, top_k=1),
    ),
    # A policy of its own, and readiness v2 on its samples; about fifteen minutes on two cores.
    "policy": PipelineConfig(
        study="policy",
        data=WORLD,
        model=ModelConfig(name="tiny", max_seq_len=256),
        train=GOOD,
        evaluate=EvaluateConfig(train_pairs=300),
        landscape=LandscapeConfig(parts=QUICK_PARTS, num_pairs=16, lanczos_steps=12, trace_probes=4),
        policy=PolicyConfig(),
    ),
    # From preferences to a policy, cold: reward model, readiness, GRPO against it.
    "rlhf": RLHF,
    # The same with annotators who name the longer answer in half of the pairs, whatever it says: readiness refuses it,
    # and a policy trained against it all the same loses gold.
    "rlhf-flawed": RLHF.model_copy(update={"study": "rlhf-flawed", "data": labelled_where_the_policy_is(0.5)}),
    # What readiness predicts, on 400 reward models of known gain in two gold worlds; about 90 minutes on two cores.
    "validation": PipelineConfig(
        study="validation",
        data=WORLD,
        model=ModelConfig(name="tiny-small", max_seq_len=256),
        train=GOOD,
        readiness=ReadinessConfig(planned_kl=3.0),  # best of 64 moves by 3.2, less where samples tie
        policy=PolicyConfig(base="tiny-small", num_prompts=130),
        validation=ValidationConfig(),
    ),
    # The same in a minute: that it runs, and nothing more.
    "validation-smoke": PipelineConfig(
        study="validation-smoke",
        data=DataConfig(gold=GoldConfig(num_prompts=80, pairs_per_prompt=2), test_fraction=0.3),
        model=ModelConfig(name="tiny-small", max_seq_len=256),
        train=TrainConfig(lr=1e-3, warmup_steps=2, token_budget=8192),
        readiness=ReadinessConfig(planned_kl=1.0, min_gain=0.1),
        policy=PolicyConfig(
            base="tiny-small", sft_examples=400, sft_epochs=1, num_prompts=16, samples_per_prompt=18, max_new_tokens=48
        ),
        validation=ValidationConfig(num_backbones=3, steps=8, measured_prompts=8),
    ),
    # How many labels each acquisition function saves, in the gold world with a pretrained backbone; about half an hour
    # on two cores, most of it once for the features.
    "active": PipelineConfig(
        study="active",
        data=DataConfig(gold=GoldConfig(num_prompts=2000)),
        model=ModelConfig(name="minilm", max_seq_len=256),
        active=ActiveConfig(),
    ),
    # The same on real pairs, whose labels are hidden until they are asked for: name them with --data.
    "active-pairs": PipelineConfig(
        study="active-pairs",
        data=DataConfig(pairs_per_prompt=6, eval_pairs_per_prompt=6),
        model=ModelConfig(name="minilm", max_seq_len=192),
        active=ActiveConfig(),
    ),
    # The same in seconds: that it runs, and nothing more.
    "active-smoke": PipelineConfig(
        study="active-smoke",
        data=DataConfig(gold=GoldConfig(num_prompts=80, pairs_per_prompt=2)),
        model=ModelConfig(name="tiny", max_seq_len=256),
        active=ActiveConfig(
            num_seeds=3, noise=(0.0, 0.25), seed_pairs=10, validation_pairs=8, growth=2.0, targets=(0.5, 0.8)
        ),
    ),
    # The pipeline's chain in seconds, to see that everything is wired: no number of it means anything.
    "smoke": PipelineConfig(
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
    # A pretrained 22 M encoder that needs no hub; give it your own data with --set data.source=FILE.
    "minilm": PipelineConfig(
        study="minilm",
        model=ModelConfig(name="minilm", max_seq_len=256),
        train=TrainConfig(lr=5e-5, eval_every=50, token_budget=8192),
        landscape=LandscapeConfig(parts=QUICK_PARTS, num_pairs=8, lanczos_steps=10, trace_probes=4, top_k=3),
    ),
    # By machine, with a model that fits it; data and model are yours to name. The training settings are those of
    # `rm-opt train --preset`, which torchrun and Slurm start, but for h100's larger batch.
    "cpu": PipelineConfig(
        study="cpu",
        model=ModelConfig(name="minilm", max_seq_len=256),
        train=TrainConfig(lr=5e-5, **HARDWARE["cpu"]),
        landscape=LandscapeConfig(parts=QUICK_PARTS, num_pairs=8, lanczos_steps=10, trace_probes=4, top_k=3),
    ),
    # 80 GB hold DeBERTa-large whole with 128 pairs a step (the specification's batch).
    "h100": PipelineConfig(
        study="h100",
        model=ModelConfig(name="deberta", max_seq_len=512),
        train=TrainConfig(**HARDWARE["h100"] | {"pairs_per_step": 128}),
    ),
    # 141 GB hold 8 B float32 weights and their activations, not their Adam moments: LoRA.
    "h200": PipelineConfig(
        study="h200",
        model=ModelConfig(name="llama", max_seq_len=2048, lora=LoraSettings()),
        train=TrainConfig(lr=1e-4, **HARDWARE["h200"]),
        landscape=LandscapeConfig(parameters="head"),
    ),
}
