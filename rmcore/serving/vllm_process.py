"""One vLLM process behind a Unix socket: started, asked, ended with all it started.

vLLM's control routes (`/collective_rpc`, `/pause`) ask for no key, so they must not be reachable: the socket is in a
folder that only this user may enter, and nothing listens on the network.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from rmcore.core.errors import ConfigError, NotReadyError, RequestError, ServingError
from rmcore.core.processes import tail

EngineDtype = Literal["float32", "bfloat16"]
SCORING = ("--served-model-name", "reward", "--runner", "pooling", "--convert", "classify")
VLLM_VARIABLE = "RM_OPT_VLLM"
VLLM_FOLDER = ".venv-vllm"
START = Path(__file__).with_name("vllm_start.py")
ENDING_SECONDS = 15.0
"""Between the request to end and SIGKILL."""
KEEP_ALIVE_SECONDS = 600
"""An idle connection is closed by our side first: one that vLLM closes just as a request leaves is a lost request."""
LIFE_SIGN_SECONDS = 2.0
"""How often vLLM is asked whether its engine lives, while an answer is awaited."""
SESSION_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEEP_ALIVE_SECONDS)
UNWANTED = (
    *("RM_OPT_TOKEN", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
    *("OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF"),
)
"""Environment that must not reach vLLM: secrets, the paths of another environment, how our threads wait (its own are
bound to cores), and how a stage takes a GPU's memory."""


@dataclass(frozen=True)
class EngineSettings:
    """How vLLM is started.

    program: the Python of an environment with vLLM.
    dtype: what it computes in.
    max_seq_len: longest row in tokens, with what is generated.
    gpu_memory_share: of one GPU, for weights and cache; without a GPU unused.
    eager: without compiling the model, which takes a minute of a CPU.
    start_timeout_s: seconds until it must answer. Large models load for minutes.
    request_timeout_s: seconds for one answer.
    """

    program: Path
    dtype: EngineDtype
    max_seq_len: int
    gpu_memory_share: float = 0.5
    eager: bool = False
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0


def find_vllm(named: str | None = None) -> Path:
    """The program that starts vLLM: as named, as RM_OPT_VLLM says, or `.venv-vllm` next to this package.

    Not the current folder's: the maker of that folder would choose what is executed.

    Raises:
        ConfigError: there is none.
    """
    given = named or os.environ.get(VLLM_VARIABLE)
    if given is not None:
        found = shutil.which(given)
        if found is not None and Path(found).name == "vllm":  # a script of the Python next to it, perhaps linked
            found = shutil.which(Path(found).resolve().with_name("python"))
        if found is None:
            raise ConfigError(f"{given} is no program: name the Python of an environment with vLLM, or its `vllm`.")
        return Path(found)
    program = Path(__file__).resolve().parents[2] / VLLM_FOLDER / "bin" / "python"
    if program.is_file():
        return program
    raise ConfigError(
        f"there is no vLLM here: neither {program.parents[1]} nor {VLLM_VARIABLE}. It cannot share an environment with "
        "Prefect, so it has its own: make it with `make vllm` in a clone, or by `pip install vllm` in a new one, and "
        f"name its Python in {VLLM_VARIABLE} or with --vllm."
    )


class EngineFailure(ServingError):
    """vLLM answered that it failed."""


def _lacks_files(error: BaseException | None) -> bool:
    """Whether a connection failed because this process or machine has no open file left: that says nothing of vLLM."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__  # httpcore's pool raises from None
    return error is not None and error.errno in (errno.EMFILE, errno.ENFILE)


class VllmProcess:
    """A running vLLM and a session with it. Use `start`, and `stop` whatever happens.

    Args:
        settings: how it is started.
        log: file that its output is appended to.
        task: flags that say what it is to do, and its name for the model.
    """

    def __init__(self, settings: EngineSettings, log: Path, task: Sequence[str]) -> None:
        self.settings = settings
        self.log = log
        self._task = task
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._session: httpx.AsyncClient | None = None

    async def start(self, folder: Path) -> None:
        """Start vLLM on a checkpoint folder and wait until it answers.

        Raises:
            ServingError: it ended or did not answer in time; the message has the end of its log.
        """
        self._place = tempfile.TemporaryDirectory(prefix="rm-opt-vllm-")  # mode 0700; short, sockets allow 107 bytes
        socket = Path(self._place.name) / "s"
        read_end, self._lifeline = os.pipe()
        settings = self.settings
        command = [
            *(str(settings.program), "-P", str(START), str(read_end)),
            *("--model", str(folder)),
            *self._task,
            *("--uds", str(socket)),
            *("--max-model-len", str(settings.max_seq_len)),
            *("--dtype", settings.dtype),
            *("--gpu-memory-utilization", str(settings.gpu_memory_share)),
            "--disable-uvicorn-access-log",
            *(["--enforce-eager"] if settings.eager else []),
        ]
        ours = {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONSAFEPATH": "1",  # of the processes that it starts; no file of the current folder is a library
            "VLLM_SERVER_DEV_MODE": "1",  # the routes that reload weights
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(2 * KEEP_ALIVE_SECONDS),
        }
        # Room for keys and values in GiB. A pooling model needs that of the rows in flight only; where samples do not
        # fit at once, they wait.
        cache = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
        wanted = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=wanted | ours | cache,
                    pass_fds=(read_end,),
                    start_new_session=True,  # with a process group, and Ctrl-C is not for it
                )
        finally:
            os.close(read_end)
        self._session = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=SESSION_LIMITS),
            base_url="http://vllm",
            timeout=settings.request_timeout_s,
        )
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await self._until_healthy()
        except TimeoutError:
            raise ServingError(
                f"vLLM did not answer within {settings.start_timeout_s:.0f} s. Give it longer (rm-opt "
                f"serve --start-timeout), or read why: {tail(self.log)}"
            ) from None

    async def _until_healthy(self) -> None:
        while True:
            if self.exit_status is not None:
                raise ServingError(f"vLLM ended with status {self.exit_status} while it started. {tail(self.log)}")
            with contextlib.suppress(httpx.TransportError):
                if (await self._open_session.get("/health", timeout=5)).is_success:
                    return
            await asyncio.sleep(0.1)

    @property
    def _open_session(self) -> httpx.AsyncClient:
        if self._session is None:
            raise ServingError("vLLM is not running: it was never started, or stopped.")
        return self._session

    @property
    def exit_status(self) -> int | None:
        """Status of a vLLM that ended, None while it runs."""
        if self._process is None:
            raise ServingError("vLLM is not running: it was never started, or stopped.")
        return self._process.poll()

    async def is_healthy(self) -> bool:
        """Whether vLLM answers that its engine is alive. It may be busy, so it has a minute to say so.

        Where this process has no open file left to ask by, whether vLLM's process runs.
        """
        try:
            return (await self._open_session.get("/health", timeout=60)).is_success
        except httpx.TransportError as error:
            return _lacks_files(error) and self.exit_status is None

    async def exited(self) -> int:
        """Wait until vLLM ends by itself, and give its status."""
        while (status := self.exit_status) is None:
            await asyncio.sleep(0.2)
        return status

    async def _post(self, route: str, **content: Any) -> httpx.Response:
        answering = asyncio.ensure_future(self._open_session.post(route, **content))
        try:
            while not answering.done():
                await asyncio.wait([answering], timeout=LIFE_SIGN_SECONDS)
                # A reload whose engine was killed is never answered: the HTTP side lives on and waits, too.
                if not answering.done() and not await self.is_healthy():
                    raise NotReadyError(f"vLLM's engine died during {route}.")
            return answering.result()
        except httpx.TimeoutException as error:
            raise ServingError(f"vLLM did not answer {route} in {self.settings.request_timeout_s:.0f} s.") from error
        except httpx.TransportError as error:
            if _lacks_files(error):
                raise NotReadyError(
                    f"this process may open no more files, as {route} of vLLM needs: raise the limit (ulimit -n)."
                ) from error
            raise NotReadyError(f"vLLM went away during {route} ({type(error).__name__}).") from error
        finally:
            answering.cancel()

    async def reload(self, folder: Path) -> None:
        """Replace all weights by those of a folder of the same shapes, and forget what was cached of the old ones.

        Measured with vLLM 0.32: this way is exact; loading tensors into the live modules fails half-way and leaves
        mixed weights.

        Raises:
            ServingError: it failed, and perhaps half-way: no answer may be trusted until a whole reload succeeds.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        check(await self._post("/collective_rpc", json=body), "reloaded its weights")
        answer = await self._post("/reset_prefix_cache")
        check(answer, "reset its prefix cache")
        if not answer.json()["success"]:
            raise ServingError("vLLM did not reset its prefix cache, which still holds values of the old weights.")

    async def kill(self) -> None:
        """End vLLM at once because its weights cannot be trusted; `exited` then tells."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)

    async def stop(self) -> None:
        """End vLLM and all that it started; nothing where it does not run."""
        session, self._session = self._session, None
        if session is not None:
            await session.aclose()
        await self.kill()
        self._process = None
        if self._place is not None:
            self._place.cleanup()
            self._place = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End vLLM and all of its process group, which may have outlived it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class VllmEngine(VllmProcess):
    """A running vLLM that gives rewards. Use `start`, and `stop` whatever happens."""

    def __init__(self, settings: EngineSettings, log: Path) -> None:
        super().__init__(settings, log, SCORING)

    async def scores(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Rewards of rows of token ids, in logits, in their order.

        Raises:
            RequestError: vLLM refuses the rows.
            NotReadyError: it is away.
            EngineFailure: it failed, or a reward is not finite, which JSON cannot say.
            ServingError: it did not answer in time.
        """
        if not token_ids:
            return []
        body = {"model": "reward", "input": [list(ids) for ids in token_ids], "use_activation": False}
        answer = await self._post("/classify", json=body)
        if answer.status_code in (400, 422):
            raise RequestError(f"vLLM refuses these token ids: {message(answer)}")
        check(answer, "scored")
        rows = sorted(answer.json()["data"], key=lambda row: row["index"])
        if len(rows) != len(token_ids) or any(len(row["probs"]) != 1 for row in rows):
            raise ServingError(f"vLLM gave {len(rows)} results for {len(token_ids)} rows, or not one number a row.")
        return [float(row["probs"][0]) for row in rows]

    async def metrics(self) -> bytes:
        """Return the counts of vLLM as Prometheus text.

        Raises:
            NotReadyError: it is away.
        """
        try:
            return (await self._open_session.get("/metrics")).content
        except (httpx.TransportError, ServingError) as error:
            raise NotReadyError(f"vLLM is away: {error}") from error


def check(answer: httpx.Response, what: str) -> None:
    """Raise EngineFailure unless vLLM has done `what`."""
    if not answer.is_success:
        status = answer.status_code
        raise EngineFailure(f"vLLM failed where it should have {what} (status {status}): {message(answer)}")


def message(answer: httpx.Response) -> str:
    """Take vLLM's own message from an answer, shortened."""
    return answer.text[:500]
