"""The scale of a reward model's margins, beta: P(first preferred) = sigmoid(beta * margin), as it was trained.

Rewards alone do not say how sure a model is: one that was trained with beta = 0.25 has margins four times as wide as
one with beta = 1 that gives the same probabilities. So a checkpoint records its beta (`rm_preference.json`), next to
the record of how it wants its text. One without the record, trained elsewhere, has beta 1.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rmcore.core.errors import ModelError

PREFERENCE_FILE = "rm_preference.json"


def checked_beta(value: Any, source: str) -> float:
    """`value` as a beta.

    Args:
        value: what was given or read.
        source: where it is, for the message.

    Raises:
        ModelError: it is no finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ModelError(
            f"{source} says beta={value!r}, and the scale of a margin is a finite number above 0: without it no reward "
            "is a probability. Write the train.beta that the model was trained with (1.0 unless it was set)."
        )
    return float(value)


def read_beta(folder: Path) -> float:
    """The beta of the checkpoint in `folder`; 1.0 where it has no record.

    Raises:
        ModelError: the record is damaged, or its beta is no finite number above 0.
    """
    path = folder / PREFERENCE_FILE
    if not path.is_file():
        return 1.0
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or record.keys() != {"beta"}:
            raise ValueError("it holds something else than beta")
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is damaged ({error}), so it is not known which probability a margin of this model means; restore "
            "it from the folder the model was trained into."
        ) from error
    return checked_beta(record["beta"], str(path))


def write_beta(folder: Path, beta: float) -> None:
    """Write the record into a checkpoint folder."""
    (folder / PREFERENCE_FILE).write_text(json.dumps({"beta": beta}) + "\n")
