"""Settings of the explanations: why a reward model ranks its worst mistakes as it does."""

from pydantic import Field

from rmcore.config.base import Settings


class ExplainConfig(Settings):
    """Causes of the trained model's worst held-out mistakes: words and edits (rmcore/explain)."""

    mistakes: int = Field(default=10, ge=1, le=200)
    """Held-out mistakes that are explained: those with the largest wrong margins, one a prompt."""
