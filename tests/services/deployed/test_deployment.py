"""The project's own deployment between `rm-opt up` and `rm-opt down`: triggered as the UI does, seen in a browser."""

import contextlib
import json
import os
import re
import stat
import subprocess
import sys

import httpx
import psutil
import pytest
import websockets.exceptions
import websockets.sync.client
from prefect.utilities.templating import PlaceholderType, find_placeholders

from experiments.presets import PRESETS
from flows.cancellation import MESSAGE
from flows.deploy import JOB_TEMPLATE
from machine import PATIENCE_S, found, num_lines
from owner_login import owners
from rmcore.core.processes import marked
from rmcore.core.store import Store
from rmcore.stages.order import pipeline_stages, resolve
from tasks.device import held_slots
from tasks.local_services import HOME_MARK

pytestmark = pytest.mark.services
MATRIX = {"experiment": "baseline", "size": "smoke", "seeds": 1}


@pytest.fixture
def finished(smoke):
    return smoke.run


def test_up_prints_the_addresses_and_the_form_and_info_agrees(services):
    form = f"{services.ui}/deployments/deployment/{services.deployment()['id']}/run"
    info = services.flow_command("info")
    for address in (services.ui, services.mlflow, form):
        assert address in services.printed
        assert address in info


def test_what_was_chosen_shows_on_the_page_of_the_run(services, finished):
    [shown] = {log for log in services.logs(finished["id"]) if log.startswith("settings    preset demo; changed: ")}
    assert "study=from-ui" in shown


def test_the_graph_of_a_run_has_its_stages_as_nodes_and_what_each_reads_as_edges(services, finished):
    smoke = PRESETS["smoke"]
    stages = resolve(pipeline_stages(smoke), smoke)
    assert services.edges(finished["id"]) == {
        **{name: set(stage.upstream) for name, stage in stages.items()},
        "report": {"readiness"},
        "register": {"report"},
    }


def test_the_log_of_a_run_has_a_line_for_each_stage(services, finished):
    lines = services.logs(finished["id"])
    for name in pipeline_stages(PRESETS["smoke"]):
        # cached: a test before this one may have made the same artifact
        assert [line for line in lines if re.match(rf"{name:<10} (cached|[\d.]+ s)  \S", line)], name


def test_a_run_triggered_through_the_api_is_complete_in_mlflow_and_described_in_prefect(services, finished):
    [run] = services.mlflow_runs("from-ui")
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert run["info"]["status"] == "FINISHED"
    assert tags["prefect.flow_run_id"] == finished["id"]
    artifacts = services.artifacts(finished["id"])
    assert any("Evidence level 1 of 4: labelled pairs" in text for text in artifacts)
    assert any(run["info"]["run_id"] in text for text in artifacts)
    assert services.report(finished["id"]).startswith("<!doctype html>")
    assert sorted(services.cards(finished["id"])) == ["report"]
    assert services.cards(finished["id"])["report"].startswith("[Report](http")
    assert (finished["tags"], len(owners(finished))) == (["rm-opt"], 1)


ELSEWHERE = {"Origin": "http://127.0.0.1:9"}
"""A page of another user's server on this machine, or of any other site."""
ANOTHER_NAME = {"Host": "rebound.example"}


ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}


@pytest.mark.parametrize(
    ("method", "is_owner", "headers", "status"),
    [
        ("POST", False, {}, 401),
        ("POST", False, {"Authorization": "Basic Og=="}, 401),
        ("POST", True, ANOTHER_NAME, 421),
        ("POST", True, ELSEWHERE, 403),
        ("OPTIONS", False, ELSEWHERE | ASKED, 403),
    ],
    ids=["no password", "empty password", "another name", "another page", "leave for another page"],
)
def test_whoever_is_not_the_owner_starts_and_reads_nothing(services, method, is_owner, headers, status):
    owner = ("any", services.password) if is_owner else None
    creation = f"{services.api}/deployments/{services.deployment()['id']}/create_flow_run"
    tracked = f"{services.mlflow}/api/2.0/mlflow/experiments/search"
    before = len(services.flow_runs())
    for place, body in ((creation, {}), (f"{services.api}/flow_runs/filter", {}), (tracked, {"max_results": 1})):
        answer = httpx.request(method, place, json=body, headers=headers, auth=owner, timeout=PATIENCE_S)
        assert answer.status_code == status, place
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert len(services.flow_runs()) == before


def test_a_web_socket_opens_to_the_owner_only(services):
    place = f"{services.api}/events/out"
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg=="}
    upgrade |= {"Sec-WebSocket-Protocol": "prefect"}  # the password follows in the first message
    for more, status in (({}, 101), (ELSEWHERE, 403), (ANOTHER_NAME, 403)):
        assert httpx.get(place, headers=upgrade | more, timeout=PATIENCE_S).status_code == status
    with websockets.sync.client.connect(place.replace("http", "ws"), subprotocols=["prefect"]) as stranger:
        stranger.send(json.dumps({"type": "auth", "token": "a guess"}))
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            stranger.recv(timeout=PATIENCE_S)


def test_no_run_brings_a_command_an_environment_or_a_folder_of_its_own(services, tmp_path):
    """Not even the owner's: it is what a stolen session would do first."""
    creation = f"{services.api}/deployments/{services.deployment()['id']}/create_flow_run"
    for name, value in {
        "command": f"touch {tmp_path / 'executed'}", "env": {"PYTHONPATH": str(tmp_path)}, "env.PYTHONPATH": "x",
        "working_dir": str(tmp_path), "name": "x",
    }.items():  # fmt: skip
        answer = services.http.post(creation, json={"job_variables": {name: value}})
        assert (answer.status_code, "Additional properties are not allowed" in answer.text) == (422, True), answer.text
    # What the worker makes of a value that reached it all the same.
    template = services.http.get(f"{services.api}/work_pools/rm-opt").json()["base_job_template"]
    assert template == JOB_TEMPLATE
    assert [one.type for one in find_placeholders(template["job_configuration"])] == [PlaceholderType.ENV_VAR]


def test_the_password_is_in_its_file_and_in_no_command_line_log_or_record(services, finished):
    file = services.home / "services" / "password"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.read_text().strip() == services.password
    started = []
    for process in marked(HOME_MARK, str(services.home)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a child that ended since it was listed
            started.append(" ".join(process.cmdline()))
    assert len(started) >= 3
    assert not [line for line in [*started, services.printed] if services.password in line]
    for path in found(services.home, "**"):
        content = b""
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes() if path.is_file() else b""
        assert path == file or services.password.encode() not in content, path
    assert str(file) in services.printed


@pytest.mark.parametrize(
    ("flow", "field", "value"),
    [
        ("pipeline", "lr", -1),
        ("pipeline", "preset", "demp"),
        ("pipeline", "overrides", "lr"),
        ("experiment", "size", "huge"),
        ("experiment", "experiment", "abblation"),
        ("experiment", "seeds", 0),
    ],
)
def test_a_bad_parameter_is_refused_naming_the_field(services, flow, field, value):
    answer = services.trigger((MATRIX if flow == "experiment" else {}) | {field: value}, flow)
    assert answer.status_code == 409
    assert field in answer.text


FORMS = {
    "pipeline": [
        "The first five minutes", "Peak learning rate", "in place of the preset", "This flow reads the sections",
    ],
    "experiment": ["which question: baseline, ablation", "replicates of every arm"],
    "best-of-n": ["in place of a training", "samples of each prompt"],
    "readiness": ["nats that the policy will be moved by"],
    "confirm": ["other prompts, at most, that best-of-n is served on"],
    "rlhf": ["Weight of the KL penalty", "a checkpoint folder"],
}  # fmt: skip
"""What the form of each flow says."""


def test_the_form_and_the_run_show_in_a_browser(browse, services, finished):
    """The other forms hold what their pages are made of."""
    deployed = {name: services.deployment(name) for name in FORMS}
    for name, expected in FORMS.items():
        shown = json.dumps(deployed[name]["parameter_openapi_schema"]).lower()
        assert [text for text in expected if text.lower() not in shown] == [], name
    form = f"{services.ui}/deployments/deployment/{deployed['pipeline']['id']}/run"
    run = f"{services.ui}/runs/flow-run/{finished['id']}"
    browse.paste_password(services.ui, services.password)
    for address, expected in ((form, [*FORMS["pipeline"], "Submit"]), (run, ["from-ui-seed0", "Completed"])):
        page = browse(address, "1400,3000", expected).lower()
        assert [text for text in expected if text.lower() not in page] == [], address


def lines(services):
    return num_lines(found(services.home, "store/.wip/train-*/metrics.jsonl"))


def test_a_refusal_is_one_sentence_on_the_page_of_its_run(services, tmp_path):
    """Of a file whose path in a form is relative to where the services were started: the flow reads it for the key of a
    stage, and the stage its rows."""
    (tmp_path / "one.csv").write_text("question,answer\nwhat,this\n")
    data, words = os.path.relpath(tmp_path / "one.csv"), "the columns are 'question', 'answer'"
    run = services.wait(services.trigger({"preset": "smoke", "data": data}).raise_for_status().json()["id"])
    assert (run["state_type"], run["tags"]) == ("FAILED", ["rm-opt"])
    services.wait_for(lambda: words in " ".join(services.logs(run["id"])))  # they come in batches
    lines = services.logs(run["id"])
    assert len([line for line in lines if words in line and not line.startswith("Finished in state")]) == 1
    assert not [line for line in lines if "Traceback" in line]


@pytest.mark.night
def test_a_run_that_a_command_started_is_cancelled_through_prefect(services):
    """Nothing but the command itself runs it, so the command looks at its state."""
    words = ["run", "--preset", "smoke", "--set", "study=by-command", "--set", "train.steps=5000"]
    command = [sys.executable, "-c", "from flows.cli import main; main()", *words]
    with subprocess.Popen(command, env=services.environment, stderr=subprocess.PIPE, text=True) as started:

        def trained():
            runs = [run for run in services.flow_runs() if owners(run) == [started.pid]]
            return runs if lines(services) > before + 2 else None

        before = lines(services)
        [run] = services.wait_for(trained)
        place = f"{services.api}/flow_runs/{run['id']}"
        services.http.post(f"{place}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()
        _, said = started.communicate(timeout=PATIENCE_S)
    assert (started.returncode, said.splitlines()[-1]) == (130, f"error: {MESSAGE}")
    assert "Traceback" not in said
    ended = services.http.get(place).json()
    assert (ended["state_type"], ended["state"]["message"]) == ("CANCELLED", MESSAGE)
    assert MESSAGE in services.logs(run["id"])
    [tracked] = services.mlflow_runs("by-command")
    assert tracked["info"]["status"] == "KILLED"


@pytest.mark.parametrize(
    ("asked", "state"), [("cancelled", "CANCELLED"), pytest.param("deleted", "KILLED", marks=pytest.mark.night)]
)
def test_an_interrupted_run_ends_as_such_on_its_page_and_so_does_its_stage(services, smoke, asked, state, monkeypatch):
    """It is interrupted after it has waited for the device, which its log says.

    Its state is saved and the device free; the log of one that a user cancelled says so in one line. One that a user
    deleted has no page, so nobody sends it a signal; in MLflow it is there.
    """
    monkeypatch.setenv("RM_OPT_DEVICE_SLOTS", services.environment["RM_OPT_DEVICE_SLOTS"])
    parameters = {
        "preset": "smoke",
        "steps": 5000,
        "study": asked,
        "overrides": {"train.early_stopping_patience": None},
    }
    store = Store(services.home / "store")
    with held_slots(store, "mine-seed0"), held_slots(store, "ours-seed1"):
        started = services.trigger(parameters).raise_for_status().json()
        place = f"{services.api}/flow_runs/{started['id']}"

        held = rf"train +waiting for the device, held by mine-seed0 \(pid {os.getpid()}\) and ours-seed1 "
        services.wait_for(lambda: any(re.search(held, line) for line in services.logs(started["id"])))

    def in_the_middle():
        return tasks().get("train") == "RUNNING" and lines(services) > before

    def tasks():
        wanted = {"flow_runs": {"id": {"any_": [started["id"]]}}}
        runs = services.http.post(f"{services.api}/task_runs/filter", json=wanted).raise_for_status().json()
        return {task["name"]: task["state_type"] for task in runs}

    def saved():
        return set(found(services.home, "store/.wip/train-*/resume/step_*"))

    before = lines(services)
    services.wait(started["id"], until=in_the_middle)
    saved_before = saved()
    run = services.http.get(place).json()
    assert (run["state_type"], run["state_name"]) == ("RUNNING", "Running"), run["state"]
    assert run["name"].startswith(f"{asked}-seed0 · steps=5000")
    assert services.stage_processes()  # its stage is forked from the one server of all runs
    if asked == "cancelled":
        services.http.post(f"{place}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()
    else:
        [process] = map(psutil.Process, owners(run))
        services.http.delete(place).raise_for_status()
        process.wait(timeout=PATIENCE_S)
        [tracked] = services.mlflow_runs(asked)
        assert tracked["info"]["status"] == state
        assert saved() - saved_before
        with held_slots(store, "theirs-seed0"), held_slots(store, "theirs-seed1"):
            return
    assert services.wait(started["id"])["state_type"] == state
    services.wait_for(lambda: MESSAGE in services.logs(started["id"]))
    assert not any("Crash detected" in line for line in services.logs(started["id"]))
    assert saved() - saved_before
    with held_slots(store, "theirs-seed0"), held_slots(store, "theirs-seed1"):
        pass
    assert tasks() == {"prepare": "COMPLETED", "train": state}


@pytest.fixture(scope="module")
def chosen(tiny_folder):
    """The parameters of a matrix of two small cells."""
    return MATRIX | {"model": str(tiny_folder), "arms": ["plain", "full"]}


@pytest.fixture(scope="module")
def matrix(services, chosen):
    """The run of a matrix that was started as the UI does it, and what MLflow had of its study before."""
    before = {run["info"]["run_id"] for run in services.mlflow_runs("baseline-smoke")}
    answer = services.trigger(chosen, "experiment").raise_for_status().json()
    return services.wait(answer["id"]), before


def trained(services):
    return {path: path.read_bytes() for path in services.home.glob("store/train/*/MANIFEST.json")}


def test_a_matrix_started_in_the_ui_and_a_command_share_their_cells(services, chosen, matrix, tmp_path):
    run, earlier = matrix
    assert run["state_type"] == "COMPLETED", run["state"]
    edges = services.edges(run["id"])
    cells = {name for name in edges if name.endswith("seed 0") and " of " not in name}
    assert len(cells) == 2
    assert edges["judge"] == cells
    assert edges["report"] == {"judge"}

    def tracked():
        """Its runs, once the last of what they were told has been written, which no cell waits for."""
        found = [run for run in services.mlflow_runs("baseline-smoke") if run["info"]["run_id"] not in earlier]
        return found if all(run["info"]["status"] == "FINISHED" for run in found) else None

    runs = {run["info"]["run_name"]: run for run in services.wait_for(tracked)}
    for name, run in runs.items():
        tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
        assert tags["mlflow.note.content"].startswith("### "), name
        assert ("mlflow.runColor" in tags) is (tags["rm.kind"] == "cell")
    before = trained(services)
    assert len(before) >= 2
    options = ("--seeds", 1, "--arms", "plain,full", "--model", chosen["model"], "--summary", tmp_path / "summary.json")
    said = services.flow_command("experiment", "baseline", *options).splitlines()
    assert [line.split()[0] for line in said[:4]] == ["starting", "MLflow", "Prefect", "registration"]
    outcome = json.loads((tmp_path / "summary.json").read_text())
    assert outcome["computed"] == []
    assert outcome["results"]["cost"]["num_cached"] == 2
    assert trained(services) == before


def test_prefect_lists_first_what_is_used_most_and_all_on_a_page(services):
    asked = {"sort": "NAME_ASC"}  # as its page does, ten at a time
    found = services.http.post(f"{services.api}/deployments/filter", json=asked).raise_for_status().json()
    names = [one["name"] for one in found]
    assert {"experiment", "pipeline"} <= set(names[:3])
    assert len(names) == len(FORMS) + 1 <= 10  # and the cell of an experiment
