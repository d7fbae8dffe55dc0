"""Settings of the policy's training against the reward model."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Settings


class WatchConfig(Settings):
    """A judge who watches the training with few labels, and ends it where gold has turned."""

    labels: int = Field(default=600, ge=40)
    """Responses that the judge is asked about during the training, at most, in equal parts at each measurement; two a
    pair, one for each of two policies. 48 more give the unit; people judge pairs, one label each, and need no unit."""
    final_labels: int = Field(default=400, ge=0)
    """Responses that the judge is asked about at the end, at most, on prompts that nothing was decided on: what the
    policy that is kept has gained. 0: nothing is measured."""
    candidates: int = Field(default=2, ge=1, le=64)
    """Fresh prompts answered for each judged pair; one of them is judged, sooner where the members disagree."""
    useful_gain: float = Field(default=0.1, gt=0)
    """Gain since half of the distance below which gold has stopped gaining: in standard deviations within prompts, or
    where people judge in wins less losses a comparison."""
    level: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance of a false alarm in the whole training, at most: of each of the decisions by itself."""
    refreshes: int = Field(default=0, ge=0, le=10)
    """Times that gold which has turned or stopped does not end the training: the reward model is trained further on all
    that was judged (`refresh_steps`, `refresh_lr`), and training continues from the best checkpoint against it. Each
    reward model has its share of the level."""
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
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts of each step, of the training split."""
    group_size: int = Field(default=8, ge=2)
    """Samples of each prompt, whose rewards are compared with each other."""
    micro_batch_size: int | None = Field(default=None, ge=1)
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
    takes vLLM where it is installed and one reward is asked for."""
    rollouts: Literal["auto", "vllm", "generate"] = "auto"
    """Who draws the samples: a vLLM started for the training, which has the policy's weights published to it, or
    `generate` in the training's process. auto takes vLLM on a GPU where it is installed; on a CPU it draws faster, and
    a whole step takes as long or longer."""
    rollout_staleness: int = Field(default=0, ge=0)
    """Optimizer steps that the weights which vLLM draws with may be behind the policy's; 0: they are published before
    every step. What they are behind is corrected by truncated importance sampling."""
    aggregate: Literal["one", "mean", "worst_case", "uncertainty_weighted"] = "one"
    """one: the reward model's own reward; else how `policy.num_members` heads on its backbone become one reward."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Taken off the reward for each token of a response, in the reward's unit."""
    reward_clip: float | None = Field(default=None, gt=0)
    """Standard deviations from the mean, over the start policy's samples of the held-out prompts, beyond which a reward
    counts for no more: what lies far from the labels is not worth reaching. Left out: rewards are what they are."""
    refresh_every: int | None = Field(default=None, ge=1)
    """Steps between refreshes of the reward model: pairs of the policy's present samples are labelled by the judge, the
    reward model is trained further and published. Left out: never."""
    refresh_pairs: int = Field(default=256, ge=8)
    """Labels of each refresh; a quarter of them only tests it."""
    refresh_steps: int = Field(default=30, ge=1)
    """Optimizer steps of the reward model in each refresh, on the labels of all refreshes and as many old pairs."""
    refresh_lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate of a refresh."""
    stop_on_disagreement: bool = False
    """End a training where the members' disagreement leaves its calibrated range; off: the rule is only shown."""
    kl_target: float | None = Field(default=None, gt=0)
    """Nats from the start policy beyond which the KL penalty is raised at each measurement, and within which it comes
    back to `kl_beta`; left out: it stays. It takes a watch. Beyond `readiness.planned_kl`, which says how far is safe,
    it is refused."""
    watch: WatchConfig | None = None
    """A judge's watch over the training; left out: only the steps end it."""
    measure_every: int = Field(default=10, ge=1)
    """Steps between measurements on held-out prompts, and between saved states."""
    num_prompts: int = Field(default=48, ge=2)
    """Held-out prompts of each measurement, at most; the first of those that have samples."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Samples of each at a measurement."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """How long a step waits for a reward server that is away or fails before the training stops, its state saved."""

    @model_validator(mode="after")
    def _members_are_scored_here(self) -> Self:
        if self.rewards == "vllm" and self.aggregate != "one":
            raise ValueError(
                f"rewards=vllm serves one reward, and aggregate={self.aggregate} needs those of all members; set "
                "rewards to local or auto"
            )
        return self

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

    @model_validator(mode="after")
    def _one_says_when_to_refresh(self) -> Self:
        refreshes = 0 if self.watch is None else self.watch.refreshes
        if refreshes and self.refresh_every is not None:
            raise ValueError(
                f"the reward model is refreshed every {self.refresh_every} steps by refresh_every, and where gold has "
                f"turned by watch.refreshes={refreshes}; leave one of them out"
            )
        if refreshes and self.stop_on_disagreement:
            raise ValueError(
                f"stop_on_disagreement ends a training that watch.refreshes={refreshes} would have go on from its best "
                "checkpoint; leave one of them out"
            )
        if refreshes and self.rollout_staleness:
            raise ValueError(
                f"a refresh puts earlier weights into the policy, and rollout_staleness={self.rollout_staleness} would "
                "draw from those that it left; set it to 0"
            )
        if self.reward_clip is not None and (refreshes or self.refresh_every is not None):
            raise ValueError(
                f"reward_clip={self.reward_clip:g} is a range of the first reward model's rewards, and a refreshed one "
                "has another; leave out either the clip or the refreshes"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_fill_a_step(self) -> Self:
        samples = self.prompts_per_step * self.group_size
        if samples % (self.micro_batch_size or samples):
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} does not divide the {samples} samples of a step "
                "(prompts_per_step x group_size)"
            )
        return self
