"""Rewards of many pairs as a table: what evaluation, comparison and `rm-opt score` start from."""

from collections.abc import Sequence

import pandas as pd

from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.data.rendering import count_cut
from rmcore.model import BradleyTerryRM
from rmcore.progress import Report


def score_pairs_table(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], *, report: Report | None = None
) -> tuple[pd.DataFrame, dict[str, int]]:
    """Score both sides of P pairs.

    Returns:
        P rows in the order of `pairs`: pair_id, prompt_id, subset, reward_chosen, reward_rejected (logits),
        chosen_chars, rejected_chars, chosen_cut, rejected_cut (tokens over the limit); and the counts of sides cut to
        the limit (`rendering.count_cut`).
    """
    tokenized = rm.renderer.tokenize_pairs(pairs)
    sides = [side for pair in tokenized for side in (pair.chosen, pair.rejected)]

    def progress(done: int) -> None:
        if report is not None:
            report(done, len(sides), "sides scored")

    rewards = rm.score_sides(sides, progress=progress).astype("float64").reshape(-1, 2)
    frame = pd.DataFrame(
        {
            "pair_id": [pair.pair_id for pair in pairs],
            "prompt_id": [pair.prompt_id for pair in pairs],
            "subset": [pair.metadata.get("subset") for pair in pairs],
            "reward_chosen": rewards[:, 0],
            "reward_rejected": rewards[:, 1],
            "chosen_chars": [len(pair.chosen) for pair in pairs],
            "rejected_chars": [len(pair.rejected) for pair in pairs],
            "chosen_cut": [pair.truncation["chosen"] for pair in tokenized],
            "rejected_cut": [pair.truncation["rejected"] for pair in tokenized],
        }
    )
    return frame, count_cut(tokenized)


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


def score_responses_table(
    rm: BradleyTerryRM, rows: Sequence[tuple[str, str]], *, report: Report | None = None
) -> pd.DataFrame:
    """Score N (prompt, response) rows, each prompt one user turn.

    Returns them in order with columns prompt, response, reward (logits).
    """
    sides = rm.renderer.tokenize_sides(rows)

    def progress(done: int) -> None:
        if report is not None:
            report(done, len(sides), "responses scored")

    rewards = rm.score_sides(sides, progress=progress).astype("float64")
    return pd.DataFrame({"prompt": [row[0] for row in rows], "response": [row[1] for row in rows], "reward": rewards})
