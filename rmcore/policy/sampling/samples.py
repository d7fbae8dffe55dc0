"""Scored samples of a policy as a file: one row a sample, a prompt in common, one reward column a judge."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.data.readers.records import RawRecord
from rmcore.data.readers.sources import iter_records


def read_samples(path: Path) -> pd.DataFrame:
    """Rows of a file: Parquet, CSV, JSON or JSONL, also compressed.

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
    """Rewards of the samples of each prompt, in the order in which prompts first appear.

    Raises:
        DataError: a column is missing or its values are no numbers.
    """
    for name in (prompt, reward):
        if name not in samples:
            raise DataError(f"there is no column {name!r} among {', '.join(map(str, samples.columns))}; name another.")
    values = pd.to_numeric(samples[reward], errors="coerce").to_numpy(dtype=np.float64)
    if len(values) and np.isnan(values).all():
        raise DataError(f"column {reward!r} holds no numbers; name the column of the rewards.")
    groups = samples.groupby(prompt, sort=False).indices
    return [values[rows] for rows in groups.values()]
