"""Settings of the policy's training against the reward model."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rmcore.config.base import RUN_ONLY, Names, Settings


class WatchConfig(Settings):
    """A judge who watches the training with few labels, and ends it where the true reward has turned."""

    labels: int = Field(default=600, ge=40, le=1_000_000)
    """Responses that the judge is asked about during the training, at most, in equal parts at each measurement; two a
    pair, one for each of two policies. 48 more give the unit; people judge pairs, one label each, and need no unit."""
    final_labels: int = Field(default=400, ge=0, le=1_000_000)
    """Responses that the judge is asked about at the end, at most, on prompts that nothing was decided on: what the
    policy that is kept has gained. 0: nothing is measured."""
    people: str | None = None
    """A folder, named from the root, for files of pairs that people judge, instead of `policy.judge`. The training ends
    at each of them, and the same command resumes when its column is filled in."""


class RlhfConfig(Settings):
    """GRPO by TRL: the policy is trained on the reward model's rewards, compared within groups of samples of one
    prompt (the advantages of Shao et al. 2024, arXiv:2402.03300).
    """

    steps: int = Field(default=40, ge=1)
    """Optimizer steps of the policy."""
    num_seeds: int = Field(default=1, ge=1, le=10)
    """Trainings that differ by the seed alone; where there are several, intervals are over them and over prompts."""
    prompts_per_step: int = Field(default=8, ge=1, le=100_000)
    """Prompts of each step, of the training split."""
    group_size: int = Field(default=8, ge=2, le=10_000)
    """Samples of each prompt, whose rewards are compared with each other."""
    micro_batch_size: Annotated[int | None, RUN_ONLY] = Field(default=None, ge=1)
    """Samples of one forward and backward pass, where memory does not hold those of a whole step; left out: all."""
    learning_rate: float = Field(default=3e-5, gt=0)
    """Constant rate of AdamW. 40 steps took the tiny policy 2 to 11 nats away; at 5e-5 12 to 63, at 1e-4 hundreds.
    1e-6 to 5e-6 for a pretrained policy."""
    loss: Literal["dapo", "grpo"] = "dapo"
    """How tokens are weighed. dapo: all tokens of a step alike (Yu et al. 2025, arXiv:2503.14476), TRL's default. grpo:
    all responses alike, so a token of a long one counts for less (Shao et al. 2024)."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty in the loss; 0 leaves it out, and KL is bounded by the steps alone."""
    rewards: Literal["auto", "vllm", "local"] = "auto"
    """Who scores: a vLLM reward server started for the training, or the reward model in the training's process; auto
    takes vLLM where it is installed."""
    more_rewards: Annotated[dict[str, float] | None, Names("rewards")] = None
    """Further rewards and their weights, the reward model's own weight being 1: folders of reward models, or
    module:function of (prompt, response). Each is normalised within its group before they are summed (GDPO, Liu et al.
    2026, arXiv:2601.05242), so that units do not count; below 0 a weight is a price. Left out: the own reward alone."""
    rollouts: Literal["auto", "vllm", "generate"] = "auto"
    """Who draws the samples: a vLLM started for the training, to which the policy's weights are published before every
    step, or `generate` in the training's process. auto takes vLLM on a GPU where it is installed; on a CPU it draws
    faster, and a whole step takes as long or longer."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward for each token of a response, in the reward's unit."""
    kl_target: float | None = Field(default=None, gt=0)
    """Nats from the start policy beyond which the KL penalty is raised at each measurement, and within which it comes
    back to `kl_beta`; left out: it stays. It takes a watch. Beyond `readiness.planned_kl`, which says how far is safe,
    it is refused."""
    watch: WatchConfig | None = None
    """A judge's watch over the training; left out: only the steps end it."""
    measure_every: int = Field(default=10, ge=1)
    """Steps between measurements on held-out prompts, and between saved states."""
    num_prompts: int = Field(default=48, ge=2, le=1_000_000)
    """Held-out prompts of each measurement, at most; the first of those that have samples."""
    samples_per_prompt: int = Field(default=8, ge=1, le=100_000)
    """Samples of each at a measurement."""

    @model_validator(mode="after")
    def _something_steers(self) -> Self:
        if self.kl_target is not None and self.watch is None:
            raise ValueError(
                f"kl_target={self.kl_target:g} is kept to by the watch, and there is none; set a field of "
                "rlhf.watch, or leave kl_target out (rlhf.kl_target=null)"
            )
        if self.kl_target is not None and self.kl_beta == 0:
            raise ValueError(
                f"kl_target={self.kl_target:g} steers the KL penalty, and kl_beta=0 leaves that out; set kl_beta to "
                "what the steering begins with, such as 0.1, or leave kl_target out (rlhf.kl_target=null)"
            )
        return self

    @field_validator("more_rewards")
    @classmethod
    def _each_reward_counts(cls, named: dict[str, float] | None) -> dict[str, float] | None:
        for name, weight in (named or {}).items():
            if weight == 0:
                raise ValueError(f"more_rewards gives {name} the weight 0; give one other than 0, or leave it out")
        return named or None

    @model_validator(mode="after")
    def _micro_batches_fill_a_step(self) -> Self:
        samples = self.prompts_per_step * self.group_size
        if samples % (self.micro_batch_size or samples):
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} does not divide the {samples} samples of a step "
                "(prompts_per_step x group_size)"
            )
        return self
