"""Settings of the policy, of the samples drawn from it, and of the question whether it may be optimised."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Settings

SFT = "sft"
WORLD = "world"
FROM_POLICY = "policy"
"""Name of a reward model that starts from the policy's weights."""
TINY_SIZES = {"tiny": (1.0, 1.0), "tiny-small": (0.6, 0.5), "tiny-wide": (1.6, 1.0), "tiny-deep": (1.0, 2.0)}
"""Models that are built on the spot, by name: width and depth as multiples of tiny's 160 and 4 layers."""


class PolicyConfig(Settings):
    """The policy that is to be optimised, and the samples drawn from it."""

    name: str = SFT
    """`sft`: trained here, on answers of the gold world or the responses of the training pairs. `world`: the gold
    world's own writer, which costs nothing and cannot be trained. Else a folder or hub name of a causal model."""
    base: str = "tiny"
    """What `sft` starts from: tiny or another of its sizes, or a folder or hub name of a causal model."""
    sft_examples: int = Field(default=8000, ge=10)
    """Responses that `sft` is trained on, at most; the gold world writes as many as asked for."""
    sft_epochs: int = Field(default=3, ge=1)
    """Passes of `sft` over them."""
    sft_lr: float = Field(default=4e-3, gt=0)
    """Peak learning rate of `sft`, by Muon; 1e-5 to 1e-4 for a pretrained model."""
    engine: Literal["auto", "vllm", "generate"] = "auto"
    """What draws the samples: vLLM, or transformers' generate; auto takes vLLM where it is installed and a GPU is."""
    num_prompts: int = Field(default=150, ge=4)
    """Held-out prompts that samples are drawn for, at most: the first ones of the test pairs."""
    samples_per_prompt: int = Field(default=64, ge=4)
    """Samples of each prompt: best-of-n is measured for n up to this."""
    fresh_prompts: int = Field(default=200, ge=10)
    """Other prompts, at most, that best-of-n is served on by `rm-opt readiness confirm`, to confirm a plan."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; KL is measured from the policy at this temperature."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Longest response in tokens; one that has not ended by then is cut, and counted."""
    samples: str | None = None
    """A file of samples drawn elsewhere, with columns prompt, response and `judge_column`: nothing is sampled then."""
    judge_column: str = "judge"
    """Column of `samples` with the gold reward; rows without it are left out. The gold world judges itself."""
    judge_ceiling: float = Field(default=1.0, gt=0.5, le=1)
    """How often the judge agrees with itself, or with people, on a pair: accuracies are corrected for the rest."""
    judge: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """module:function of (prompt, response) that gives the gold reward, for samples drawn here; code of yours,
    from the current folder or PYTHONPATH."""
    num_members: int = Field(default=4, ge=2, le=64)
    """Bootstrap reward heads whose disagreement on the samples is measured."""
    gradient_prompts: int = Field(default=16, ge=0)
    """Prompts over which the variance of the policy gradient is estimated, 16 samples each; 0: it is not."""


HEADS_PER_BACKBONE = 5
"""Reward models of the study for each backbone: the head it was trained with, and `rmcore.policy.grpo.defects`."""


StudiedWorld = Literal["length", "flattery", "claims"]


class ValidationConfig(Settings):
    """The study of what readiness predicts: a population of small reward models whose true gain is known."""

    worlds: tuple[StudiedWorld, StudiedWorld] = ("flattery", "claims")
    """Shortcuts of the two gold worlds that have such a population each; they stand in for data.gold.shortcut."""
    num_backbones: int = Field(default=40, ge=2, le=40)
    """Quickly trained backbones of each world, with a defect of their training or none; five reward heads on each."""
    steps: int = Field(default=160, ge=2)
    """Optimizer steps of each backbone."""
    measured_prompts: int = Field(default=50, ge=2)
    """Prompts whose judged samples the scores may see; the gain is taken on all others."""

    @property
    def num_models(self) -> int:
        """Reward models of the study, over its worlds."""
        return len(self.worlds) * self.num_backbones * HEADS_PER_BACKBONE

    @model_validator(mode="after")
    def _worlds_differ(self) -> Self:
        if self.worlds[0] == self.worlds[1]:
            raise ValueError(f"both worlds have the shortcut {self.worlds[0]}, so they are one; name another")
        return self


class ReadinessConfig(Settings):
    """How readiness for an optimisation is judged: the plan and its conditions; and weights of the original score."""

    accuracy_weight: float = Field(default=0.35, ge=0)
    """Original score, which decides nothing: weight of held-out pairwise accuracy."""
    calibration_weight: float = Field(default=0.25, ge=0)
    """Original score: weight of calibration."""
    stability_weight: float = Field(default=0.25, ge=0)
    """Original score: weight of reward variance."""
    landscape_weight: float = Field(default=0.15, ge=0)
    """Original score: weight of curvature."""
    planned_optimizer: Literal["best_of_n", "kl_optimum"] = "best_of_n"
    """What will optimise the policy: best-of-n sampling, or RL with a KL penalty (its optimum stands for it)."""
    planned_kl: float = Field(default=3.0, gt=0)
    """KL in nats that the policy will be moved by; best of 64 is 3.2, less where samples tie."""
    min_gain: float = Field(default=0.3, gt=0)
    """Gain of the gold reward that makes it worth while, in standard deviations within prompts."""

    @model_validator(mode="after")
    def _weights_sum_to_one(self) -> Self:
        total = self.accuracy_weight + self.calibration_weight + self.stability_weight + self.landscape_weight
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the four weights sum to {total:g}; they must sum to 1 for scores to compare")
        return self
