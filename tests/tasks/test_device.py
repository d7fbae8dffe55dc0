"""Slots of the device: as many holders as slots, never more, and none left behind by a dead one."""

import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from machine import PATIENCE_S, run_inside
from rmcore.core.errors import ConfigError
from rmcore.core.store import Store
from tasks.device import (
    SLOTS_VARIABLE,
    as_seen,
    device_slots,
    free_slots,
    held_slots,
    holders,
    in_the_way,
    slots_environment,
    slots_for,
    slots_needed,
)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_more_holders_than_slots(tmp_path, monkeypatch, slots):
    monkeypatch.setenv(SLOTS_VARIABLE, str(slots))
    store, holding, most, guard = Store(tmp_path), set(), [], threading.Lock()
    full = threading.Barrier(slots, timeout=PATIENCE_S)

    def use():
        with held_slots(store, "a test") as [slot]:
            with guard:
                if slot in holding:
                    full.abort()  # the others would wait for this one
                assert slot not in holding
                holding.add(slot)
                most.append(len(holding))
            full.wait()  # passes only when all slots are held at once
            with guard:
                holding.remove(slot)

    with ThreadPoolExecutor(2 * slots) as pool:
        list(pool.map(lambda _: use(), range(2 * slots)))
    assert max(most) == slots
    assert len(most) == 2 * slots
    assert holders(store) == []


def test_a_slot_of_a_killed_holder_is_free_again(tmp_path, monkeypatch):
    monkeypatch.setenv(SLOTS_VARIABLE, "1")
    code = (
        "import sys; from pathlib import Path; from rmcore.core.store import Store\n"
        "from tasks.device import held_slots\n"
        f"with held_slots(Store(Path({str(tmp_path)!r})), 'mine-seed0'):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    [told] = holders(Store(tmp_path))
    assert re.fullmatch(rf"mine-seed0 \(pid {holder.pid}\)", told)
    with free_slots(Store(tmp_path), "a test") as slot:
        assert slot is None
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with held_slots(Store(tmp_path), "a test") as [slot]:
        assert slot == 0
    holder.communicate()
    assert holders(Store(tmp_path)) == []


@pytest.mark.slow
def test_a_container_on_this_machine_is_held_back_and_takes_nothing_away(tmp_path, monkeypatch):
    """It has pids of its own and sees the same home: whoever holds the device there is alive, and keeps it."""
    monkeypatch.setenv(SLOTS_VARIABLE, "1")
    code = (
        "from pathlib import Path; from rmcore.core.store import Store; from tasks.device import free_slots\n"
        f"with free_slots(Store(Path({str(tmp_path)!r})), 'inside') as slot: print(slot)"
    )
    with held_slots(Store(tmp_path), "outside"):
        assert run_inside(code) == "None\n"
        assert len(holders(Store(tmp_path))) == 1
    assert run_inside(code) == "[0]\n"


def test_who_wants_several_slots_gets_all_or_holds_none(tmp_path, monkeypatch):
    monkeypatch.setenv(SLOTS_VARIABLE, "3")
    store, running, most, guard = Store(tmp_path), [], [], threading.Lock()

    def use(number):
        for _ in range(20):
            with held_slots(store, "a test", "auto", number) as slots:
                with guard:
                    assert len(set(slots)) == number
                    assert not set(slots) & {slot for others in running for slot in others}
                    running.append(slots)
                    most.append(sum(map(len, running)))
                with guard:
                    running.remove(slots)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, (2, 2, 3, 1)))
    assert max(most) <= 3
    with held_slots(store, "one", "auto"):
        assert in_the_way(store, "auto", 2) == ""
        assert in_the_way(store, "auto", 3).startswith("the device, held by one")


def test_the_processes_of_one_training_see_all_of_its_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    monkeypatch.delenv(SLOTS_VARIABLE, raising=False)
    assert slots_needed("auto", 2) == 2
    assert slots_environment([0, 2], "auto", 2) == {"CUDA_VISIBLE_DEVICES": "2,7"}
    for device, words in (("auto", "sees 3 GPUs"), ("cuda:1", "one GPU is named")):
        with pytest.raises(ConfigError, match=words):
            slots_needed(device, 4)
    # Slots that share GPUs: one of each GPU, or where there are fewer, all of them.
    monkeypatch.setenv(SLOTS_VARIABLE, "6")
    with held_slots(Store(tmp_path), "another"), held_slots(Store(tmp_path), "mine", "auto", 3) as slots:
        assert sorted(slot % 3 for slot in slots) == [0, 1, 2]
    monkeypatch.setenv(SLOTS_VARIABLE, "1")
    assert slots_needed("auto", 3) == 1
    assert slots_environment([0], "auto", 3) == {"CUDA_VISIBLE_DEVICES": "2,5,7"}
    assert slots_needed("cpu", 8) == 1  # cores it shares, and no GPU


@pytest.mark.parametrize("named", ["0", "two", "-1", ""])
def test_a_number_of_slots_that_is_none_is_refused(monkeypatch, named):
    monkeypatch.setenv(SLOTS_VARIABLE, named)
    with pytest.raises(ConfigError, match=SLOTS_VARIABLE):
        device_slots()


def test_each_gpu_is_a_slot_a_named_one_has_its_own_and_no_two_slots_meet_on_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    for slots in (None, "1", "2", "3", "7"):
        monkeypatch.setenv(SLOTS_VARIABLE, slots) if slots else monkeypatch.delenv(SLOTS_VARIABLE, raising=False)
        assert device_slots() == int(slots or 3)
        users = {}
        for device in ("auto", "cuda:0", "cuda:1", "cuda:2"):
            for slot in slots_for(device):
                gpu = slots_environment([slot], device)["CUDA_VISIBLE_DEVICES"]
                assert device == "auto" or gpu == "257"[int(device[-1])]
                users.setdefault(gpu, set()).add(slot)
        assert all(len(held) <= -(-int(slots or 3) // 3) for held in users.values()), users
    assert as_seen("cuda:1") == "cuda"
    with pytest.raises(ConfigError, match="cuda:3, but this process sees 3 GPUs"):
        slots_for("cuda:3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (list(slots_for("cuda:1")), as_seen("cuda:1")) == (list(range(7)), "cuda:1")  # torch refuses it


def test_slots_and_processes_on_a_cpu_share_the_cores(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    monkeypatch.setenv(SLOTS_VARIABLE, "1")
    assert slots_needed("auto", 4) == 1
    assert slots_environment([0]) == {}
    assert slots_environment([0], "auto", 4) == {"OMP_NUM_THREADS": "2"}
    monkeypatch.setenv(SLOTS_VARIABLE, "1000")
    assert slots_environment([0]) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # what the user says stands
    assert slots_environment([0]) == {}
