"""Rewards of many pairs as a table: what evaluation, comparison and `rm-opt score` start from."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pandas as pd

from rmcore.core.errors import DataError
from rmcore.core.progress import Report, labelled, report_left_out, silent
from rmcore.data.pair import PreferencePair, Prompt, prompt_text
from rmcore.data.rendering import DroppedPair, Readable, Renderer, TokenizedSide, count_cut
from rmcore.data.table import rewards_table
from rmcore.models.checks import refuse_not_finite, warn_of_equal
from rmcore.models.reward_model import BradleyTerryRM


class SideScorer(Protocol):
    """Gives rewards of tokenized sides: a reward model here, or one that is served."""

    @property
    def renderer(self) -> Renderer:
        """How it reads text."""

    def score_sides(self, sides: Sequence[TokenizedSide], *, report: Report = silent) -> np.ndarray:
        """Rewards of N sides: (N,) float32 in logits, in their order."""


def score_pairs_table(
    rm: SideScorer, pairs: Sequence[PreferencePair], *, report: Report = silent
) -> tuple[pd.DataFrame, dict[str, int]]:
    """Score both sides of P pairs; those that the model cannot read are left out, counted and said on stderr.

    Returns:
        A row for each pair that can be read, in the order of `pairs`: pair_id, prompt_id, subset, reward_chosen,
        reward_rejected (logits), chosen_chars, rejected_chars, chosen_cut, rejected_cut (tokens over the limit); and
        the counts of sides cut to the limit (`rendering.count_cut`), with `num_unreadable_pairs`.

    Raises:
        DataError: none of the pairs can be read.
        ModelError: a reward is not finite; the message names the pairs.
    """
    frame, counts, read = score_readable_pairs(rm, pairs, report=report)
    if read.dropped:
        _report_dropped(read.dropped)
    return frame, counts


def score_readable_pairs(
    rm: SideScorer, pairs: Sequence[PreferencePair], *, report: Report = silent
) -> tuple[pd.DataFrame, dict[str, int], Readable]:
    """The same, with the pairs that the model can read and those that it cannot, and nothing said about them.

    Raises:
        DataError, ModelError: as `score_pairs_table`.
    """
    read = rm.renderer.tokenize_readable(pairs, report=report)
    pairs, tokenized = read.pairs, read.tokenized
    sides = [side for pair in tokenized for side in (pair.chosen, pair.rejected)]

    rewards = rm.score_sides(sides, report=labelled(report, "sides scored")).astype("float64")
    refuse_not_finite(rewards, lambda place: f"{('chosen', 'rejected')[place % 2]} of pair {pairs[place // 2].pair_id}")
    warn_of_equal(rewards)
    frame = rewards_table(pairs, rewards.reshape(-1, 2)).assign(
        chosen_cut=[pair.truncation["chosen"] for pair in tokenized],
        rejected_cut=[pair.truncation["rejected"] for pair in tokenized],
    )
    return frame, count_cut(tokenized) | {"num_unreadable_pairs": len(read.dropped)}, read


def with_texts(table: pd.DataFrame, pairs: Sequence[PreferencePair]) -> pd.DataFrame:
    """Add prompt, chosen and rejected texts to rows of a reward table, by pair_id."""
    texts = pd.DataFrame(
        {
            "pair_id": [pair.pair_id for pair in pairs],
            "prompt": [prompt_text(pair.prompt) for pair in pairs],
            "chosen": [pair.chosen for pair in pairs],
            "rejected": [pair.rejected for pair in pairs],
        }
    ).drop_duplicates("pair_id")
    return table.merge(texts, on="pair_id", how="left")


def score_readable_responses(
    rm: SideScorer, responses: Sequence[tuple[Prompt, str]], rows: Sequence[int] = (), *, report: Report = silent
) -> tuple[pd.DataFrame, list[str]]:
    """Score N (prompt, response) sides.

    Args:
        rm: scores them.
        responses: N of them.
        rows: (N,) the row of the source that each is in; empty: they are rows 1 to N.
        report: of the tokenizing, then of the scoring.

    Returns:
        Those that the model can read, in order, with columns row, prompt, response, reward (logits), indexed by their
        places in `responses`; and a sentence for each of the others.

    Raises:
        DataError: no row can be read.
        ModelError: a reward is not finite; the message names the rows.
    """
    rows = rows or range(1, len(responses) + 1)
    all_sides = rm.renderer.try_sides(responses, report=report)
    unreadable = [
        f"row {row}: {side}" for row, side in zip(rows, all_sides, strict=True) if isinstance(side, DataError)
    ]
    if unreadable and len(unreadable) == len(rows):
        raise DataError(f"none of the {len(rows)} rows can be read as this model reads text; {unreadable[0]}")
    sides = {index: side for index, side in enumerate(all_sides) if isinstance(side, TokenizedSide)}
    numbers = [rows[index] for index in sides]

    rewards = rm.score_sides(list(sides.values()), report=labelled(report, "responses scored")).astype("float64")
    refuse_not_finite(rewards, lambda index: f"row {numbers[index]}")
    warn_of_equal(rewards)
    columns = {
        "row": numbers,
        "prompt": [prompt_text(responses[index][0]) for index in sides],
        "response": [str(responses[index][1]) for index in sides],
        "reward": rewards,
    }
    return pd.DataFrame(columns, index=list(sides)), unreadable


def readable_pairs(rm: BradleyTerryRM, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """The pairs that the model can read; the others are counted and said on stderr.

    Raises:
        DataError: there are pairs, and none can be read.
    """
    read = rm.renderer.tokenize_readable(pairs)
    if read.dropped:
        _report_dropped(read.dropped)
    return read.pairs


def _report_dropped(dropped: Sequence[DroppedPair]) -> None:
    report_left_out(len(dropped), "pairs", f"pair {dropped[0].pair_id}: {dropped[0].reason}")
