"""Child processes that begin at once: forked from one that has imported torch and its company already.

Those imports take five seconds of a core, each stage runs in a process of its own, and a pipeline has five of them.
`ForkedProcess` is what `subprocess.Popen` would be for `python -m MODULE SPEC.json`; the server below it,
`python -m rmcore.core.child_process`, lives as long as the process that requested the first one. Where many short
programs follow one another, their parent may keep a `StageServer` for all of them.

The server imports libraries only. A child imports rmcore itself, so that what was edited since the last one is what
runs, as the key of a stage's artifact says.

The standard library's `multiprocessing` has a `forkserver` with preload, too, which does not do for stages (Python
3.11): it has one server a process, whose libraries have read the variables of its start (of a server with
`OMP_NUM_THREADS=1` a child with 2 computes with one thread); each child imports the starter's main module again, so a
user's script without a `__main__` guard runs twice or is refused; a child outlives a starter that was killed; a fork of
the starter cannot ask it; and no other program can, so each flow run of a worker would import the libraries once more.
"""

import contextlib
import gc
import hashlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from rmcore.core.errors import ConfigError
from rmcore.core.processes import die_with_parent
from rmcore.core.progress import PROGRESS_VARIABLE

LIBRARIES = (
    "torch",
    "torch.utils.checkpoint",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "peft",
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
    "scipy.optimize",
    "pydantic",
    "matplotlib.axes",
    "matplotlib.backends.backend_agg",
    "rich.progress",
)
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables in which torchrun tells each of several processes its place."""
LATE = (
    *("RM_OPT_", "CUDA_VISIBLE_DEVICES", "PREFECT_", "MLFLOW_", "PYTEST_", "NO_PROXY", "no_proxy", *PLACE),
    "TORCHINDUCTOR_CACHE_DIR",
)
"""How variables begin that no library reads while it is imported: children that differ in them share a server."""
SERVER_VARIABLE = "RM_OPT_STAGE_SERVER"
"""Environment variable with the socket of a `StageServer`, for programs that would start a server of their own."""
GREETING_SECONDS = 5.0
IMPORT_SECONDS = 120.0
"""How long a program waits for a `StageServer` that still imports, on a busy machine: it would have to import, too."""
MOST_DESCRIPTORS = 5
"""Descriptors of one request: the socket, the pipe, the log, and two to show progress on."""
WARM = sys.platform == "linux"
"""Elsewhere a process that has loaded such libraries must not continue after a fork: each child imports them again."""

_SERVER = (sys.executable, "-P", "-m", "rmcore.core.child_process")
_WELCOME = b"\x01"
_servers: dict[frozenset[tuple[str, str]], "_ForkServer"] = {}
_starting = threading.Lock()
_running: "weakref.WeakSet[ForkedProcess]" = weakref.WeakSet()


class ForkedProcess:
    """One child process: `wait` for its exit status, ask it to `terminate`, `kill` it.

    It runs in the current folder, and dies with this process, whatever this one dies of.

    Args:
        module: name of the module that it runs: `module.run_from_file(spec)` gives its exit status.
        spec: the file that says what to run.
        log: what the child prints.
        environment: all its variables.
        progress: descriptors that it shows its progress on.
    """

    def __init__(
        self, module: str, spec: Path, log: IO[str], environment: Mapping[str, str], progress: Sequence[int] = ()
    ) -> None:
        try:
            folder = os.getcwd()
        except FileNotFoundError as error:
            raise ConfigError("The current folder was deleted: start the command again in one that exists.") from error
        self._life, theirs = socket.socketpair()
        request, ours = os.pipe()
        descriptors = [theirs.fileno(), request, log.fileno(), *progress]
        try:
            _server(environment).send(descriptors)
        finally:
            theirs.close()
            os.close(request)
        with contextlib.suppress(BrokenPipeError), os.fdopen(ours, "w") as pipe:
            asked = {"module": module, "spec": str(spec), "environment": dict(environment), "folder": folder}
            json.dump(asked, pipe)
        self._heard = b""
        self._pid = self._number(0)
        self._status: int | None = None
        _running.add(self)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative where a signal ended it, once it has one.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
        """
        if self._status is None:
            self._life.settimeout(timeout)
            status = self._number(1)
            self._status = -signal.SIGKILL if status is None else status  # the server is gone, and took it along
            self._life.close()
        return self._status

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); nothing where it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it (SIGKILL); nothing where it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._status is None and self._pid is not None:
            # Not a recycled pid: the server collects the process only when this end of the socket is closed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _number(self, index: int) -> int | None:
        """Read what the server says of the child, first its pid, then its status; None where the server is gone."""
        while self._heard.count(b"\n") <= index:
            received = self._life.recv(64)
            if not received:
                return None
            self._heard += received
        return int(self._heard.split(b"\n")[index])


def import_ahead(environment: Mapping[str, str]) -> None:
    """Start importing what children with these variables need, while this process does something else."""
    _server(environment)


class _ForkServer:
    """The end of a server that asks; the server ends when this end is closed, at the latest with this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        kept = _connect(environment)
        if kept is not None:
            self._control = kept
            return
        self._control, theirs = socket.socketpair()
        with theirs:
            # -P: a file of the user's current folder must not be imported in place of a library.
            self._process = subprocess.Popen(
                [*_SERVER, "serve", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a child that needs a library which cannot be imported says so in its log
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
            )

    def runs(self) -> bool:
        """Whether the other end is open. Asked of the socket: a fork of who started it may ask, too."""
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))  # it never sends: this is its end
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    def send(self, descriptors: list[int]) -> None:
        socket.send_fds(self._control, [b"\n"], descriptors)


class StageServer:
    """A server for all programs that are started with `environment`; as a context, it ends with the block.

    Programs whose variables differ from its own in what libraries read get servers of their own, as without it.

    Args:
        environment: variables of the programs; `variable` belongs to them, too.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)

    @property
    def variable(self) -> dict[str, str]:
        """The variable by which programs find it."""
        return {SERVER_VARIABLE: f"{self._place.name}/s"}

    def __enter__(self) -> "StageServer":
        self._place = tempfile.TemporaryDirectory(prefix="rm-opt-stages-")  # mode 0700; short: sockets allow 107 bytes
        self._life, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.variable[SERVER_VARIABLE])
            listener.listen()
            self._process = subprocess.Popen(
                [*_SERVER, "listen", str(theirs.fileno()), str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=(theirs.fileno(), listener.fileno()),
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._life.close()
        self._process.wait()
        self._place.cleanup()


def _connect(environment: Mapping[str, str]) -> socket.socket | None:
    """Connect to the server that the environment names; None where it names none, or that one is gone or another's."""
    address = environment.get(SERVER_VARIABLE)
    if address is None:
        return None
    control = socket.socket(socket.AF_UNIX)
    control.settimeout(IMPORT_SECONDS)
    try:
        control.connect(address)
        control.sendall(_digest(environment))
        if control.recv(1) == _WELCOME:
            control.settimeout(None)
            return control
    except OSError:
        pass
    control.close()
    return None


def _digest(environment: Mapping[str, str]) -> bytes:
    return hashlib.sha256(repr(sorted(_read_by_libraries(environment))).encode()).digest()


def _read_by_libraries(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in environment.items() if not item[0].startswith(LATE))


def terminate_forked() -> None:
    """Ask all forked children of this process to save and end; their parents continue to wait for them."""
    for process in list(_running):
        process.terminate()


def _server(environment: Mapping[str, str]) -> _ForkServer:
    """The server for children with these variables, started unless it runs: forks of this process share it."""
    read = _read_by_libraries(environment)
    with _starting:
        if read not in _servers or not _servers[read].runs():
            _servers[read] = _ForkServer(environment)
        return _servers[read]


def serve(control: socket.socket, listener: socket.socket | None = None) -> None:
    """Fork a process for each request until the other end of `control` is closed.

    Any process that connects to `listener` with the same environment is served, too, until it closes its end.

    Children that still run then are asked to end by the kernel (`die_with_parent`), so they save first.
    """
    # Ctrl-C in a terminal, and SIGTERM to the process group (Prefect cancels so), are for the children, which save and
    # end, and for the processes that wait for them: if this server ended, those would take the children for killed.
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    digest = _digest(os.environ)  # before libraries write into it
    if WARM:
        # Nothing of what an import makes is garbage, and looking for it takes a tenth of its time; frozen, it is not
        # looked through in any child either, so that their memory stays shared.
        gc.disable()
        for library in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(library)
        gc.freeze()
        gc.enable()
    _Serving(control, listener, digest, interrupted).run()


class _Serving:
    """The loop of a server: who asks, who waits, and whose children still run."""

    def __init__(self, control: socket.socket, listener: socket.socket | None, digest: bytes, interrupted: Any) -> None:
        self.control, self.listener, self.digest, self.interrupted = control, listener, digest, interrupted
        self.ended, self.wake = socket.socketpair()
        self.wake.setblocking(False)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.asking: set[socket.socket] = set()
        # By pid; none of these is collected, so no pid is given to another process.
        self.waiters: dict[int, socket.socket] = {}
        self.leaving: set[int] = set()

    def run(self) -> None:
        """Answer until the other end of `control` is closed."""
        with selectors.DefaultSelector() as selector:
            self.selector = selector
            selector.register(self.ended, selectors.EVENT_READ, self._child_ended)
            self._add_asker(self.control)
            if self.listener is not None:
                selector.register(self.listener, selectors.EVENT_READ, self._accept)
            while self.control in self.asking:
                for key, _ in selector.select():
                    key.data()
                self.leaving = {pid for pid in self.leaving if os.waitpid(pid, os.WNOHANG) == (0, 0)}

    def _add_asker(self, asker: socket.socket) -> None:
        self.asking.add(asker)
        self.selector.register(asker, selectors.EVENT_READ, partial(self._asked, asker))

    def _accept(self) -> None:
        assert self.listener is not None  # noqa: S101 - else it is not registered
        if (connected := _welcome(self.listener, self.digest)) is not None:
            self._add_asker(connected)

    def _asked(self, asker: socket.socket) -> None:
        message, descriptors, _flags, _address = socket.recv_fds(asker, 1, MOST_DESCRIPTORS)
        if not message:  # its children's parents have gone with it, which their own sockets show
            self.asking.remove(asker)
            self.selector.unregister(asker)
            asker.close()
            return
        listening = [] if self.listener is None else [self.listener]
        own = [self.ended, self.wake, *listening, *self.asking, *self.waiters.values()]
        pid, waiter = _fork(descriptors, self.interrupted, own)
        self.waiters[pid] = waiter
        self.selector.register(waiter, selectors.EVENT_READ, partial(self._waiter_left, pid))

    def _child_ended(self) -> None:
        self.ended.recv(4096)
        _report_ended(self.waiters)

    def _waiter_left(self, pid: int) -> None:
        """Forget a child whose waiter knows the status, or has gone before there was one."""
        waiter = self.waiters.pop(pid)
        self.selector.unregister(waiter)
        waiter.close()
        self.leaving.add(pid)
        if _status(pid) is None:
            os.kill(pid, signal.SIGTERM)


def _welcome(listener: socket.socket, digest: bytes) -> socket.socket | None:
    """Take a connection from a program whose libraries would read the same variables; None: it is another one."""
    connected, _ = listener.accept()
    connected.settimeout(GREETING_SECONDS)
    try:
        if connected.recv(64) == digest:
            connected.sendall(_WELCOME)
            connected.settimeout(None)
            return connected
    except OSError:
        pass
    connected.close()
    return None


def _fork(descriptors: list[int], interrupted: Any, server_only: list[socket.socket]) -> tuple[int, socket.socket]:
    """Begin one child; gives its pid and the socket over which its waiter hears of it."""
    waiter = socket.socket(fileno=descriptors[0])
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))  # which the child must not ignore, see `_become_child`
    server, pid = os.getpid(), os.fork()
    if pid == 0:
        for open_socket in (waiter, *server_only):
            open_socket.close()
        _become_child(server, interrupted, *descriptors[1:])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    _tell(waiter, pid)
    return pid, waiter


def _status(pid: int) -> int | None:
    """Exit status of a child, negative where a signal ended it; None while it runs. It is not collected."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _report_ended(waiters: Mapping[int, socket.socket]) -> None:
    for pid, waiter in waiters.items():
        if (status := _status(pid)) is not None:
            _tell(waiter, status)


def _tell(waiter: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who waited has gone
        waiter.sendall(b"%d\n" % number)


def _become_child(server: int, interrupted: Any, request: int, log: int, *progress: int) -> NoReturn:
    """Be the forked process: read the request, run it, end."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
        signal.signal(signal.SIGINT, interrupted)
        die_with_parent(server)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        with os.fdopen(request) as pipe:
            asked = json.load(pipe)
        environment = asked["environment"]
        os.chdir(asked["folder"])  # not the server's: a path is read as where it was given
        for descriptor in progress:
            os.set_inheritable(descriptor, True)
        if progress:
            environment[PROGRESS_VARIABLE] = ",".join(map(str, progress))
        if not WARM:
            command = [sys.executable, "-P", "-m", asked["module"], asked["spec"]]
            os.execve(sys.executable, command, environment)  # noqa: S606 - no shell is wanted
        os.environ.clear()
        os.environ.update(environment)
        status = importlib.import_module(asked["module"]).run_from_file(asked["spec"])
    except SystemExit as leaves:
        status = leaves.code if isinstance(leaves.code, int) else 1
    except BaseException:  # noqa: BLE001 - it is shown, and this process ends
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[2])) as _control:
        serve(_control, socket.socket(fileno=int(sys.argv[3])) if sys.argv[1] == "listen" else None)
