"""Settings of a language model that judges."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import RUN_ONLY, Names, Settings

ENDPOINT_PREFIX = "openai:"
KEY_VARIABLE = "OPENAI_API_KEY"
MOST_UNREAD = 0.05
"""Share of pairs without a readable verdict beyond which a judge does not decide: those that are left are a choice."""


class JudgingConfig(Settings):
    """How a language model behind an OpenAI-compatible endpoint is asked, and what it may cost."""

    mode: Literal["pointwise", "pairwise"] = "pointwise"
    """`pointwise`: a score from 1 to 9 of each response. `pairwise`: which of two is better, or a tie; several get
    utilities by at most three comparisons a response."""
    rubric: Annotated[str, Names("rubric")] = Field(default="helpfulness", min_length=1)
    """Criteria of a good answer: helpfulness, factuality, safety, instructions, or a text file with a rubric of your
    own, in which few-shot examples may be. The file holds the criteria alone, or a whole question with the places
    {prompt} and {response} (in mode pairwise {prompt}, {response_a} and {response_b})."""
    audit: Annotated[str | None, Names("audit")] = None
    """The audit of this judge (`rm-opt judge audit --json`). If it says that the judge informs and does not decide, no
    verdict of the judge's is more than unclear. Its reliability corrects readiness and weights labels. Left out:
    verdicts say that nobody has audited it."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of the judge."""
    answer_tokens: int = Field(default=16, ge=1, le=100_000)
    """Most tokens of an answer; a reasoning model needs room for its thoughts, 4,000 for example."""
    max_calls: Annotated[int | None, RUN_ONLY] = Field(default=None, ge=1, le=10**9)
    """Requests with a question in one stage of a run, at most, repeated ones included. When they are spent the run ends
    with status 3, and the same command continues without asking anything twice; left out: no limit."""
    price_read: Annotated[float, RUN_ONLY] = Field(default=0.0, ge=0)
    """Price of a million tokens read, in the currency of `max_cost`."""
    price_written: Annotated[float, RUN_ONLY] = Field(default=0.0, ge=0)
    """Price of a million tokens written."""
    max_cost: Annotated[float | None, RUN_ONLY] = Field(default=None, gt=0)
    """Cost of one stage by these prices, at most; like `max_calls`."""
    concurrency: Annotated[int, RUN_ONLY] = Field(default=16, ge=1, le=1024)
    """Calls that wait for an answer at once, at most."""
    timeout_seconds: Annotated[float, RUN_ONLY] = Field(default=120.0, gt=0, le=86_400)
    """Most time of a request until its answer is complete; a request that failed is repeated up to five times."""
    key_variable: Annotated[str, RUN_ONLY] = Field(default=KEY_VARIABLE, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the endpoint's key. The key itself is no setting and is never stored."""

    @model_validator(mode="after")
    def _a_cost_has_prices(self) -> Self:
        if self.max_cost is not None and self.price_read == self.price_written == 0:
            raise ValueError(
                f"max_cost={self.max_cost:g} is a budget in money, and no price is known; set price_read and "
                "price_written, of a million tokens"
            )
        return self

    def cost(self, tokens_read: float, tokens_written: float) -> float:
        """Price tokens, in the currency of the prices."""
        return (tokens_read * self.price_read + tokens_written * self.price_written) / 1e6


def is_endpoint(judge: str) -> bool:
    """Whether `policy.judge` names a language model behind an endpoint."""
    return judge.startswith(ENDPOINT_PREFIX)


def is_function(judge: str) -> bool:
    """Whether `policy.judge` names a function, and neither an endpoint nor a folder."""
    return ":" in judge and not is_endpoint(judge)


def judge_name(judge: str) -> str:
    """`policy.judge` as people read it: a function by its name, a model by that of its folder or endpoint."""
    if is_endpoint(judge):
        return f"the language model {judge.removeprefix(ENDPOINT_PREFIX).partition('@http')[0]}"
    return judge if is_function(judge) else f"the reward model {Path(judge).name}"
