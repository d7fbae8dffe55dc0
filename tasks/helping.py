"""One training over several hosts inside a pipeline: what all but the first of them do.

The same command is started on each host. The first one runs the pipeline. The others compute nothing but their share of
the training: they take its inputs from the shared store as these appear, start their processes, and go when the
trained model is there.
"""

import shutil
import sys
import threading
import time
from contextlib import suppress

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import StoreError
from rmcore.core.leases import Lease
from rmcore.core.shared_store import SharedStore
from rmcore.core.store import ArtifactRef, Store
from rmcore.stages.registry import STAGES, StageCall, stage_call
from tasks.device import several_device_slots, slots_environment, slots_needed
from tasks.execution import run_child
from tasks.home import home
from tasks.nodes import this_node
from tasks.sharing import named_store

POLL_SECONDS = 2.0
SAY_SECONDS, DOUBT_SECONDS = 15.0, 60.0


def help_training(config: PipelineConfig) -> str:
    """Compute this host's share of the training of `config`; gives a sentence on what came of it.

    Raises:
        RmcoreError: as the training; the same command on all hosts resumes it.
    """
    shared, store = named_store(), Store(home() / "store")
    refs: dict[str, ArtifactRef] = {}
    for name in STAGES["train"].needs(config):
        needed = stage_call(name, config, refs)
        _wait_for(shared, store, needed)
        refs[name] = store.ref(name, needed.key)
    call = stage_call("train", config, refs)
    if not _taken(shared, store, call):
        _compute_share(shared, store, call)
        _wait_for(shared, store, call)
    return f"the training is done, and its model is here: {store.ref('train', call.key).path}"


def _compute_share(shared: SharedStore, store: Store, call: StageCall) -> None:
    settings = call.settings
    device, number = getattr(settings, "device", "auto"), settings.num_processes
    needed = slots_needed(device, number)
    lease, done = Lease(), threading.Event()

    def look() -> None:
        while not done.wait(POLL_SECONDS):
            with suppress(StoreError):  # which may be away for a moment
                if shared.find(call.stage.name, call.key) is not None:  # made before this host came: nobody waits
                    lease.lose()
                    return

    out = home() / "helping" / f"{call.key}-{this_node(settings.num_nodes).rank}"  # hosts may share a home
    shutil.rmtree(out, ignore_errors=True)  # states are the first host's
    out.mkdir(parents=True)
    looking = threading.Thread(target=look, name="look", daemon=True)
    looking.start()
    try:
        with several_device_slots(store, call.slug, device, needed) as slots:
            run_child(call, out, slots_environment(slots, device, number), _nobody, call.slug, lease)
    except StoreError:
        if not lease.lost.is_set():
            raise
    finally:
        done.set()
        looking.join()
        shutil.rmtree(out, ignore_errors=True)


def _nobody(line: str) -> None:
    """Progress is told by the first host."""


def _wait_for(shared: SharedStore, store: Store, call: StageCall) -> None:
    """Take an artifact that the first host makes, when it is there."""
    name, began = call.stage.name, time.monotonic()
    said = began - SAY_SECONDS
    while not _taken(shared, store, call):
        waited = time.monotonic() - began
        if began + waited - said >= SAY_SECONDS:
            said = began + waited
            doubt = f"; does it run, with the same data, code and versions (key {call.key[:12]})?"
            told = f"{name:<10} waits for the first host, {waited:.0f} s so far"
            print(told + (doubt if waited > DOUBT_SECONDS else ""), file=sys.stderr)
        time.sleep(POLL_SECONDS)


def _taken(shared: SharedStore, store: Store, call: StageCall) -> bool:
    with store.lock(call.key):
        return store.status(call.stage.name, call.key).state == "valid" or shared.pull(store, call.stage.name, call.key)
