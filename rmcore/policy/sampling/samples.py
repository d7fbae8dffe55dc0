"""Scored samples of a policy as a file: one row a sample, a prompt in common, one reward column a judge."""

from pathlib import Path

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.data.readers.sources import iter_records


def read_samples(path: Path) -> pd.DataFrame:
    """Rows of a file: Parquet, CSV, JSON or JSONL, also compressed; a row that is no record is left out.

    Raises:
        DataError: the file is missing, of another kind, cannot be read or holds no row.
    """
    rows = [record.fields for record in iter_records(str(path)) if record.fields is not None]
    if not rows:
        raise DataError(f"{path} holds no row that can be read; write it again, one row a sample.")
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
