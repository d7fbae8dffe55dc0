"""The interface of a stage module.

    def run(settings: PipelineConfig, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None

is given the config, in which any setting raises that its `reads` in `rmcore.stages.registry` does not have. It reads
the artifacts in `upstream`, writes its own files into `out` (a folder that exists and is empty but for
`metrics.jsonl`), sends numbers by step to `tracker` and progress to `report`. Same inputs, same files. By convention
`summary.json` holds `{"metrics": {name: number or {"value", "ci_low", "ci_high"}}}`, `figures/` PNGs and `tables/`
CSVs; the code that tracks runs reads those, now or from the cache.
"""

from collections.abc import Mapping
from pathlib import Path

from rmcore.config.policy import SFT
from rmcore.data.observation import Observation
from rmcore.data.parquet_rows import RecordFile
from rmcore.data.table import OBSERVATIONS

Upstream = Mapping[str, Path]
"""Folders of the upstream artifacts by stage name."""
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
