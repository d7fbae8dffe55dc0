"""Child processes that begin at once: forked from one that has imported torch and its company already.

Those imports take five seconds of a core, each stage runs in a process of its own, and a pipeline has five of them.
`ForkedProcess` is what `subprocess.Popen` would be for `python -m MODULE SPEC.json`. Each connection to the socket of a
`StageServer` becomes one child, which reads there what it is to run and writes its exit status there; it saves and ends
where the other end is closed, whatever that process died of. A server lives as long as the process that started it.

The server imports libraries only. A child imports rmcore itself, so that what was edited since the last one is what
runs, as the key of a stage's artifact says.

`multiprocessing` has such a server, too, which does not do for stages (Python 3.11): its libraries have read the
variables of its start (of one with `OMP_NUM_THREADS=1` a child with 2 computes with one thread); each child imports the
starter's main module again, so a user's script without a `__main__` guard runs twice or is refused; a child outlives a
starter that was killed; and no other program can use it, so each flow run of a worker would take those five seconds.
"""

import contextlib
import faulthandler
import gc
import hashlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from rmcore.core.errors import INTERRUPTED, ConfigError
from rmcore.core.progress import PROGRESS_VARIABLE

LIBRARIES = (
    *("torch", "torch.utils.checkpoint", "transformers", "transformers.modeling_utils", "peft"),
    *("transformers.models.auto.modeling_auto", "pandas", "pyarrow.parquet", "scipy.stats", "scipy.optimize"),
    *("pydantic", "matplotlib.axes", "matplotlib.backends.backend_agg", "rich.progress"),
)
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables in which torchrun tells each of several processes its place."""
LATE = (
    *("RM_OPT_", "CUDA_VISIBLE_DEVICES", "PREFECT_", "MLFLOW_", "PYTEST_", "NO_PROXY", "no_proxy", *PLACE),
    "TORCHINDUCTOR_CACHE_DIR",
)
"""How variables begin that no library reads while it is imported: children that differ in them share a server."""
SERVER_VARIABLE = "RM_OPT_STAGE_SERVER"
"""Environment variable with the folder of a `StageServer`, for programs that would start a server of their own."""
MOST_DESCRIPTORS = 4
"""Descriptors of one request: the log, and those to show progress on."""
PID_BYTES = 8
ENDING_SECONDS = 10.0
"""How long a process that has said its status may take to end: a GPU's memory is freed meanwhile."""
WARM = sys.platform == "linux"
"""Elsewhere a process that has loaded such libraries must not continue after a fork: each child imports them again."""

# -P: a file of the user's current folder must not be imported in place of a library.
_COMMAND = (sys.executable, "-P", "-m", "rmcore.core.child_process")
_servers: dict[str, "StageServer"] = {}
_starting = threading.Lock()
_running: "weakref.WeakSet[ForkedProcess]" = weakref.WeakSet()


class ForkedProcess:
    """One child process: `wait` for its exit status, ask it to `terminate`, `kill` it.

    It runs in the current folder, and saves and ends with this process, whatever this one dies of.

    Args:
        module: name of the module that it runs: `module.run_from_file(spec)` gives its exit status.
        spec: the file that says what to run.
        log: what the child prints.
        environment: all its variables.
        progress: descriptors that it shows its progress on.

    Raises:
        ConfigError: the current folder was deleted.
    """

    def __init__(
        self, module: str, spec: Path, log: IO[str], environment: Mapping[str, str], progress: Sequence[int] = ()
    ) -> None:
        try:
            folder = os.getcwd()
        except FileNotFoundError as error:
            raise ConfigError("The current folder was deleted: start the command again in one that exists.") from error
        request = {"module": module, "spec": str(spec), "environment": dict(environment), "folder": folder}
        self.process: psutil.Process | None = None
        self._status: int | None = None
        self._connection = _connected(environment)
        with contextlib.suppress(ConnectionError, psutil.NoSuchProcess):  # killed already, which `wait` says
            socket.send_fds(self._connection, [b"\n"], [log.fileno(), *progress])
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            if pid := self._connection.recv(PID_BYTES):
                self.process = psutil.Process(int.from_bytes(pid))
        _running.add(self)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has one; that of SIGKILL where it was killed by any signal.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
        """
        if self._status is None:
            self._connection.settimeout(timeout)
            try:
                said = self._connection.recv(1)
            except ConnectionError:
                said = b""
            self._status = said[0] if said else -signal.SIGKILL
            self._connection.close()
            if self.process is not None:  # the memory of its device is free once it has gone
                with contextlib.suppress(psutil.Error):
                    self.process.wait(ENDING_SECONDS)
        return self._status

    def terminate(self) -> None:
        """Ask it to save and end (SIGTERM); nothing where it has ended."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it (SIGKILL); nothing where it has ended."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._status is None and self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.process.send_signal(number)


def terminate_forked() -> None:
    """Ask all forked children of this process to save and end; their parents continue to wait for them."""
    for process in list(_running):
        process.terminate()


def import_ahead(environment: Mapping[str, str]) -> None:
    """Start importing what children with these variables need, while this process does something else."""
    _connected(environment).close()  # this child has nothing to do, and ends


class StageServer:
    """A server for programs whose libraries read the variables `environment`; as a context, it ends with the block.

    Programs that have `variable` among theirs find it. Those that differ in what libraries read start their own.

    Args:
        environment: variables of the programs.
        start_new_session: whether neither Ctrl-C in the terminal nor its end reaches children.
    """

    def __init__(self, environment: Mapping[str, str], *, start_new_session: bool = True) -> None:
        # Only for this user (mode 0700). The path of a socket has at most 107 bytes.
        place = None if len(tempfile.gettempdir()) < 70 else "/tmp"  # noqa: S108
        self.folder = tempfile.mkdtemp(prefix="rm-opt-stages-", dir=place)
        life, self._life = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, os.fdopen(life):
            listener.bind(f"{self.folder}/{_digest(environment)}")
            listener.listen()
            # A child that needs a library which cannot be imported says so in its log.
            self.process = subprocess.Popen(
                [*_COMMAND, str(listener.fileno()), str(life)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=(listener.fileno(), life),
                start_new_session=start_new_session,
            )

    @property
    def variable(self) -> dict[str, str]:
        """The variable by which programs find it."""
        return {SERVER_VARIABLE: self.folder}

    def __enter__(self) -> "StageServer":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._life)
        self.process.wait()


def _connected(environment: Mapping[str, str]) -> socket.socket:
    """Connect to the server of children with these variables: a shared one, or one of this process and its forks."""
    name, shared = _digest(environment), environment.get(SERVER_VARIABLE)
    with contextlib.suppress(OSError):  # it has ended, or its libraries have read other variables
        if shared:
            return _connect(shared, name)
    with _starting:
        with contextlib.suppress(OSError, KeyError):
            return _connect(_servers[name].folder, name)
        _servers[name] = StageServer(environment, start_new_session=False)
        return _connect(_servers[name].folder, name)


def _connect(folder: str, name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"{folder}/{name}")
    except OSError:
        connection.close()
        raise
    return connection


def _digest(environment: Mapping[str, str]) -> str:
    """Name of the socket of servers whose libraries have read the same."""
    read = sorted(item for item in environment.items() if not item[0].startswith(LATE))
    return hashlib.sha256(repr(read).encode()).hexdigest()[:16]


def serve(listener: socket.socket, life: int) -> None:
    """Fork a child for each connection until the other end of the pipe `life` is closed."""
    # Ctrl-C in a terminal, and SIGTERM to the process group (Prefect cancels so), are for the children, which save and
    # end. SIGTERM is blocked and not ignored: a child that is asked before it can hear it is asked when it can.
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    if WARM:
        # Nothing of what an import makes is garbage, and looking for it takes a tenth of its time; frozen, it is not
        # looked through in any child either, so that their memory stays shared.
        gc.disable()
        for library in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
        gc.freeze()
        gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects children
    try:
        while life not in select.select([listener.fileno(), life], [], [])[0]:
            connection, _ = listener.accept()
            if not WARM:
                number = connection.fileno()
                subprocess.Popen([*_COMMAND, str(number)], pass_fds=[number])
            elif os.fork() == 0:
                listener.close()
                os.close(life)
                _become_child(connection, interrupted)
            connection.close()
    finally:
        shutil.rmtree(os.path.dirname(listener.getsockname()))


def _become_child(connection: socket.socket, interrupted: Any) -> NoReturn:
    """Be a child: read the request, run it, write the exit status, end."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked in either way, it ends what it has started
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        os.register_at_fork(after_in_child=connection.close)  # what a stage leaves behind does not keep its parent
        connection.sendall(os.getpid().to_bytes(PID_BYTES))
        message, descriptors, _, _ = socket.recv_fds(connection, 1, MOST_DESCRIPTORS)
        if not message:  # who began to wait has gone already
            os._exit(0)
        log, *progress = descriptors
        asked = json.loads(connection.makefile().readline())
        threading.Thread(target=_end_with_parent, args=(connection,), name="parent", daemon=True).start()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        faulthandler.enable()
        os.chdir(asked["folder"])  # not the server's: a path is read as where it was given
        os.environ.clear()
        os.environ.update(asked["environment"])
        if progress:
            os.environ[PROGRESS_VARIABLE] = ",".join(map(str, progress))
        status = importlib.import_module(asked["module"]).run_from_file(asked["spec"])
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as leaves:
        status = leaves.code if isinstance(leaves.code, int) else 1
    except BaseException:  # noqa: BLE001 - it is shown, and this process ends
        traceback.print_exc()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # who has heard the status hangs up, which asks to end
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(OSError):
            connection.sendall(bytes([status & 0xFF]))
        os._exit(status)


def _end_with_parent(connection: socket.socket) -> None:
    """Ask this process to save and end once the other end is closed, to which nothing more is written."""
    with contextlib.suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _socket:
        if len(sys.argv) > 2:
            serve(_socket, int(sys.argv[2]))
        else:
            _become_child(_socket, signal.default_int_handler)
