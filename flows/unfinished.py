"""Runs that have begun and not ended: their settings, so that they can be resumed by name."""

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import remove_abandoned, write_json
from rmcore.core.processes import has_died, this_process
from rmcore.reporting.runs import Run, find_run
from tasks.home import OWNER_ONLY, home, make_home

FOLDER = ".unfinished"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run that has not ended well yet.

    `name` is that of its study and seed, which equal runs share; `file` is its own. `resume` is what it is resumed by:
    the name, where that is no other's.
    """

    name: str
    started: datetime
    config: Mapping[str, Any]
    is_running: bool
    file: Path
    resume: str
    problem: str | None = None
    """Why its record cannot be read; it cannot be resumed then."""


@contextmanager
def unfinished(run_name: str, config: PipelineConfig) -> Iterator[None]:
    """Keep the settings of a run from now until it ends well; after a failure or a kill they stay.

    The record is the run's own: runs of one name that are under way together do not touch each other's. It replaces
    those of runs of this name and these settings that have died, as it says the same.
    """
    folder = home() / "reports" / FOLDER
    file = folder / f"{run_name}.{uuid.uuid4().hex[:12]}.json"
    record = {
        "name": run_name,
        "started": datetime.now(UTC).isoformat(),
        "owner": this_process(),
        "config": config.model_dump(mode="json"),
    }
    make_home(home())
    folder.mkdir(mode=OWNER_ONLY, exist_ok=True)
    remove_abandoned(folder, lambda name: name.endswith(".json"))  # no later run has the name of one that was killed
    write_json(file, record)
    for other in read_unfinished():
        if other.name == run_name and not other.is_running and other.config == record["config"]:
            other.file.unlink(missing_ok=True)
    try:
        yield
    except BaseException:
        write_json(file, record | {"owner": None})  # it has ended, though its process may continue
        raise
    file.unlink(missing_ok=True)


def read_unfinished() -> list[Unfinished]:
    """All such runs of this home, the newest first."""
    found = []
    for file in (home() / "reports" / FOLDER).glob("*.json"):
        with suppress(FileNotFoundError):  # its run has just ended
            found.append(_read(file))
    shared = Counter(run.name for run in found)
    own = [run if shared[run.name] > 1 else replace(run, resume=run.name) for run in found]
    return sorted(own, key=lambda run: run.started, reverse=True)


class _Record(BaseModel):
    """The content of a run's file."""

    name: str
    started: datetime
    owner: dict[str, str] | None
    config: dict[str, Any]


def _read(file: Path) -> Unfinished:
    try:
        record = _Record.model_validate_json(file.read_bytes(), strict=True)
        if not record.name.isprintable():
            raise ValueError("its name is no name")
        is_running = record.owner is not None and not has_died(record.owner)
        started = record.started.astimezone(UTC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, OverflowError) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Unfinished(file.stem, datetime.fromtimestamp(0, UTC), {}, False, file, file.stem, problem)
    return Unfinished(record.name, started, record.config, is_running, file, file.stem)


def recorded_config(name: str, finished: list[Run]) -> PipelineConfig:
    """The settings of a run, an unfinished one first, as it was begun.

    Args:
        name: of the run, or how that begins.
        finished: the runs that ended.

    Raises:
        ConfigError: there is no such run, there are several, it runs now, or it is none of the pipeline.
        pydantic.ValidationError: its record has other settings; names them.
    """
    begun = [run for run in read_unfinished() if run.problem is None or run.name == name]
    named = [run for run in begun if name in (run.name, run.file.stem)] or [
        run for run in begun if run.file.stem.startswith(name)
    ]
    stopped = [run for run in named if not run.is_running]
    if len({run.name for run in named}) > 1 or any(run.config != stopped[0].config for run in stopped):
        raise ConfigError(f"{name!r} may be {', '.join(run.resume for run in named)}; write more of the name.")
    if named and not stopped:
        raise ConfigError(f"{named[0].name} is running; wait for it, or end it first.")
    if stopped and stopped[0].problem is not None:
        raise ConfigError(f"{stopped[0].file} cannot be read ({stopped[0].problem}): restore it, or delete it.")
    if stopped:
        return PipelineConfig.model_validate(stopped[0].config)
    run = find_run(finished, name, also="; no unfinished run is called so either")
    if "config" not in run.record or "checkpoint" in run.record:
        raise ConfigError(f"{run.name} is not a run of the pipeline; start it again with the command it came from.")
    return PipelineConfig.model_validate(run.record["config"])


def judged_run(name: str, finished: list[Run]) -> tuple[Run, PipelineConfig, str]:
    """A finished run that judged a reward model, its settings, and the model's checkpoint.

    Raises:
        ConfigError: there is no such run, there are several, it judged no model, or the model is gone or another one
            than it judged.
        pydantic.ValidationError: see `recorded_config`.
    """
    run = find_run(finished, name)
    trained = [stage for stage in run.record.get("stages", []) if stage.get("name") == "train"]
    place = run.record.get("checkpoint") or next((f"{stage['path']}/best" for stage in trained), None)
    if "config" not in run.record or place is None:
        raise ConfigError(f"{run.name} judged no reward model; name a run of `rm-opt run` or `rm-opt readiness`.")
    is_own = "checkpoint" not in run.record
    if not Path(place).is_dir():
        again = (
            f"`rm-opt run --from {run.name}` trains one with the settings of the run again."
            if is_own
            else "Restore it, or name a reward model that is there with --checkpoint."
        )
        raise ConfigError(f"the reward model of {run.name} is gone: there is no {place}. {again}")
    if not is_own:
        _require_same(run, place)
    return run, PipelineConfig.model_validate(run.record["config"]), place


def _require_same(run: Run, place: str) -> None:
    from tasks.checkpoints import given_checkpoint  # here: readers of pairs, which a list of runs does without

    if given_checkpoint(place, home() / "given").digest != run.record.get("checkpoint_digest"):
        raise ConfigError(
            f"{place} is another reward model than {run.name} judged: its files have changed since then. Restore them, "
            "or judge what is there now with --checkpoint."
        )
