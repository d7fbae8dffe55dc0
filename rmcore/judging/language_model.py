"""A language model as a judge: scores of single responses, comparisons of two, utilities of several."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rmcore.config.judging import JudgingConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import Prompt, as_rows, prompt_key
from rmcore.judging.answers import Question, Reply
from rmcore.judging.comparisons import COMPARISONS_EACH, Comparisons
from rmcore.judging.endpoint import Address, Endpoint
from rmcore.judging.rubrics import (
    FIRST,
    SCORES,
    SECOND,
    asked_again,
    identity,
    pair_question,
    read_choice,
    rubric_text,
    score_question,
)

FEWEST_UNREAD = 8
"""Unreadable replies, with no readable one, after which the model is considered unable to judge."""
SURE = 0.5
"""Least probability of all scores together at which they say more than the digit that was written."""


class LanguageModelJudge:
    """Judges by asking a model behind an endpoint.

    Args:
        named: `openai:MODEL@URL`.
        settings: how it is asked.
        folder: where answers are kept; None: the home.

    Attributes:
        name: as people read it.
        identity: what makes two judges the same one, JSON-ready.
        endpoint: what is asked, with its counts.
        num_unread: replies that could not be read, even after a second request.
        num_read: those that could.
        why_unread: what the server or the settings need for that, where a reply tells it, or empty.
    """

    def __init__(self, named: str, settings: JudgingConfig, folder: Path | None = None) -> None:
        self.settings, self.rubric = settings, rubric_text(settings.rubric)
        self.endpoint = Endpoint(Address.parse(named), settings, folder)
        self.identity = identity(named, settings)
        self.name = f"the language model {self.endpoint.address.model}"
        self.num_unread = self.num_read = 0
        self.why_unread = ""

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str], report: Report = silent) -> FloatArray:
        """Scores of N responses, (N,), or in mode pairwise utilities among those of a prompt, whose mean is 0.

        NaN where the model's reply could not be read: such a response is not judged.

        Raises:
            ConfigError: the endpoint refuses the question or the key.
            JudgementsWantedError: the budget is spent.
            ServingError: the endpoint does not answer.
        """
        if self.settings.mode == "pointwise":
            return self.scores(prompts, responses, report)
        return self._utilities(*as_rows(prompts, responses), report)

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[str], report: Report = silent) -> FloatArray:
        """Scores of N responses from 1 to 9, (N,), NaN unread."""
        asked = [score_question(self.rubric, *row) for row in zip(*as_rows(prompts, responses), strict=True)]
        return np.array([np.nan if read is None else _expected(*read) for read in self._replies(asked, report)])

    def compare(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str], report: Report = silent
    ) -> FloatArray:
        """By how much the first of two responses wins, (N,): the mean of both orders, from 1 to -1; NaN unread.

        Two equal texts are a tie, and nobody is asked.
        """
        won = self.verdicts(prompts, first, second, report)
        return np.asarray((won[0] - won[1]) / 2)

    def verdicts(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str], report: Report = silent
    ) -> FloatArray:
        """Ask in both orders how the response shown first does, (2, N): 1 won, 0 tied, -1 lost; NaN unread.

        Row 0 shows `first` first, row 1 `second`.
        """
        rows = list(zip(*as_rows(prompts, first), as_rows(prompts, second)[1], strict=True))
        places = [at for at, (_, a, b) in enumerate(rows) if a != b]
        asked = [pair_question(self.rubric, *rows[at]) for at in places]
        asked += [pair_question(self.rubric, rows[at][0], rows[at][2], rows[at][1]) for at in places]
        won = np.zeros((2, len(rows)))
        won[:, places] = np.array([_score(read) for read in self._replies(asked, report)]).reshape(2, -1)
        return won

    def _utilities(self, prompts: Sequence[Prompt], responses: Sequence[str], report: Report) -> FloatArray:
        """Fit utilities to comparisons of each prompt's responses."""
        rows: dict[str, list[int]] = {}
        for at, prompt in enumerate(prompts):
            rows.setdefault(prompt_key(prompt), []).append(at)
        pools = list(rows.values())
        texts = [list(dict.fromkeys(responses[at] for at in pool)) for pool in pools]  # equal texts have one utility
        by_row = np.full(len(prompts), np.nan)
        fitted = self._by_pairs([prompts[pool[0]] for pool in pools], texts, report)
        for pool, answers, utilities in zip(pools, texts, fitted, strict=True):
            utility = dict(zip(answers, utilities, strict=True))
            by_row[pool] = [utility[responses[row]] for row in pool]
        return np.round(by_row, 4)  # the fit is no more exact, and equal utilities shall be equal

    def _by_pairs(self, prompts: Sequence[Prompt], texts: Sequence[Sequence[str]], report: Report) -> list[FloatArray]:
        """Compare in rounds of the most informative pairs of all prompts together; NaN where nothing was read."""
        comparisons = Comparisons([len(answers) for answers in texts])
        rng = np.random.default_rng(0)
        while pairs := comparisons.next_pairs(rng):
            asked = [
                pair_question(self.rubric, prompts[at], texts[at][first], texts[at][second])
                for at, first, second in pairs
            ]
            for pair, reply in zip(pairs, self._replies(asked, report), strict=True):
                comparisons.add(*pair, (_score(reply) + 1) / 2)
        return [
            np.array(
                [
                    value if len(pool) == 1 or comparisons.is_compared(at, place) else np.nan
                    for place, value in enumerate(pool)
                ]
            )
            for at, pool in enumerate(comparisons.fit()[0])
        ]

    def _replies(self, asked: Sequence[Question], report: Report) -> list[tuple[str, Reply] | None]:
        """The choice and the reply of each question; an unread one is asked once more, and is then None."""
        replies = self.endpoint.ask(asked, report)
        read = [read_choice(reply, question.choices) for question, reply in zip(asked, replies, strict=True)]
        unread = [at for at, choice in enumerate(read) if choice is None and not replies[at].lost]
        if unread:
            again = self.endpoint.ask([asked_again(asked[at], replies[at]) for at in unread], report)
            for at, reply in zip(unread, again, strict=True):
                replies[at], read[at] = reply, read_choice(reply, asked[at].choices)
        left = [at for at, choice in enumerate(read) if choice is None]
        self.num_unread, self.num_read = self.num_unread + len(left), self.num_read + len(asked) - len(left)
        if left:
            first = replies[next((at for at in left if replies[at].lost), left[0])]
            self.why_unread = self.why_unread or first.lost
            why = first.lost or (
                f"one is {(first.refusal or first.text)[:120]!r}, as the model does not follow the question. A "
                "reasoning model needs a larger answer_tokens; others cannot judge"
            )
            print(
                f"warning: {len(left)} of {len(asked)} answers of {self.name} could not be read and count as no "
                f"judgement: {why}.",
                file=sys.stderr,
            )
            if self.num_read == 0 and self.num_unread >= FEWEST_UNREAD:
                raise DataError(f"none of {self.num_unread} answers of {self.name} could be read: {why}.")
        return [None if choice is None else (choice, reply) for choice, reply in zip(read, replies, strict=True)]


def calls_for_rewards(judging: JudgingConfig, num_prompts: int, num_samples: int) -> tuple[int, int]:
    """Give the most calls that judge so many samples of each of so many prompts, and the samples that a call shows."""
    calls = num_prompts * num_samples
    return (COMPARISONS_EACH * calls, 2) if judging.mode == "pairwise" else (calls, 1)


def _expected(choice: str, reply: Reply) -> float:
    """The expected score where the probabilities are known, else the one that was written."""
    shares = {int(score): float(np.exp(value)) for score, value in reply.logprobs.items() if score in SCORES}
    total = sum(shares.values())
    if total < SURE or reply.answer != choice:
        return float(choice)
    return sum(score * share for score, share in shares.items()) / total


def _score(read: tuple[str, Reply] | None) -> float:
    """1 where the response shown first is better, -1 where the second is, 0 for a tie, NaN unread."""
    return np.nan if read is None else {FIRST: 1.0, SECOND: -1.0}.get(read[0], 0.0)
