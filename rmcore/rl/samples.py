"""Scored samples of a policy as a file: one row a sample, a prompt in common, one reward column a judge."""

from pathlib import Path

import numpy as np
import pandas as pd

from rmcore.errors import DataError
from rmcore.rl.best_of_n import FloatArray

READERS = {
    ".parquet": pd.read_parquet,
    ".csv": pd.read_csv,
    ".jsonl": lambda path: pd.read_json(path, lines=True),
    ".json": pd.read_json,
}


def read_samples(path: Path) -> pd.DataFrame:
    """Rows of a Parquet, CSV, JSON or JSONL file.

    Raises:
        DataError: the file is missing, of another kind or cannot be read.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path} is of no kind that is read here; give one of {', '.join(READERS)}.")
    try:
        return reader(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); write it again.") from error


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
