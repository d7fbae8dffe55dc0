"""Samples of a policy as tables: those of a file that were scored elsewhere, and those that a reward model scores."""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError, ModelError
from rmcore.core.progress import Report, labelled, report_left_out
from rmcore.data.pair import prompt_text
from rmcore.data.readers.records import RawRecord
from rmcore.data.readers.sources import iter_records
from rmcore.data.rendering import TokenizedSide

if TYPE_CHECKING:  # a file of scored samples needs no torch
    from rmcore.models.reward_model import BradleyTerryRM


def read_samples(path: Path) -> pd.DataFrame:
    """Read scored samples, one row a sample: Parquet, CSV, JSON or JSONL, also compressed.

    A row that is no record, or names a key twice, is left out; how many, why and which is first is said on stderr.

    Raises:
        DataError: the file is missing, of another kind, cannot be read or holds no row.
    """
    rows: list[dict[str, Any]] = []
    bad: list[RawRecord] = []
    for record in iter_records(str(path)):
        if record.fields is None:
            bad.append(record)
        else:
            rows.append(record.fields)
    reasons = ", ".join(
        f"{why}: {count}" for why, count in Counter(str(record.problem) for record in bad).most_common()
    )
    if not rows:
        raise DataError(
            f"{path} holds no row that can be read ({reasons or 'it has none'}); write it again, one row a sample."
        )
    if bad:
        print(
            f"warning: {len(bad)} of {len(bad) + len(rows)} rows of {path} are left out ({reasons}); the first is row "
            f"{bad[0].row}",
            file=sys.stderr,
        )
    return pd.DataFrame(rows)


def pools(samples: pd.DataFrame, prompt: str, reward: str) -> list[FloatArray]:
    """Rewards of the samples of each prompt, in the order in which prompts first appear."""
    values = samples[reward].to_numpy(dtype=np.float64)
    return [values[rows] for rows in samples.groupby(prompt, sort=False).indices.values()]


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """Rewards of N samples in logits.

    samples: the N rows: all that were given, but for prompts with a sample that the reward model cannot read.
    rewards: (N,) by the reward model.
    num_cut: samples longer than the reward model reads.
    num_unreadable: samples that it cannot read, whose prompts are left out.
    """

    samples: pd.DataFrame
    rewards: FloatArray
    num_cut: int
    num_unreadable: int


def score_samples(rm: "BradleyTerryRM", samples: pd.DataFrame, report: Report) -> ScoredSamples:
    """Score samples in one pass.

    A sample that the reward model cannot read has no reward. Its prompt is left out with all samples, since those that
    are left of it are no longer a draw of the policy; how many is said on stderr.

    Args:
        rm: the reward model.
        samples: columns prompt_id, prompt and response; an empty response is scored as such. Only text reaches the
            reward model, so the policy may have another tokenizer.
        report: progress.

    Raises:
        DataError: each prompt has a sample that cannot be read.
        ModelError: a reward is not finite.
    """
    samples, sides, num_unreadable = _readable(rm, samples, report)
    rewards = rm.score_sides(sides, report=labelled(report, "samples scored")).astype(np.float64)
    broken = np.flatnonzero(~np.isfinite(rewards))
    if len(broken):
        row = samples.iloc[broken[0]]
        raise ModelError(
            f"{len(broken)} of {len(rewards)} samples got a reward that is not finite; the first answers "
            f"{row['prompt'][:60]!r} with {row['response'][:60]!r}. The reward model's weights are broken or overflow; "
            "evaluate it before a policy is optimised against it."
        )
    return ScoredSamples(samples, rewards, sum(side.num_cut > 0 for side in sides), num_unreadable)


def _readable(
    rm: "BradleyTerryRM", samples: pd.DataFrame, report: Report
) -> tuple[pd.DataFrame, list[TokenizedSide], int]:
    """The samples of prompts whose samples can all be read, their tokens, and how many samples cannot be read."""
    sides = rm.renderer.try_sides(list(zip(samples["prompt"], samples["response"], strict=True)), report=report)
    errors = [(place, side) for place, side in enumerate(sides) if isinstance(side, DataError)]
    if not errors:
        return samples, [side for side in sides if isinstance(side, TokenizedSide)], 0
    bad = samples["prompt_id"].isin(samples["prompt_id"].iloc[[place for place, _ in errors]]).to_numpy()
    place, reason = errors[0]
    first = f"that {prompt_text(samples['prompt'].iloc[place])[:60]!r} is answered with: {reason}"
    if bad.all():
        raise DataError(
            f"{len(errors)} of {len(sides)} samples cannot be read as the reward model reads text, at least one of "
            f"each prompt; the first is {first}"
        )
    prompts = samples["prompt_id"][bad].nunique()
    report_left_out(len(errors), f"samples, with all others of their {prompts} prompts,", f"the first is {first}")
    kept = [side for side, left in zip(sides, bad, strict=True) if isinstance(side, TokenizedSide) and not left]
    return samples[~bad].reset_index(drop=True), kept, len(errors)
