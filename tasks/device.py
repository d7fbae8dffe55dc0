"""Slots of this machine's device: how many stages may use it side by side, and which part of it each one gets.

One slot a GPU, each pinned to its own; on a CPU one slot, or as many as `RM_OPT_DEVICE_SLOTS` says, which then share
the cores evenly. Beneath Prefect's limit of the same size there is a file lock a slot: the kernel frees it when its
holder dies, and it holds between programs that use different Prefect servers.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import psutil

from rmcore.core.errors import ConfigError
from rmcore.core.files import write_json
from rmcore.core.store import Store

SLOTS_VARIABLE = "RM_OPT_DEVICE_SLOTS"
POLL_SECONDS = 0.2


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


def slot_environment(slot: int) -> dict[str, str]:
    """Make the environment in which a stage in this slot sees one GPU of its own, or its share of the cores."""
    if gpus := visible_gpus():
        return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
    if device_slots() == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = psutil.cpu_count(logical=False) or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // device_slots()))}


@contextmanager
def device_slot(store: Store, what: str) -> Iterator[int]:
    """Hold one slot of the device inside the block; waits until one is free. Gives its number, from 0.

    `what` it is held for is told to those who wait.
    """
    while True:
        for slot in range(device_slots()):
            with store.try_lock(lock_name(slot)) as held:
                if held:
                    now = datetime.now().astimezone().strftime("%H:%M:%S")
                    place = _holder_file(store, slot)
                    write_json(place, {"what": what, "pid": os.getpid(), "since": now})
                    try:
                        yield slot
                    finally:
                        place.unlink(missing_ok=True)
                    return
        time.sleep(POLL_SECONDS)


def holders(store: Store) -> list[str]:
    """Who holds the slots of the device right now, as people read it."""
    return [_holder(_holder_file(store, slot)) for slot in range(device_slots()) if not store.is_free(lock_name(slot))]


def _holder(place: Path) -> str:
    try:
        held = json.loads(place.read_text())
        return f"{held['what']} (process {held['pid']}, since {held['since']})"
    except (OSError, ValueError, TypeError, KeyError):  # taken this moment, or by an older version
        return "another run"


def _holder_file(store: Store, slot: int) -> Path:
    return store.root / ".locks" / f"{lock_name(slot)}.json"


def is_idle(store: Store) -> bool:
    """Whether nobody on this machine holds a slot right now."""
    return all(store.is_free(lock_name(slot)) for slot in range(device_slots()))


def lock_name(slot: int) -> str:
    """Name of the store's lock for a slot."""
    return f"device-{slot}"
