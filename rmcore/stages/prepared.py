"""Readers of the artifacts of the stages prepare and policy, for later stages."""

from pathlib import Path

from rmcore.config.policy import SFT
from rmcore.data.observation import Observation
from rmcore.data.parquet_rows import RecordFile
from rmcore.data.table import OBSERVATIONS

CEILING_FILE = "label_ceiling.json"
"""Best accuracy any model can expect on each split; only the synthetic benchmark knows it."""
POLICY_FOLDER = "model"
"""Where the artifact of the stage policy has a policy that was fine-tuned there."""


def observations_of(prepared: Path, split: str) -> RecordFile[Observation] | None:
    """All that a split of the artifact of the stage prepare says; None where that is strict pairs alone."""
    path = prepared / f"{split}_observations.parquet"
    return RecordFile(OBSERVATIONS, path) if path.is_file() else None


def policy_place(name: str, artifact: Path) -> str:
    """Folder or hub name of the policy `name`, whose artifact of the stage policy is given."""
    return str(artifact / POLICY_FOLDER) if name == SFT else name
