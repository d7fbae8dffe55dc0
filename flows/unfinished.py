"""Runs that have begun and not ended: their settings, so that they can be resumed by name."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psutil

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import write_json
from rmcore.reporting.runs import Run, find_run
from tasks.home import OWNER_ONLY, find_process, home, make_home

FOLDER = ".unfinished"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run that has not ended well yet."""

    name: str
    started: datetime
    config: Mapping[str, Any]
    is_running: bool


@contextmanager
def unfinished(run_name: str, config: PipelineConfig) -> Iterator[None]:
    """Keep the settings of a run from now until it ends well; after a failure or a kill they stay."""
    file = home() / "reports" / FOLDER / f"{run_name}.json"
    record = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "process_created": psutil.Process().create_time(),
        "config": config.model_dump(mode="json"),
    }
    make_home(home())
    file.parent.mkdir(mode=OWNER_ONLY, exist_ok=True)
    write_json(file, record)
    yield
    file.unlink(missing_ok=True)


def read_unfinished() -> list[Unfinished]:
    """All such runs of this home, the newest first."""
    found = []
    for file in (home() / "reports" / FOLDER).glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # nothing can be resumed by such a file
            record = json.loads(file.read_text(encoding="utf-8"))
            running = find_process(record["pid"], record["process_created"]) is not None
            started = datetime.fromisoformat(record["started"])
            found.append(Unfinished(file.stem, started, dict(record["config"]), running))
    return sorted(found, key=lambda run: run.started, reverse=True)


def recorded_config(name: str, finished: list[Run]) -> PipelineConfig:
    """The settings of a run, an unfinished one first, as it was begun.

    Args:
        name: of the run, or how that begins.
        finished: the runs that ended.

    Raises:
        ConfigError: there is no such run, there are several, it runs now, or it is none of the pipeline.
        pydantic.ValidationError: another version had other settings; names them.
    """
    begun = read_unfinished()
    named = [run for run in begun if run.name == name] or [run for run in begun if run.name.startswith(name)]
    if len(named) > 1:
        raise ConfigError(f"{name!r} may be {', '.join(run.name for run in named)}; write more of the name.")
    if named and named[0].is_running:
        raise ConfigError(f"{named[0].name} is running; wait for it, or end it first.")
    if named:
        return PipelineConfig.model_validate(named[0].config)
    run = find_run(finished, name, also="; no unfinished run is called so either")
    if "config" not in run.record:
        raise ConfigError(f"{run.name} is not a run of the pipeline; start it again with the command it came from.")
    return PipelineConfig.model_validate(run.record["config"])
