"""`rm-opt` in processes forked from one that has imported it already: a command without seconds of imports.

For tests of what commands do. How a command starts (its imports, their order, a Prefect server of its own) and what
signals do to it is tested with programs that are started anew. Prefect reads its settings when it is imported, so a
`WarmCommands` knows its home and its Prefect server from the start.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

SLOW = (
    *("flows.cli", "flows.cli_run", "flows.cli_experiment", "flows.cli_policy", "flows.cli_store"),
    *("flows.pipeline", "flows.experiment", "flows.policy", "fastapi.encoders"),
    *("mlflow", "mlflow.store.tracking.sqlalchemy_store", "matplotlib.figure"),
)
"""What commands import that start a flow."""


class WarmCommands:
    """A process that waits for commands, in one home and beside one Prefect server; the first command starts it."""

    _process = None

    def __init__(self, imports=SLOW):
        self.imports = imports

    def _start(self, environment, cwd):
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, *self.imports], env=environment, cwd=cwd, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, words, environment, cwd=None, timeout=900):
        """As `subprocess.run` with captured text, of `rm-opt` with these words."""
        if self._process is None:
            self._start(environment, cwd)
        with tempfile.TemporaryDirectory() as folder:
            said = [str(Path(folder, name)) for name in ("stdout", "stderr")]
            asked = {"words": [*map(str, words)], "environment": environment, "cwd": str(cwd or Path.cwd()), "to": said}
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                self.close()
                raise subprocess.TimeoutExpired(asked["words"], timeout, *(Path(path).read_bytes() for path in said))
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(asked["words"], status, *(Path(path).read_text() for path in said))

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def serve():
    """Fork for each line of standard input; answer with the exit status. A fork goes on below, as the command."""
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        os.setsid()
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        for number, place in enumerate([os.devnull, *asked["to"]]):
            opened = os.open(place, os.O_RDWR | os.O_CREAT)
            os.dup2(opened, number)
            os.close(opened)
        return asked["words"]
    return None


if __name__ == "__main__":
    import gc
    import importlib
    import threading

    from flows.cli import main, set_variables
    from rmcore.core import child_process

    names = tuple(sys.argv[1:])
    gc.disable()  # until all is imported, and no command looks through that for garbage, see `child_process.serve`
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    if names == SLOW:
        set_variables()  # as each command does, or it would start another one
        child_process.import_ahead(os.environ)  # one for the stages of all commands
    assert threading.enumerate() == [threading.main_thread()], "no fork with threads"
    words = serve()
    if words is not None:
        sys.argv = ["rm-opt", *words]
        main()
