"""The cost of a judge, and whether it may cost more: one place counts requests, tokens and money."""

from dataclasses import dataclass
from typing import Any

from rmcore.config.judging import JudgingConfig
from rmcore.judging.answers import Reply

CHARACTERS, QUESTION_TOKENS = 4, 150
"""Characters of a token, and tokens of a question besides the texts, as a plan takes them: of English text."""


def planned(judging: JudgingConfig, calls: int, text_tokens: float) -> str:
    """Say what so many calls with texts of so many tokens each cost at most."""
    read = calls * (text_tokens + QUESTION_TOKENS)
    cost = judging.cost(read, calls * judging.answer_tokens)
    price = f" for {cost:.3g} at most" if cost else ""
    return (
        f"{calls:,} calls, about {read:,.0f} tokens read{price}; at most twice as much if replies cannot be read, less "
        "what is known"
    )


class NotSentError(Exception):
    """A request may not be sent, as the budget is spent or the user wants to stop; its question stays open."""


@dataclass
class Budget:
    """Counts what was sent and what it cost, against the limits of the settings.

    num_calls: requests with a question that were sent, repeated ones included.
    num_tokens: read and written, by the server's counts; requests without an answer have none.
    cost: of them, by the prices.
    largest: cost of the dearest request so far.
    """

    settings: JudgingConfig
    num_calls: int = 0
    num_tokens: int = 0
    cost: float = 0.0
    largest: float = 0.0

    def send(self) -> None:
        """Count a request that is about to be sent.

        Raises:
            NotSentError: a limit is reached.
        """
        if self.is_spent:
            raise NotSentError
        self.num_calls += 1

    def add(self, reply: Reply) -> None:
        """Count the tokens of an answer."""
        cost = self.settings.cost(reply.tokens_read, reply.tokens_written)
        self.num_tokens, self.cost = self.num_tokens + reply.tokens_read + reply.tokens_written, self.cost + cost
        self.largest = max(self.largest, cost)

    @property
    def is_spent(self) -> bool:
        """Whether a limit is reached."""
        limits = ((self.num_calls, self.settings.max_calls), (self.cost, self.settings.max_cost))
        return any(limit is not None and used >= limit for used, limit in limits)

    def may_exceed(self, num_open: int) -> bool:
        """Whether `num_open` calls under way and one more may spend what is left, each as much as the largest so far.

        Before the first answer it is not known how large they are.
        """
        limit = self.settings.max_cost
        return limit is not None and (self.largest == 0 or self.cost + (num_open + 1) * self.largest > limit)

    def to_dict(self) -> dict[str, Any]:
        """Calls, tokens and cost. JSON-ready."""
        return {"num_calls": self.num_calls, "num_tokens": self.num_tokens, "cost": self.cost}
