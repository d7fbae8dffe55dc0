"""Every setting of the platform: one frozen pydantic tree.

The sentence under a field is its help text on the command line and in the Prefect form. docs/training.md gives
the trainer's defaults in one table. Unknown keys and values are errors.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rmcore.config.active import ActiveConfig as ActiveConfig  # noqa: PLC0414
from rmcore.config.active import CheckConfig as CheckConfig  # noqa: PLC0414
from rmcore.config.base import Settings as Settings  # noqa: PLC0414
from rmcore.config.policy import FROM_POLICY, WORLD, StudiedWorld
from rmcore.config.policy import PolicyConfig as PolicyConfig  # noqa: PLC0414
from rmcore.config.policy import ReadinessConfig as ReadinessConfig  # noqa: PLC0414
from rmcore.config.policy import ValidationConfig as ValidationConfig  # noqa: PLC0414
from rmcore.config.rlhf import RlhfConfig as RlhfConfig  # noqa: PLC0414

Threshold = Annotated[float, Field(gt=0, lt=1)]


Shortcut = Literal["length", "flattery", "claims", "none"]


class GoldConfig(Settings):
    """The gold world: procedural preferences with a known true reward (rmcore/data/gold/world.py)."""

    num_prompts: int = Field(default=1200, ge=20)
    """Different in-distribution prompts; a fifth as many out-of-distribution ones come on top."""
    pairs_per_prompt: int = Field(default=3, ge=1, le=64)
    """Preference pairs drawn for each prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Labels are drawn from sigmoid((gold_a - gold_b) / temperature): higher is noisier."""
    flip_rate: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of labels flipped after that, as by careless annotators."""
    length_bias: float = Field(default=0.0, ge=0, le=1)
    """Share of labels that name the longer response whatever it says, as by annotators in a hurry."""
    shortcut: Shortcut = "length"
    """Spurious feature that goes with the gold reward in training and stops doing so in the tail."""
    tail_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the answers in training pairs that come from the tail. The policy's have 0.2 of them: with as many, the
    pairs are labelled where the policy is."""


PAIRS_PER_ROW = 36
"""All pairs of 9 answers, the most that InstructGPT's labellers ranked (Ouyang et al. 2022, arXiv:2203.02155)."""


class DataConfig(Settings):
    """Which preference pairs, how they are read and how they are split."""

    source: str = "gold"
    """`gold` (the built-in world), a file (.parquet .json .jsonl .csv .tsv, also .gz), a datasets folder, or a hub
    name."""
    eval_source: str | None = None
    """Held-out pairs of the same forms. Left out: a share of the prompts of `source` is held out."""
    split: str = "train"
    """Split of a hub data set or datasets folder to train on."""
    eval_split: str | None = None
    """Split of the same hub data set or datasets folder to test on."""
    limit: int | None = Field(default=None, ge=1)
    """Use at most this many pairs of `source`, in file order."""
    eval_limit: int | None = Field(default=None, ge=1)
    """Use at most this many held-out pairs."""
    pairs_per_prompt: int | None = Field(default=None, ge=1)
    """Use at most this many pairs of one prompt of `source`: the first ones. SHP's authors advise 5."""
    eval_pairs_per_prompt: int | None = Field(default=None, ge=1)
    """The same for held-out pairs of their own source."""
    pairs_per_row: int = Field(default=PAIRS_PER_ROW, ge=1)
    """Most pairs that one row of ranked answers gives, drawn at random beyond: 36 are all pairs of 9 answers."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=0.9)
    """Share of the training prompts kept for choosing the checkpoint and fitting the temperature."""
    test_fraction: float = Field(default=0.15, gt=0, lt=0.9)
    """Share of the prompts held out for the reported numbers, where no eval data is named."""
    prompt_column: str | None = None
    """Column of the prompt, where the layout is not recognised."""
    chosen_column: str | None = None
    """Column of the preferred completion or dialogue."""
    rejected_column: str | None = None
    """Column of the other completion or dialogue."""
    margin_column: str | None = None
    """Column of the annotated preference strength (optional)."""
    require_complete_pairs: bool = False
    """Make a pair with a side missing, or with two of one side, an error instead of a counted, rejected row."""
    gold: GoldConfig = GoldConfig()
    """The gold world's own settings, used with `source: gold`."""

    @model_validator(mode="after")
    def _something_left_to_train_on(self) -> Self:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("validation_fraction + test_fraction must stay below 1: the rest is trained on")
        return self


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) beside the reward head, in place of full fine-tuning."""

    rank: int = Field(default=8, ge=1)
    """Rank of each adapter."""
    alpha: float = Field(default=16, gt=0)
    """Scale: an adapter's product is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before each adapter."""
    targets: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the linear layers to adapt, e.g. q_proj,v_proj. None named: attention and MLP projections, found by
    inspection."""


class ModelConfig(Settings):
    """Backbone, reward head and how text becomes tokens."""

    name: str = "tiny"
    """A folder, a hub name, or `tiny`, `minilm`, `deberta`, `llama`; `policy` starts from the policy's own weights, as
    InstructGPT's reward model did (Ouyang et al. 2022, arXiv:2203.02155)."""
    max_seq_len: int = Field(default=512, ge=8)
    """Longest side (prompt + one completion) in tokens; longer ones are cut and counted."""
    use_chat_template: bool = True
    """Render with the tokenizer's chat template where it has one, else as `Prompt: ...\\n\\nResponse: ...`."""
    render_fn: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Your own rendering as `module:function`: function(prompt, completion) -> text. Wins over both formats."""
    lora: LoraSettings | None = None
    """Train low-rank adapters and the reward head instead of all weights."""
    head_only: bool = False
    """Train the reward head alone and leave the backbone as it is: about three times faster, and less accurate."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Leave off unless you have read that code."""

    @model_validator(mode="after")
    def _one_way_to_train_less(self) -> Self:
        if self.head_only and self.lora is not None:
            raise ValueError(
                "head_only leaves the backbone as it is, and lora adapts it; choose one of them (with lora the head is "
                "always trained, too)"
            )
        return self


class TrainConfig(Settings):
    """Optimisation of the Bradley-Terry loss."""

    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; takes precedence over epochs."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the training pairs, where steps is not given."""
    pairs_per_step: int = Field(default=16, ge=1)
    """Preference pairs in one optimizer step."""
    packing: bool = True
    """Compute a pair's common prompt once and pad nothing, where the model allows it; the gradient is the same."""
    batching: Literal["pairs", "plain"] = "pairs"
    """plain: the usual loop, to compare with: padded, pairs as drawn, the mean of micro-batch means as the loss."""
    token_budget: int | None = Field(default=None, ge=16)
    """Most tokens computed in one micro-batch, padding included. Left out: chosen from free memory."""
    over_length: Literal["cut", "drop"] = "cut"
    """A training pair with a side over max_seq_len: cut that side, or drop the pair. Both are counted."""
    curriculum: Literal["none", "easy_first", "hard_first"] = "none"
    """Order of the pairs in an epoch: none draws evenly; easy_first brings more easy ones early and hard ones late."""
    curriculum_margins: Literal["annotated", "predicted"] = "annotated"
    """What tells how easy a pair is: its annotated margin, or that of reward heads fitted on the untrained backbone
    without the pair, which takes one pass over the pairs."""
    optimizer: Literal["adamw", "adam", "sgd", "muon", "lion", "sam"] = "adamw"
    """muon: hidden matrices, AdamW for the rest. lion wants a 3 to 10 times smaller lr. sam: AdamW in two passes."""
    sam_rho: float = Field(default=0.05, gt=0)
    """Radius of the ascent step of `sam` (Foret et al. 2021, arXiv:2010.01412)."""
    lr: float = Field(default=5e-6, gt=0)
    """Peak learning rate. Small models want more: 5e-5 for MiniLM, 1e-3 for `tiny`."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay, decoupled but for adam and sgd; 0.01 to 0.05 is usual, 0.1 was too strong."""
    schedule: Literal["cosine", "cosine_with_min", "linear", "constant"] = "cosine"
    """Learning rate after warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of the peak learning rate that `cosine_with_min` ends at."""
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
    """Logits of margin asked for per unit of annotated margin; left out, annotated margins are not used."""
    target_margin_cap: float = Field(default=3.0, gt=0)
    """Largest margin asked for, in logits: annotated margins can reach 26."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 = autocast; weights, reward head and loss stay float32."""
    dropout: bool = False
    """Keep the model's own dropout on: noise in the margin of a pair. LoRA's dropout has a setting of its own."""
    tf32: bool = False
    """Let a GPU round float32 matrix products to TF32: several times faster, about three digits."""
    compile: bool = False
    """torch.compile of model and loss with dynamic shapes; if that fails, training continues without it and says so."""
    eval_every: int = Field(default=100, ge=1)
    """Steps between evaluations on the validation pairs."""
    eval_thresholds: tuple[Threshold, ...] = (0.3, 0.5, 0.7)
    """Probabilities from which a single response counts as good, for its rates at these evaluations."""
    calibration_bins: int = Field(default=10, ge=2)
    """Bins of the calibration error at these evaluations."""
    early_stopping_patience: int | None = Field(default=5, ge=1)
    """Evaluations without improvement before training stops; null (--no-early-stopping) never stops early."""
    best_metric: Literal["eval/pairwise_accuracy", "eval/loss", "eval/ece", "last"] = "eval/pairwise_accuracy"
    """What the best checkpoint is chosen by: highest accuracy, lowest loss or (plain) ECE; last: no choice."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest change of that metric that counts as an improvement for early stopping."""
    callbacks: tuple[Literal["calibration", "curvature"], ...] = ("calibration",)
    """Measured at each evaluation on validation pairs: calibration (cheap), curvature (Hessian products); or none."""
    log_every: int = Field(default=10, ge=1)
    """Steps between logged training metrics."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps between kept `step_*/` checkpoints; the last step is always kept."""
    keep_top_k: int = Field(default=1, ge=1)
    """How many of the best evaluated steps to keep: `best/` alone, or the next ones too as `step_*/`."""
    resume_every_seconds: float = Field(default=300.0, ge=0)
    """Seconds between resumable states, of which the newest two are kept: what a kill can cost at most."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    num_workers: int | None = Field(default=None, ge=0)
    """Processes that build micro-batches ahead, into pinned memory on a GPU. Left out: 2 on a GPU, none on a CPU."""
    fetch_timeout_seconds: float = Field(default=60.0, gt=0)
    """How long a step waits for such a process before training stops with an error."""
    profile_memory: bool = False
    """Log the memory of device and host with the training metrics."""

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


RUN_ONLY_FIELDS = ("log_every", "resume_every_seconds", "num_workers", "fetch_timeout_seconds", "profile_memory")
"""Fields of TrainConfig that do not change the weights: no part of a cache key, free when a training is resumed."""


class EvaluateConfig(Settings):
    """Held-out metrics and their intervals."""

    num_resamples: int = Field(default=1000, ge=100)
    """Bootstrap resamples over prompts for the 95 % intervals."""
    num_bins: int = Field(default=10, ge=2)
    """Calibration bins."""
    thresholds: tuple[Threshold, ...] = (0.3, 0.5, 0.7)
    """Probabilities from which a single response counts as good: for its true and false positive rates."""
    per_response: bool = True
    """Also measure single responses over all prompts: ROC AUC, and the rates at the thresholds."""
    train_pairs: int = Field(default=500, ge=1)
    """Training pairs scored for the train-test gap."""


CurvaturePart = Literal["normalized", "gauss_newton", "density", "layers", "slices", "noise"]
"""What can be measured beside the ends of the spectrum and the trace; see `LandscapeConfig.parts`."""


class LandscapeConfig(Settings):
    """Curvature of the loss at the trained weights."""

    checkpoint: str = Field(default="best", pattern=r"^(best|step_\d+)$")
    """Which checkpoint of the training: best, or step_N, one of those that train.save_every keeps."""
    parts: tuple[CurvaturePart, ...] = ("normalized", "gauss_newton", "density", "layers", "slices", "noise")
    """Beside the ends and the trace. normalized: the ends at margins of size 1; gauss_newton: its exact spectrum;
    density: of all eigenvalues; layers: trace and ends by layer; slices: the loss along directions; noise: errors over
    prompts, and bf16."""
    method: Literal["lanczos", "power_iteration", "full"] = "lanczos"
    """lanczos: both signed ends with residuals; power_iteration: less memory; full: dense, very small models only."""
    num_pairs: int = Field(default=32, ge=1)
    """Held-out pairs the loss is averaged over, drawn at random."""
    top_k: int = Field(default=5, ge=1)
    """Eigenvalues reported at each end."""
    lanczos_steps: int = Field(default=20, ge=2)
    """Hessian-vector products spent on the spectrum, and on each start vector of the density."""
    trace_probes: int = Field(default=8, ge=2)
    """Hutchinson probes for the trace."""
    density_vectors: int = Field(default=4, ge=2)
    """Start vectors of the density: its error falls with their root."""
    layer_steps: int = Field(default=8, ge=2)
    """Hessian-vector products spent on the ends of each layer."""
    slice_points: int = Field(default=15, ge=5)
    """Points of each line along which the loss is drawn; each is a pass over the pairs."""
    surface_points: int = Field(default=0, ge=0, le=51)
    """Points a side of a two-dimensional slice, each a pass over the pairs; 0: none."""
    parameters: str = Field(default="all", min_length=1)
    """all trained parameters, the reward head, lora adapters, or the dotted name of a module or parameter."""

    @model_validator(mode="after")
    def _a_basis_only_where_it_may_be_held(self) -> Self:
        basis = sorted({"normalized", "density", "layers", "noise"} & set(self.parts))
        if self.method == "power_iteration" and basis:
            raise ValueError(
                "method=power_iteration is for models whose Lanczos vectors do not fit into memory, and parts "
                f"{', '.join(basis)} need them; leave those parts out, or use method=lanczos"
            )
        return self


class PipelineConfig(Settings):
    """One pipeline run: data, model, training, measurement and verdict."""

    study: str = Field(default="demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,60}$")
    """Name of the study: the MLflow experiment is `rm/<study>`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seeds the head, the data order, the splits and the gold world."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where torch runs; auto takes a GPU where there is one."""
    data: DataConfig = DataConfig()
    """The preference pairs."""
    model: ModelConfig = ModelConfig()
    """The reward model."""
    train: TrainConfig = TrainConfig()
    """Training."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation."""
    landscape: LandscapeConfig = LandscapeConfig()
    """Loss landscape."""
    readiness: ReadinessConfig = ReadinessConfig()
    """Readiness for reinforcement learning."""
    policy: PolicyConfig | None = None
    """The policy to be optimised. Without it, and without its judged samples, no verdict says "ready"."""
    validation: ValidationConfig | None = None
    """The study of what readiness predicts; used by its flow only."""
    active: ActiveConfig | None = None
    """The study of what active learning saves; used by its flow only."""
    rlhf: RlhfConfig | None = None
    """Training of the policy against the reward model; needs a policy."""

    @model_validator(mode="after")
    def _reward_model_has_something_to_start_from(self) -> Self:
        if self.model.name != FROM_POLICY:
            return self
        if self.policy is None or self.policy.name == WORLD or self.policy.samples is not None:
            raise ValueError(
                "model.name=policy starts the reward model from the policy's weights, and there are none: set "
                "policy.name to sft, a folder or a hub name (without policy.samples), or name another model"
            )
        if self.validation is not None or self.active is not None:
            raise ValueError(
                "model.name=policy is for a reward model of one's own; the studies of readiness and of active learning "
                "name a model"
            )
        return self

    @model_validator(mode="after")
    def _policy_can_do_what_is_asked(self) -> Self:
        if self.rlhf is not None and (self.policy is None or self.policy.samples is not None):
            raise ValueError(
                "rlhf trains a policy, and there is none; set policy.name to sft, a folder or a hub name, and leave "
                "policy.samples out"
            )
        if self.policy is not None and self.policy.name == WORLD:
            if self.data.source != "gold":
                raise ValueError(
                    f"policy.name=world is the gold world's own writer and answers none of the prompts of "
                    f"{self.data.source}; name a causal model, or a file of samples in policy.samples, or leave the "
                    "policy out (policy=null) for a verdict on labelled pairs alone"
                )
            if self.rlhf is not None or self.validation is not None:
                raise ValueError(
                    "policy.name=world has no weights, so nothing can be trained or started from it; set policy.name "
                    "to sft, a folder or a hub name"
                )
        return self

    @property
    def needs_policy(self) -> bool:
        """Whether anything is computed with the policy itself: not where its samples are given, but for the study."""
        return self.policy is not None and (self.policy.samples is None or self.validation is not None)

    def in_world(self, shortcut: StudiedWorld) -> Self:
        """The same in the gold world of a shortcut."""
        gold = self.data.gold.model_copy(update={"shortcut": shortcut})
        return self.model_copy(update={"data": self.data.model_copy(update={"gold": gold})})
