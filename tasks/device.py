"""Slots of this machine's device: how many stages may use it side by side, and which part of it each one gets; and why
a stage waits, for a slot or for another run of the same stage.

One slot a GPU, each pinned to its own; on a CPU one slot, or as many as `RM_OPT_DEVICE_SLOTS` says, which then share
the cores evenly. A slot is a file lock in the home: the kernel frees it when its holder dies, it holds between programs
that use different Prefect servers, and who waits has it within `POLL_SECONDS`. (A concurrency limit of Prefect's would
be one for all machines, would stay occupied by who was killed, and lets those that it turned away wait for up to 30 s.)
Its name has the machine's boot in it: where several machines share a home, each has the slots of its own device. Who
holds a lock of the store tells it in a note next to the lock, which is valid while the lock is held.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rmcore.core.errors import ConfigError
from rmcore.core.files import write_json
from rmcore.core.processes import this_boot
from rmcore.core.store import Store

Reason = Callable[[], str]
"""Says what is in the way right now, as people read it; empty where nothing is."""
UNKNOWN = "another run"
SLOTS_VARIABLE = "RM_OPT_DEVICE_SLOTS"
POLL_SECONDS = 0.2
DEVICE = "the device"
"""The device, in the words of all messages."""


@dataclass
class Wait:
    """The wait of one stage: what it waits for, in turn; `str` once nothing is left."""

    reason: Reason = str


Waiting = Callable[[], AbstractContextManager[Wait]]
"""Tells people what a stage waits for while the block runs."""


@contextmanager
def noted(store: Store, lock: str, run: str) -> Iterator[None]:
    """Tell those who want the lock that `run` holds it in this process, inside the block. The caller holds the lock."""
    note = _note(store, lock)
    write_json(note, {"run": run, "pid": os.getpid()})
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def holder(store: Store, lock: str) -> str:
    """Who holds a lock, for example `mine-seed0 (pid 4711)`; empty where nobody does."""
    if store.is_free(lock):
        return ""
    try:
        held = json.loads(_note(store, lock).read_text(encoding="utf-8"))
        return f"{held['run']} (pid {held['pid']})"
    except (OSError, ValueError, TypeError, KeyError):  # taken this moment
        return UNKNOWN


def same_stage(store: Store, name: str, key: str) -> str:
    """Describe the run that is computing the stage of that key, for messages; empty if there is none."""
    computed_by = holder(store, key)
    return f"the same {name}, which {computed_by} computes" if computed_by else ""


def _note(store: Store, lock: str) -> Path:
    return store.root / ".locks" / f"{lock}.json"


def visible_gpus() -> list[str]:
    """Names of the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES would list them; no torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [] if named in ("", "-1") else named.split(",")
    driver = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []


def device_slots() -> int:
    """How many stages may use the device of this machine at once.

    Raises:
        ConfigError: RM_OPT_DEVICE_SLOTS is not a number from 1 on.
    """
    named = os.environ.get(SLOTS_VARIABLE)
    if named is None:
        return max(1, len(visible_gpus()))
    if not named.isdecimal() or int(named) < 1:
        raise ConfigError(f"{SLOTS_VARIABLE}={named!r} is no number of slots; set it to 1 or more, or unset it.")
    return int(named)


def slots_for(device: str) -> range:
    """List the slots that a stage may hold: all of them, or where one GPU is named (cuda:1), those of that GPU.

    Slots go round the GPUs. Where there are fewer slots than GPUs, each GPU still has one, so that no two stages of
    different slots meet on a GPU.

    Raises:
        ConfigError: there are GPUs, and not so many.
    """
    slots, gpus, number = device_slots(), visible_gpus(), _number(device)
    if number is None or not gpus:
        return range(slots)
    if number >= len(gpus):
        raise ConfigError(
            f"device={device}, but this process sees {len(gpus)} GPUs, counted from cuda:0; name one of them."
        )
    return range(number % slots, slots, len(gpus))


def slots_needed(device: str, num_processes: int) -> int:
    """How many slots a stage of so many processes holds: as many GPUs, or on a CPU at most all slots.

    Raises:
        ConfigError: there are GPUs, and not so many for it.
    """
    there, gpus, is_named = len(slots_for(device)), len(visible_gpus()), _number(device) is not None
    if device != "cpu" and 0 < (1 if is_named else gpus) < num_processes:
        seen = "one GPU is named" if is_named else f"this process sees {gpus} GPUs"
        raise ConfigError(
            f"train.num_processes={num_processes}, but {seen} (device={device}): each process needs a GPU of its own."
        )
    return min(num_processes, there)


def slots_environment(slots: Sequence[int], device: str = "auto", num_processes: int = 1) -> dict[str, str]:
    """Make the environment of `num_processes` that see the GPUs of these slots, or share what these have of the cores.

    The processes of one training on several GPUs all see all of these: LOCAL_RANK tells them apart.
    """
    gpus, number = visible_gpus(), _number(device)
    if gpus and device != "cpu":
        seen = [gpus[slot % len(gpus) if number is None else number] for slot in slots]
        if len(seen) < num_processes:  # there are fewer slots than GPUs, and all of them are held
            seen = gpus[:num_processes]
        return {"CUDA_VISIBLE_DEVICES": ",".join(seen)}
    if (device_slots() == 1 and num_processes == 1) or "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = psutil.cpu_count(logical=False) or 1
    return {"OMP_NUM_THREADS": str(max(1, cores * len(slots) // (device_slots() * num_processes)))}


@contextmanager
def held_slots(store: Store, run: str, device: str = "auto", number: int = 1) -> Iterator[list[int]]:
    """Hold `number` slots of the device inside the block; waits until so many are free. Gives their numbers, rising.

    All or none: two who want several never wait for one another's. `run` is the name by which those who wait know the
    holder, `device` says which of several GPUs is wanted.
    """
    while True:
        with free_slots(store, run, device, number) as held:
            if held is not None:
                yield held
                return
        time.sleep(POLL_SECONDS)


@contextmanager
def free_slots(store: Store, run: str, device: str = "auto", number: int = 1) -> Iterator[list[int] | None]:
    """Hold `number` slots inside the block if so many are free now, each of another GPU; else gives None."""
    num_gpus = len(visible_gpus())
    with ExitStack() as stack:
        held: list[int] = []
        for slot in slots_for(device):
            if len(held) == number:
                break
            meets = num_gpus > 0 and slot % num_gpus in {other % num_gpus for other in held}
            if not meets and stack.enter_context(store.try_lock(lock_name(slot))):
                held.append(slot)
        if len(held) == number:
            for slot in held:
                stack.enter_context(noted(store, lock_name(slot), run))
            yield held
            return
    yield None


def holders(store: Store, device: str = "auto") -> list[str]:
    """Who holds the slots of the device right now, as people read it."""
    return [held for slot in slots_for(device) if (held := holder(store, lock_name(slot)))]


def in_the_way(store: Store, device: str, number: int = 1) -> str:
    """Who keeps a run from `number` slots of the device right now, as people read it; empty where they are free."""
    busy = holders(store, device)
    return f"{DEVICE}, held by {' and '.join(busy)}" if len(slots_for(device)) - len(busy) < number else ""


def as_seen(device: str) -> str:
    """A device as a stage in its slot names it: pinned to the GPU with that number, it sees no other."""
    return device.partition(":")[0] if visible_gpus() else device


def lock_name(slot: int) -> str:
    """Name of the store's lock for a slot: that of its GPU where each has one, so that who sees others has others."""
    gpus = visible_gpus()
    named = f"gpu-{gpus[slot]}".replace("/", "-") if gpus and SLOTS_VARIABLE not in os.environ else slot
    return f"device-{this_boot()}-{named}"


def _number(device: str) -> int | None:
    number = device.partition(":")[2]
    return int(number) if number else None
