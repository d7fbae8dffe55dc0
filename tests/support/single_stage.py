"""Single stages of a config with artifacts in given folders, in this process."""

from collections.abc import Mapping
from pathlib import Path

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.store import ArtifactRef
from rmcore.stages import run
from rmcore.stages.order import stage_of
from rmcore.stages.stage import Stage


def stage_with(name: str, config: PipelineConfig, folders: Mapping[str, Path]) -> Stage:
    """Stage `name` with the artifacts in `folders`, by stage."""
    return stage_of(name, config, {stage: ArtifactRef(stage, "k", str(path), "d") for stage, path in folders.items()})


def run_stage(name: str, config: PipelineConfig, folders: Mapping[str, Path], out: Path) -> None:
    """Run stage `name` into `out`."""
    run.run_stage(stage_with(name, config, folders), out)
