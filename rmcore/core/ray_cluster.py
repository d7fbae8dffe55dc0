"""A Ray cluster: that of RAY_ADDRESS, or this machine as one for as long as it is needed. Imports Ray when it is.

A cluster without a login lets everybody who reaches its ports run code, so none is used without one.
"""

import importlib
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import ConfigError, RmcoreError, ServiceError
from rmcore.core.extras import require_extra

if TYPE_CHECKING:
    from types import TracebackType

ADDRESS, MODE, TOKEN = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
LOOPBACK = "127.0.0.2"
"""Ray turns 127.0.0.1 into the address of a network interface, and would listen there."""


class RayCluster:
    """Connects on entering and leaves, or ends the cluster that it began, on leaving.

    Args:
        wanted_by: the option that needs Ray, for messages.

    Raises:
        ConfigError: on entering: Ray is not installed, or the cluster has no login.
        ServiceError: on entering: none answers at the address.
    """

    def __init__(self, wanted_by: str) -> None:
        self.wanted_by = wanted_by
        self.address = os.environ.get(ADDRESS)
        self.name = self.address or "this machine"

    def __enter__(self) -> "RayCluster":
        _require_login(self.address)
        known = sys.modules.get("ray")
        require_extra("ray", "cluster", f"{self.wanted_by}, on all machines of the cluster,")
        import ray  # which reads the variables of the login

        self.ray: Any = ray
        if known is not None:  # whatever has imported it before: then it has read them already
            core: Any = importlib.import_module("ray._raylet")
            core.Config.initialize("")
            core.AuthenticationTokenLoader.instance().reset_cache()
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                # Left out, Ray would join whatever cluster was last begun on this machine, dead or another user's.
                address=self.address or "local",
                include_dashboard=None if self.address else False,
                _node_ip_address=None if self.address else LOOPBACK,
                logging_level=logging.WARNING,
                log_to_driver=False,
            )
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            raise ServiceError(
                f"no Ray cluster answers at {self.name} ({str(error).splitlines()[0]}): see that it runs, and that "
                f"{MODE} and {TOKEN} are those that it was started with."
            ) from error
        finally:  # Ray puts its own in its place, which would end a run without a word
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.ray.shutdown()

    def has_gpus(self, device: str) -> bool:
        """Whether what runs on `device` (auto, cpu, cuda) has a GPU there."""
        wanted = device.partition(":")[0]
        return wanted == "cuda" or (wanted == "auto" and self.ray.cluster_resources().get("GPU", 0) > 0)

    def resources(self) -> str:
        """All that it has, as people read it."""
        found = self.ray.cluster_resources()
        return ", ".join(f"{found.get(name, 0):.0f} {name}s" for name in ("CPU", "GPU") if found.get(name))

    def room(self, cpus: int, gpus: int) -> int:
        """How many processes fit on its machines, each of which needs so many cores and GPUs of one machine."""
        alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        wanted = {"CPU": cpus, "GPU": gpus}
        return sum(min(int(has.get(name, 0) // number) for name, number in wanted.items() if number) for has in alive)

    def require_room(self, cpus: int, gpus: int, number: int = 1) -> None:
        """Refuse what Ray would wait for without a word.

        Raises:
            ConfigError: the machines have no room for so many processes.
        """
        room = self.room(cpus, gpus)
        if room < number:
            needs = f"{cpus} cores" + (f" and {gpus} GPUs" if gpus else "")
            raise ConfigError(
                f"the Ray cluster at {self.name} has room for {room} processes, each with {needs} of one machine, and "
                f"{number} are requested: they would wait for ever. It has {self.resources()}; request less."
            )

    def first_of(self, running: Sequence[Any], timeout: float | None = None) -> Any:
        """Whichever is done first; None where none is after `timeout` seconds."""
        done, _ = self.ray.wait(list(running), num_returns=1, timeout=timeout)
        return done[0] if done else None

    def outcome(self, done: Any) -> tuple[Any, str]:
        """Wait for a task: its result, or how its process was lost.

        Raises:
            RmcoreError: what it refused with.
            ServiceError: it failed otherwise.
        """
        try:
            return self.ray.get(done), ""
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RmcoreError):
                raise error.cause from error
            raise ServiceError(f"it failed on the Ray cluster: {error.cause!r}") from error
        except self.ray.exceptions.RayError as error:
            return None, str(error).splitlines()[0] or type(error).__name__


def _require_login(address: str | None) -> None:
    if address is None:
        os.environ.setdefault(MODE, "token")
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
        # Ray's own 15 starves its processes on a machine that has something else to do: minutes for their imports.
        os.environ.setdefault("RAY_worker_niceness", "0")
    if os.environ.get(MODE) != "token" or not os.environ.get(TOKEN):
        raise ConfigError(
            f"the Ray cluster at {address} is to be used without a login, which lets everybody who reaches it run "
            f"code: start it with {MODE}=token and {TOKEN} (32 characters or more), and set both here to the same."
        )
