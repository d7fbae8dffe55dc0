"""Settings of the explanations: why a reward model ranks its worst mistakes as it does."""

from pydantic import Field

from rmcore.config.base import Settings


class ExplainConfig(Settings):
    """Causes of the trained model's worst held-out mistakes: words, edits, training pairs (rmcore/explain)."""

    mistakes: int = Field(default=10, ge=1, le=200)
    """Held-out mistakes that are explained: those with the largest wrong margins, one a prompt."""
    train_pairs: int = Field(default=1000, ge=0)
    """Training pairs whose influence on them is computed, drawn at random where there are more; 0: none."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory for gradients of pairs, GiB: less takes longer. Left out: half of what is free."""
