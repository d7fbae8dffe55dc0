"""Run one stage in a process of its own; `rmcore.core.child_process` starts it.

torch's random numbers and thread pool belong to a process, so stages that run side by side in threads would disturb
each other; and a crash or an out-of-memory kill takes down one stage only. A deliberate error is written next to the
request as JSON, for the parent to raise again.
"""

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path

from rmcore.core.errors import RmcoreError, StoreError
from rmcore.core.progress import PROGRESS_VARIABLE, progress_bar, silent
from rmcore.core.tracking import METRICS_FILE, JsonlTracker, NullTracker
from rmcore.stages.stage import Stage
from rmcore.stages.stages import STAGES

ERROR_FILE = "error.json"
DELIBERATE_ERROR = 3
"""Exit status of a stage that refused with an RmcoreError."""


def run_stage(stage: Stage, out: Path) -> None:
    """Run a stage in this process, writing its artifact into `out`."""
    if os.environ.get("RANK", "0") != "0":  # one of several processes, of which the first writes and tells
        stage.run(out, NullTracker(), silent)
        return
    tracker = JsonlTracker(out / METRICS_FILE)
    try:
        shown = PROGRESS_VARIABLE in os.environ  # else standard error is the stage's log
        with progress_bar(stage.name) if shown else nullcontext(silent) as report:
            stage.run(out, tracker, report)
    finally:
        tracker.close()


def run_from_file(spec_path: str) -> int:
    """Read the request, run the stage; 0, or `DELIBERATE_ERROR` with the error next to it."""
    # Micro-batches differ in size, and segments that cannot grow leave gaps. Here, and not in the environment of all:
    # processes share the server that forks them only where their variables are the same.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    spec = json.loads(Path(spec_path).read_text())
    try:
        run_stage(STAGES[spec["stage"]].model_validate(spec["arguments"]), Path(spec["out"]))
    except RmcoreError as error:
        return _describe(error, spec_path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"{error.strerror} while stage {spec['stage']} wrote {error.filename or 'its files'}; free space."
        return _describe(StoreError(message), spec_path)
    return 0


def _describe(error: RmcoreError, spec_path: str) -> int:
    described = {"type": type(error).__name__, "message": str(error)}
    Path(spec_path).with_name(ERROR_FILE).write_text(json.dumps(described))
    return DELIBERATE_ERROR
