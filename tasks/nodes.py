"""The hosts that train one model together inside a pipeline: which one this is, by torchrun's variables."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from rmcore.core.errors import ConfigError

NODE_VARIABLES = ("NODE_RANK", "SLURM_NODEID")
"""Variables that tell a host which one it is: torchrun's users set the first, Slurm the second."""
SHARED_VARIABLE = "RM_OPT_SHARED"
DEFAULT_PORT = 29500
"""torchrun's."""


@dataclass(frozen=True, slots=True)
class Node:
    """A host among those that train one model."""

    rank: int = 0
    number: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    """0: a free one, of a host that is the only one."""


ALONE = Node()


def this_node(number: int) -> Node:
    """Read which of `number` hosts this one is, and where the first one is to be reached.

    Raises:
        ConfigError: there are several, and a variable that says so is missing or wrong.
    """
    if number == 1:
        return ALONE
    if not _joined:
        raise ConfigError(
            f"train.num_nodes={number} is of `rm-opt run` alone, which the other hosts help when it is started there, "
            "too. Take it out of these settings."
        )
    given = next((os.environ[name] for name in NODE_VARIABLES if name in os.environ), None)
    address = os.environ.get("MASTER_ADDR")
    if given is None or address is None:
        missing = "NODE_RANK" if given is None else "MASTER_ADDR"
        raise ConfigError(
            f"train.num_nodes={number}, and {missing} is not set: start the same command on each of the {number} hosts "
            "with NODE_RANK (0 on the first; Slurm's SLURM_NODEID does), and MASTER_ADDR, the first one's address."
        )
    port = os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if not given.isdecimal() or not int(given) < number or not port.isdecimal():
        raise ConfigError(
            f"NODE_RANK={given}, MASTER_PORT={port}: of train.num_nodes={number} hosts the first is 0 and the last "
            f"{number - 1}, and a port is a number. Correct the variables."
        )
    return Node(int(given), number, address, int(port))


_joined = False


def is_helper(number: int) -> bool:
    """Whether this host, of `number`, only helps another one, which runs the pipeline; for who starts one on each.

    Raises:
        ConfigError: see `this_node`; or there are several hosts, and they share no store.
    """
    if number == 1:
        return False
    if SHARED_VARIABLE not in os.environ:
        raise ConfigError(
            f"train.num_nodes={number} needs {SHARED_VARIABLE} on all hosts: the first one's prepared "
            "pairs, and the trained model, travel through that store. Set it to s3://bucket/prefix or file:///folder."
        )
    global _joined  # noqa: PLW0603 - one command a process
    _joined = True
    return this_node(number).rank > 0


def places(number: int, node: Node) -> list[Mapping[str, str]]:
    """Give each of `number` processes of a host its variables, as torchrun does; none for one that is alone."""
    world = number * node.number
    if world == 1:
        return [{}]
    shared = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": number,
        "MASTER_ADDR": node.address,
        "MASTER_PORT": node.port or _free_port(),
    }
    ranks = ({"RANK": number * node.rank + local, "LOCAL_RANK": local} for local in range(number))
    return [{name: str(value) for name, value in (shared | rank).items()} for rank in ranks]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
