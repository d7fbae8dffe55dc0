"""Settings of the training."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import RUN_ONLY, Settings


class TrainConfig(Settings):
    """Optimisation of the likelihood of preferences: Bradley-Terry for pairs, see docs/objectives.md for the others."""

    objective: Literal["auto", "pairs"] = "auto"
    """auto: each kind of judgement in the data has its likelihood (pairs, ties, rankings, grades). pairs: only the
    strict pairs that they imply."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; takes precedence over epochs."""
    epochs: float | None = Field(default=1.0, gt=0)
    """Passes over the pairs, unless steps is set. null: as many as give 60 steps, but 1 to 10."""
    pairs_per_step: int = Field(default=16, ge=1, le=1_000_000)
    """Preference pairs of one update."""
    packing: bool = True
    """Compute a pair's common prompt once and pad nothing, where the model allows it; the gradient is the same."""
    batching: Literal["pairs", "plain"] = "pairs"
    """plain: the usual loop, to compare with: padded, pairs as drawn, the mean of micro-batch means as the loss."""
    token_budget: int | None = Field(default=None, ge=16)
    """Most tokens computed in one micro-batch, padding included. Left out: chosen from the memory of the device."""
    over_length: Literal["cut", "drop"] = "cut"
    """A training pair with a side over max_seq_len: cut that side, or drop the pair. Both are counted."""
    optimizer: Literal["adamw", "adamw8bit", "adam", "sgd", "muon", "lion", "sam"] = "adamw"
    """muon: AdamW beyond hidden matrices. lion: a third of the lr. sam: two passes. adamw8bit: 8 bytes a weight."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean squared gradient in adamw, adam, sam and muon's AdamW; OpenRLHF takes 0.95."""
    lr: float = Field(default=5e-6, gt=0)
    """Peak learning rate. MiniLM wants 5e-5, `tiny` 1e-3."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay, decoupled but for adam and sgd; 0.01 to 0.05 is usual, 0.1 was too strong."""
    schedule: Literal["cosine", "cosine_with_min", "linear", "constant"] = "cosine"
    """Learning rate after warm-up; with_min: to 0.1."""
    warmup_steps: int = Field(default=50, ge=0)
    """Linear warm-up; at most a tenth of a run shorter than ten times this."""
    beta: float = Field(default=1.0, gt=0)
    """Scale of the margin inside the loss, and from then on: P(chosen preferred) = sigmoid(beta * margin)."""
    label_smoothing: float = Field(default=0.05, ge=0, lt=1)
    """Epsilon: targets become 1 - eps/2 and eps/2."""
    regularization_lambda: float = Field(default=0.001, ge=0)
    """Weight of the mean squared reward, added to the mean loss."""
    margin_regularization: float = Field(default=0.0, ge=0)
    """Weight of the mean squared margin, added to the mean loss: holds back over-confident margins."""
    centering: float = Field(default=0.0, ge=0)
    """Weight of the mean of (reward_chosen + reward_rejected)^2 (Eisenstein et al. 2023, arXiv:2312.09244)."""
    target_margin_scale: float | None = Field(default=None, gt=0)
    """Logits of margin required per unit of annotated margin (at most 3); left out, annotated margins are not used."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: autocast on a CPU, bfloat16 copies of the weights and TF32 on a GPU; weights, reward head and loss stay
    float32. auto: bf16 on a GPU and on a CPU where that was measured to be faster, else fp32, as for the tiny models;
    the artifact's key has what was chosen."""
    dropout: bool = False
    """Keep the model's own dropout on: noise in the margin of a pair. LoRA's dropout has a setting of its own."""
    compile: bool = False
    """torch.compile of each layer with dynamic shapes; if that fails, training continues without it and says so."""
    eval_every: int = Field(default=100, ge=1)
    """Steps between evaluations on the validation pairs."""
    early_stopping_patience: int | None = Field(default=5, ge=1)
    """Evaluations without improvement before training stops; null (--no-early-stopping) never stops early."""
    best_metric: Literal["eval/pairwise_accuracy", "eval/loss", "eval/ece", "last"] = "eval/pairwise_accuracy"
    """Metric that the best checkpoint is chosen by: highest accuracy, lowest loss or (plain) ECE; last: no choice."""
    log_every: Annotated[int, RUN_ONLY] = Field(default=10, ge=1)
    """Steps between logged training metrics."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps between kept `step_*/` checkpoints; the last step is always kept."""
    keep_top_k: int = Field(default=1, ge=1, le=10_000)
    """How many of the best evaluated steps to keep: `best/` alone, or the next ones too as `step_*/`."""
    resume_every_seconds: Annotated[float, RUN_ONLY] = Field(default=300.0, ge=0)
    """Least seconds between resumable states, of which the newest two are kept: what a kill costs, or more where
    steps would wait for them for more than 2 % of the time, or while one is still being written."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more time. Left out: in as few
    layers as the memory of the device demands."""
    num_workers: Annotated[int | None, RUN_ONLY] = Field(default=None, ge=0, le=256)
    """Processes that build micro-batches ahead, into pinned memory on a GPU. Left out: 2 on a GPU, none on a CPU."""
    num_processes: Annotated[int, RUN_ONLY] = Field(default=1, ge=1, le=256)
    """Processes of this machine that train the model together, sharded over them (FSDP2): one a GPU."""
    profile_memory: Annotated[bool, RUN_ONLY] = False
    """Log the memory of device and host with the training metrics."""
    profile_gpu: Annotated[bool, RUN_ONLY] = False
    """Trace three early steps into profile/ by torch.profiler: kernels, or without a GPU the CPU's operations."""

    @property
    def chosen_precision(self) -> Literal["fp32", "bf16"]:
        """The precision, where it has been chosen (`rmcore.core.hardware.choose_precision`).

        Raises:
            ValueError: it has not.
        """
        if self.precision == "auto":
            raise ValueError("train.precision=auto has not been resolved: see rmcore.core.hardware.choose_precision")
        return self.precision

    @model_validator(mode="after")
    def _nothing_is_chosen_by_the_last_step(self) -> Self:
        if self.best_metric == "last" and self.early_stopping_patience is not None:
            raise ValueError(
                f"best_metric=last chooses no step, so nothing could improve, but early_stopping_patience="
                f"{self.early_stopping_patience} waits for it; set early_stopping_patience to null "
                "(--no-early-stopping)."
            )
        if self.best_metric == "last" and self.keep_top_k > 1:
            raise ValueError(
                f"best_metric=last ranks no steps, but keep_top_k={self.keep_top_k} asks for the best of them; leave "
                "keep_top_k at 1, or keep steps with save_every."
            )
        return self

    @model_validator(mode="after")
    def _halves_of_weights_are_bfloat16(self) -> Self:
        if self.optimizer == "adamw8bit" and self.precision != "bf16":
            raise ValueError(
                f"optimizer=adamw8bit computes with the bfloat16 halves of the weights, and precision={self.precision} "
                "wants whole ones; set precision to bf16."
            )
        return self

    @model_validator(mode="after")
    def _a_loss_that_depends_on_the_cut_has_a_budget(self) -> Self:
        if self.batching == "plain" and self.token_budget is None:
            raise ValueError(
                "batching=plain takes a mean over micro-batches, so its loss depends on how steps are cut, and without "
                "token_budget the memory of the machine would decide that; set token_budget, for example to 8192."
            )
        return self

    @model_validator(mode="after")
    def _processes_can_share(self) -> Self:
        number = self.num_processes
        if self.pairs_per_step % number:
            raise ValueError(
                f"pairs_per_step={self.pairs_per_step} does not divide among num_processes={self.num_processes}, "
                "so some would idle in every step; use a multiple."
            )
        if number > 1 and self.optimizer == "adamw8bit":
            raise ValueError(
                f"optimizer=adamw8bit trains in one process, and num_processes={self.num_processes} share the "
                "model: its blocks of weights would depend on how many there are. Use adamw, of which each process "
                "keeps its share."
            )
        return self
