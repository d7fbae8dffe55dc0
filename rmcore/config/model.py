"""Settings of the reward model."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Names, Settings

FROM_POLICY = "policy"
"""Name of a reward model that starts from the policy's weights."""
WeightDtype = Literal["float32", "bfloat16"]
"""Number format of the weights of a model that is only asked: bfloat16 rounds them and takes half the memory."""
TINY_SIZES = {"tiny": (1.0, 1.0), "tiny-small": (0.6, 0.5), "tiny-wide": (1.6, 1.0), "tiny-deep": (1.0, 2.0)}
"""Models that are built on the spot, by name: width and depth as multiples of tiny's 160 and 4 layers."""


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) next to the reward head, in place of full fine-tuning."""

    rank: int = Field(default=8, ge=1, le=8192)
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

    name: Annotated[str, Names("weights")] = "tiny"
    """A folder, a hub name, or `tiny`, `minilm`, `deberta`, `llama`; `policy`: the policy's own weights
    (arXiv:2203.02155)."""
    max_seq_len: int = Field(default=512, ge=8)
    """Longest side (prompt + one completion) in tokens; longer ones are cut and counted."""
    use_chat_template: bool = True
    """Render with the tokenizer's chat template where it has one, else as `Prompt: ...\\n\\nResponse: ...`."""
    render_fn: Annotated[str | None, Names("function")] = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
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
