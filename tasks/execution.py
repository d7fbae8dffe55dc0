"""Run one stage in a child process and publish what it wrote."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rmcore import errors
from rmcore.config import PipelineConfig
from rmcore.errors import RmcoreError, TrainingError
from rmcore.stages.registry import Stage, slug, stage_inputs
from rmcore.stages.run import DELIBERATE_ERROR, ERROR_FILE
from rmcore.store import ArtifactRef, Store, make_key
from rmcore.tracking import METRICS_FILE

Follow = Callable[[Path], AbstractContextManager[None]]
"""Sends a growing metrics.jsonl somewhere while the block runs."""
LOG_TAIL = 15


def execute(
    store: Store, stage: Stage, config: PipelineConfig, upstream: Mapping[str, ArtifactRef], follow: Follow
) -> ArtifactRef:
    """Give the artifact of a stage: from the store if it is whole there, else by running the stage.

    Two callers with the same inputs do the work once: the second waits for the first.

    Raises:
        RmcoreError: whatever the stage refused with, of the same class.
        TrainingError: the stage's process died.
    """
    inputs = stage_inputs(stage, config, upstream)
    key = make_key(inputs)
    with store.lock(key):
        if store.damage(stage.name, key) is None:
            return store.ref(stage.name, key)
        with (
            store.lock("device") if stage.on_device else nullcontext(),  # one model at a time on this machine
            store.publish(stage.name, slug(stage, config), inputs, outcome=stage.outcome) as out,
        ):
            (out / METRICS_FILE).touch()
            with follow(out / METRICS_FILE):
                run_child(store, stage, config, upstream, out)
        return store.ref(stage.name, key)


def run_child(
    store: Store, stage: Stage, config: PipelineConfig, upstream: Mapping[str, ArtifactRef], out: Path
) -> None:
    """Run `python -m rmcore.stages.run` and wait. Output goes to a log beside `out`, progress to a terminal."""
    place = store.root / ".wip" / f"{out.name}.process"
    place.mkdir(parents=True, exist_ok=True)
    spec = {
        "stage": stage.name,
        "config": config.model_dump(mode="json"),
        "upstream": {name: upstream[name].path for name in stage.upstream},
        "out": str(out),
    }
    (place / "spec.json").write_text(json.dumps(spec))
    (place / ERROR_FILE).unlink(missing_ok=True)
    command = [sys.executable, "-m", "rmcore.stages.run", str(place / "spec.json")]
    log_path = place / "log.txt"
    with log_path.open("w") as log:
        errors_to = None if sys.stderr.isatty() else subprocess.STDOUT
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=errors_to)
        try:
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if status == DELIBERATE_ERROR:
        raise _stage_error(place / ERROR_FILE)
    if status:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        meaning = "it was killed, often for lack of memory" if status < 0 else "it crashed"
        raise TrainingError(
            f"stage {stage.name} ended with status {status}: {meaning}. Nothing of it was kept. Log: {log_path}\n{tail}"
        )


def _stage_error(path: Path) -> RmcoreError:
    described = json.loads(path.read_text())
    kind = getattr(errors, described["type"], RmcoreError)
    return kind(described["message"])
