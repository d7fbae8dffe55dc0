"""A study on a real schedule, killed and started again by it, and the verdicts of a study that was not killed."""

import contextlib
import json
import shutil
from datetime import UTC, datetime, timedelta

import psutil
import pytest

from machine import found, wait_for
from owner_login import owners
from used_homes import begin

pytestmark = [pytest.mark.services, pytest.mark.night]
SEEDS, ARMS = 2, ["plain", "full"]
NIGHT_SECONDS = 3600
"""From one run to the next: none begins before the test lets it, however long one takes on a busy machine."""


@pytest.fixture
def night_falls(services, tiny_folder):
    """Has a schedule start a run of a small study in some seconds; it is gone after."""
    place = f"{services.api}/deployments/{services.deployment('experiment')['id']}"
    parameters = {"experiment": "baseline", "size": "smoke", "seeds": SEEDS, "model": str(tiny_folder), "arms": ARMS}
    made = []

    def fall():
        first = datetime.now(UTC) + timedelta(seconds=5)
        interval = {"interval": NIGHT_SECONDS, "anchor_date": first.isoformat()}
        wanted = {"schedule": interval, "active": True, "parameters": parameters}
        while made:
            services.http.delete(f"{place}/schedules/{made.pop()}").raise_for_status()
        [one] = services.http.post(f"{place}/schedules", json=[wanted]).raise_for_status().json()
        made.append(one["id"])
        services.http.post(f"{place}/schedule", json={}).raise_for_status()

    yield fall
    services.http.delete(f"{place}/schedules/{made.pop()}").raise_for_status()
    # Other tests count what is computed.
    services.wait_for(lambda: not nights(services, "RUNNING", "PENDING"))


def nights(services, *states):
    """What schedules have started."""
    return services.flow_runs(tags={"all_": ["auto-scheduled"]}, state={"type": {"any_": list(states)}})


def reports(home):
    """Reports of studies of this name, those of other tests, too, the oldest first."""
    return sorted(home.glob("reports/baseline-smoke-*/summary.json"), key=lambda file: file.stat().st_mtime)


def verdicts(home):
    """What the newest report of the study says of its claims."""
    files = reports(home)
    found = json.loads(files[-1].read_text())["hypotheses"]
    return [{name: one[name] for name in ("name", "verdict", "value", "ci_low", "ci_high", "p")} for one in found]


def test_a_nightly_study_that_is_killed_judges_as_one_that_was_not(
    services, night_falls, tiny_folder, tmp_path, databases
):
    def unfinished():
        return set(found(services.home, "store/.wip/train-*/metrics.jsonl"))

    def running():
        return [pid for run in nights(services, "RUNNING") for pid in owners(run)]

    left, others, completed = unfinished(), reports(services.home), len(nights(services, "COMPLETED"))
    night_falls()
    wait_for(lambda: unfinished() - left)
    killed = []
    for pid in running():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself
            killed += [psutil.Process(pid), *psutil.Process(pid).children(True)]
    assert killed
    for process in [*services.stage_processes(), *killed]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    services.wait_for(lambda: not nights(services, "RUNNING"))
    assert reports(services.home) == others
    night_falls()
    services.wait_for(lambda: len(nights(services, "COMPLETED")) > completed)

    # The same study in one go, from the same cells.
    alone = tmp_path / "alone"
    shutil.copytree(services.home / "store", alone / "store")
    own = {"RM_OPT_HOME": str(begin(alone, databases)), "PREFECT_API_URL": services.api}
    own |= {"PREFECT_API_AUTH_STRING": services.password}
    words = ["experiment", "baseline", "--seeds", str(SEEDS), "--arms", ",".join(ARMS)]
    words += ["--model", tiny_folder, "--summary", tmp_path / "s.json"]
    finished = services.warm.run(words, services.environment | own)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "s.json").read_text())["computed"] == []
    assert verdicts(alone) == verdicts(services.home)
