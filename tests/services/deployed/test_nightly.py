"""A study on a real schedule: a look each time, one of them killed, and the decisions of a study that was not."""

import contextlib
import json
import shutil
from datetime import UTC, datetime, timedelta

import psutil
import pytest

from machine import wait_for
from owner_login import owners
from used_homes import begin

pytestmark = pytest.mark.services
LOOKS, ARMS = [2, 3], ["plain", "full"]
NIGHT_SECONDS = 3600
"""From one look to the next: none begins before the test lets it, however long a look takes on a busy machine."""


@pytest.fixture
def night_falls(services, tiny_folder):
    """Has the shipped schedule start a run of a small study in some seconds; it is as it was after."""
    found = services.deployment("experiment")
    place, schedule = f"{services.api}/deployments/{found['id']}", shipped(found)
    parameters = {"experiment": "baseline", "size": "smoke", "looks": LOOKS, "take": 1}
    assert set(schedule["parameters"]) == parameters.keys()
    parameters |= {"model": str(tiny_folder), "arms": ARMS}

    def change(**to):
        services.http.patch(f"{place}/schedules/{schedule['id']}", json=to).raise_for_status()

    def fall():
        first = datetime.now(UTC) + timedelta(seconds=5)
        interval = {"interval": NIGHT_SECONDS, "anchor_date": first.isoformat()}
        change(schedule=interval, active=True, parameters=parameters)
        services.http.post(f"{place}/schedule", json={}).raise_for_status()

    yield fall
    change(schedule=schedule["schedule"], active=False, parameters=schedule["parameters"])
    # Other tests count what is computed.
    services.wait_for(lambda: not nights(services, "RUNNING", "PENDING"))


def shipped(deployment):
    """The nightly one of the schedules."""
    [found] = [one for one in deployment["schedules"] if one["slug"] == "nightly-ablation"]
    return found


def nights(services, *states):
    """What schedules have started."""
    return services.flow_runs(tags={"all_": ["auto-scheduled"]}, state={"type": {"any_": list(states)}})


def looks(home):
    """The looks that are written down, without their times."""
    found = list(home.glob("registrations/baseline-smoke/*.looks.jsonl"))
    written = [json.loads(line) for file in found for line in file.read_text().splitlines()]
    return [{name: value for name, value in one.items() if name != "taken_at"} for one in written]


def decisions(home):
    return [(one["num_seeds"], one["open"], [claim["verdict"] for claim in one["claims"]]) for one in looks(home)]


def test_a_nightly_study_that_is_killed_decides_what_one_that_was_not_decides(
    services, night_falls, tiny_folder, tmp_path, databases
):
    def is_active():
        return shipped(services.deployment("experiment"))["active"]

    def unfinished():
        return set(services.home.glob("store/.wip/train-*/metrics.jsonl"))

    def running():
        return [pid for run in nights(services, "RUNNING") for pid in owners(run)]

    night_falls()
    services.wait_for(lambda: nights(services, "COMPLETED"))
    assert len(looks(services.home)) == 1
    # Killed with its cells, in the midst of the second look, which is the last.
    left = unfinished()
    night_falls()
    wait_for(lambda: unfinished() - left, seconds=300)
    assert len(looks(services.home)) == 1
    killed = []
    for pid in running():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself
            killed += [psutil.Process(pid), *psutil.Process(pid).children(True)]
    assert killed
    for process in [*services.stage_processes(), *killed]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    services.wait_for(lambda: not nights(services, "RUNNING"))
    night_falls()
    services.wait_for(lambda: not is_active(), timeout_s=500)
    services.wait_for(lambda: not nights(services, "RUNNING"))  # the last one has its report to write

    assert [number for number, *_ in decisions(services.home)] == LOOKS
    assert looks(services.home)[-1]["open"] == []
    done = nights(services, "COMPLETED")
    assert len(done) >= len(LOOKS)
    said = [line for run in done for line in services.logs(run["id"]) if "paused the schedule" in line]
    assert said
    assert "there is nothing left to look at" in said[0]

    # The same study in one go, from the same cells.
    alone = tmp_path / "alone"
    shutil.copytree(services.home / "store", alone / "store")
    own = {"RM_OPT_HOME": str(begin(alone, databases)), "PREFECT_API_URL": services.api}
    own |= {"PREFECT_API_AUTH_STRING": services.passwords[services.ui]}
    words = ["experiment", "baseline", "--looks", ",".join(map(str, LOOKS)), "--arms", ",".join(ARMS)]
    words += ["--model", tiny_folder, "--summary", tmp_path / "s.json"]
    finished = services.warm.run(words, services.environment | own)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "s.json").read_text())["computed"] == []
    assert decisions(alone) == decisions(services.home)
    assert looks(alone) == looks(services.home)
