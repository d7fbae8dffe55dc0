"""The project's own deployment between `rm-opt up` and `rm-opt down`: triggered as the UI does, seen in a browser."""

import csv
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import websockets.exceptions
import websockets.sync.client

from experiments.presets import PRESETS
from rmcore.core.errors import ConfigError
from rmcore.core.processes import marked
from rmcore.core.store import Store
from rmcore.stages.registry import PIPELINE
from tasks.device import device_slot
from tasks.local_services import HOME_MARK

pytestmark = pytest.mark.services
FLOWS = (
    "pipeline", "trajectory", "experiment", "score", "benchmark", "best-of-n", "overoptimize", "readiness", "confirm",
    "readiness-validation", "active-learning", "rlhf", "tune",
)  # fmt: skip
CONFIGURED = [
    *("pipeline", "trajectory", "best-of-n", "readiness", "confirm", "readiness-validation", "active-learning", "rlhf"),
    "tune",
    "benchmark",
]
MATRIX = {"experiment": "baseline", "size": "smoke", "seeds": 1}


@pytest.fixture
def finished(smoke):
    return smoke.run


def test_up_prints_both_addresses_and_status_agrees(services):
    for address in (services.ui, services.mlflow):
        assert address in services.printed
        assert address in services.rm_opt("status")


def test_the_form_begins_with_a_preset_and_has_a_dozen_fields_with_bounds_and_help(services):
    schema = services.deployment()["parameter_openapi_schema"]
    fields = schema["properties"]
    assert next(iter(fields)) == "preset"
    assert fields["preset"]["enum"][0] == fields["preset"]["default"] == "demo"
    assert fields["lr"]["exclusiveMinimum"] == 0
    assert "Peak learning rate" in fields["lr"]["description"]
    assert "default" not in fields["lr"]  # what the UI would send for an empty field
    for name in CONFIGURED:
        schema = services.deployment(name)["parameter_openapi_schema"]
        assert len(schema["properties"]) <= 14, name
        assert not schema.get("definitions"), name


def test_what_was_chosen_shows_on_the_page_of_the_run(services, finished):
    [shown] = [text for text in services.artifacts(finished["id"]) if text.startswith("# Settings")]
    assert "Preset `demo`" in shown
    assert "| study | from\\-ui | demo |" in shown or "| study | from-ui | demo |" in shown
    assert "    study: from-ui" in shown
    assert "validation:" not in shown  # a section that the flow does not read
    assert {log for log in services.logs(finished["id"]) if log.startswith("settings    preset demo; changed: ")}


def test_the_graph_of_a_run_has_its_stages_as_nodes_and_what_each_reads_as_edges(services, finished):
    assert services.edges(finished["id"]) == {
        "prepare": set(),
        "train": {"prepare"},
        "evaluate": {"prepare", "train"},
        "landscape": {"prepare", "train"},
        "readiness": {"prepare", "evaluate", "landscape"},
        "report": {"readiness"},
        "register": {"report"},
    }
    assert services.bars(finished["id"]) == [(100, "5 of 5 stages done")]


def wait_for(condition, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.5)
    return found


def test_a_run_that_fails_or_waits_is_told_to_the_webhook(services):
    """The runs are made by hand, in the states that runs of flows come into."""
    flow = services.deployment()["flow_id"]
    place = f"{services.api}/automations"
    found = services.http.post(f"{place}/filter", json={}).raise_for_status().json()
    shipped = {one["name"].removeprefix("rm-opt: "): one for one in found}
    assert set(shipped) == {"a run failed", "a run waits", "a study was decided"}
    waits = shipped["a run waits"]
    assert waits["trigger"]["within"] == 30 * 60
    soon = {name: waits[name] for name in ("name", "description", "enabled", "actions")}
    soon |= {"trigger": waits["trigger"] | {"within": 10}}
    services.http.put(f"{place}/{waits['id']}", json=soon).raise_for_status()

    def put(name, kind, state=None):
        made = {"type": kind, "name": state or kind.title(), "message": 'for "a" <reason>'}
        body = {"flow_id": flow, "name": name, "state": made}
        services.http.post(f"{services.api}/flow_runs/", json=body).raise_for_status()

    def told():
        failed = [one for one in services.webhook.of("failed") if one["run"].startswith("failed")]
        waiting = {one["run"].split()[0] for one in services.webhook.of("waits")}
        return failed if waiting >= {"late", "queued"} else []

    # A server that is busy may take a quarter of an hour to tell of one run, so there is another a while later.
    for attempt in range(5):
        put(f"failed {attempt}", "FAILED")
        put(f"late {attempt}", "SCHEDULED", "Late")
        put(f"queued {attempt}", "RUNNING", "Waiting for the device")
        deadline = time.monotonic() + 30
        while not (failed := told()) and time.monotonic() < deadline:
            time.sleep(0.5)
        if failed:
            break
    assert failed, services.webhook.messages
    assert failed[0]["text"] == f'Run {failed[0]["run"]} ended as Failed: for "a" <reason>'
    assert failed[0]["address"].startswith(f"{services.ui}/runs/flow-run/")
    assert {(path, kind) for path, kind, _ in services.webhook.messages} == {
        (f"/{services.webhook.secret}", "application/json")
    }
    renewed = deploy_automations_again(services)
    assert [(one["id"], one["trigger"]["within"]) for one in renewed if one["id"] == waits["id"]] == [
        (waits["id"], 30 * 60)
    ]
    assert len(renewed) == 3


def deploy_automations_again(services):
    """What a second `rm-opt up` does."""
    script = (
        "import sys; from tasks.home import configure_environment; configure_environment(); "
        "from flows.automations import deploy_automations; deploy_automations(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, services.api, services.webhook.address]
    subprocess.run(command, env=services.environment, check=True, capture_output=True, timeout=120)
    return services.http.post(f"{services.api}/automations/filter", json={}).raise_for_status().json()


def test_the_log_of_a_run_has_a_line_for_each_stage(services, finished):
    lines = services.logs(finished["id"])
    for name in PIPELINE:
        # cached: a test before this one may have made the same artifact
        assert [line for line in lines if re.match(rf"{name:<10} (cached|[\d.]+ s)  \S", line)], name


def test_a_bad_setting_is_refused_as_on_the_command_line_and_a_given_name_stays(services):
    """What else is refused, and in which words: tests/flows/test_form.py."""
    answer = services.trigger({"preset": "smoke", "lr": 0.1, "overrides": {"train.lr": 0.2}}, name="My first try")
    run = services.wait(answer.raise_for_status().json()["id"])
    assert (run["state_type"], run["name"]) == ("FAILED", "My first try")
    assert "give it once" in run["state"]["message"]


def test_a_run_triggered_through_the_api_is_complete_in_mlflow_and_described_in_prefect(services, finished):
    [run] = services.mlflow_runs("from-ui")
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert run["info"]["status"] == "FINISHED"
    assert tags["prefect.flow_run_id"] == finished["id"]
    artifacts = services.artifacts(finished["id"])
    assert "Verdict on rung 1 of 4: labelled pairs" in next(text for text in artifacts if "Verdict on" in text)
    assert any(run["info"]["run_id"] in text for text in artifacts)
    assert services.report(finished["id"]).startswith("<!doctype html>")


ELSEWHERE = {"Origin": "http://127.0.0.1:9"}
"""A page of another user's server on this machine, or of any other site."""
ANOTHER_NAME = {"Host": "rebound.example"}


@pytest.mark.parametrize(
    ("password", "headers", "status"),
    [
        (False, {}, 401),
        (True, ANOTHER_NAME, 421),
        (True, ELSEWHERE, 403),
        (False, {"Authorization": "Basic Og=="}, 401),
    ],
    ids=["no password", "another name", "another page", "empty password"],
)
def test_whoever_is_not_the_owner_starts_and_reads_nothing(services, password, headers, status):
    owner = dict(services.http.headers) if password else {}
    creation = f"{services.api}/deployments/{services.deployment()['id']}/create_flow_run"
    tracked = f"{services.mlflow}/api/2.0/mlflow/experiments/search"
    before = len(services.flow_runs())
    for place, body in ((creation, {}), (f"{services.api}/flow_runs/filter", {}), (tracked, {"max_results": 1})):
        assert httpx.post(place, json=body, headers=owner | headers, timeout=60).status_code == status, place
    assert len(services.flow_runs()) == before


def test_a_web_socket_opens_to_the_owner_only(services):
    place = f"{services.api}/events/out"
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg=="}
    spoken = {"Sec-WebSocket-Protocol": "prefect"}  # the password follows in the first message
    opened = [httpx.get(place, headers=upgrade | spoken | more).status_code for more in ({}, ELSEWHERE, ANOTHER_NAME)]
    assert opened == [101, 403, 403]
    with websockets.sync.client.connect(place.replace("http", "ws"), subprotocols=["prefect"]) as stranger:
        stranger.send(json.dumps({"type": "auth", "token": "a guess"}))
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            stranger.recv(timeout=60)


def test_a_page_of_another_site_gets_no_leave_to_ask(services):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for place in (f"{services.api}/flow_runs/filter", f"{services.mlflow}/api/2.0/mlflow/runs/search"):
        answer = httpx.options(place, headers=ELSEWHERE | asked, timeout=60)
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_no_run_brings_a_command_an_environment_or_a_folder_of_its_own(services, tmp_path):
    """Not even the owner's: it is what a stolen session would do first."""
    creation = f"{services.api}/deployments/{services.deployment()['id']}/create_flow_run"
    for name, value in {
        "command": f"touch {tmp_path / 'executed'}", "env": {"PYTHONPATH": str(tmp_path)}, "env.PYTHONPATH": "x",
        "working_dir": str(tmp_path), "name": "x",
    }.items():  # fmt: skip
        answer = services.http.post(creation, json={"job_variables": {name: value}})
        assert (answer.status_code, name in answer.text) == (422, True), answer.text
    # What the worker makes of a value that reached it all the same.
    template = services.http.get(f"{services.api}/work_pools/rm-opt").json()["base_job_template"]
    assert template["job_configuration"] == {"stream_output": True}
    assert template["variables"]["properties"] == {}


def test_the_password_is_in_its_file_and_in_no_command_line_log_or_record(services, finished):
    file = services.home / "services" / "password"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]
    ours = marked(HOME_MARK, str(services.home))
    assert len(ours) >= 3
    assert not [process.cmdline() for process in ours if services.password in " ".join(process.cmdline())]
    secret, hook = services.password.encode(), services.webhook.secret.encode()
    written = [path for path in services.home.rglob("*") if path.is_file() and path != file]
    assert not [path for path in written if secret in (content := path.read_bytes()) or hook in content]
    assert not [process.pid for process in ours if services.webhook.secret in str(process.environ())]
    assert services.password not in services.printed
    assert services.webhook.secret not in services.printed
    assert str(file) in services.printed


@pytest.mark.parametrize(
    ("field", "value"), [("lr", -1), ("preset", "demp"), ("overrides", "lr")], ids=["bound", "choice", "kind"]
)
def test_a_bad_parameter_is_refused_naming_the_field(services, field, value):
    answer = services.trigger({field: value})
    assert answer.status_code == 409
    assert field in answer.text


def test_the_form_and_the_run_show_in_a_browser(browse, services, finished):
    forms = {name: f"{services.ui}/deployments/deployment/{services.deployment(name)['id']}/run" for name in FLOWS}
    pages = {
        forms["pipeline"]: ["Peak learning rate", "in place of the preset", "This flow reads the sections", "Submit"],
        forms["trajectory"]: ["steps between kept", "data, model, train, landscape;", "Submit"],
        forms["experiment"]: ["which question: baseline, ablation", "replicates of every arm", "Submit"],
        forms["score"]: ["a version in MLflow's registry", "longer than the model was trained to read", "Submit"],
        forms["benchmark"]: ["judgebench, llmbar=FOLDER", "Submit"],
        forms["best-of-n"]: ["in place of a training", "samples of each prompt", "Submit"],
        forms["overoptimize"]: ["column of the gold reward", "largest n of best-of-n", "Submit"],
        forms["readiness"]: ["nats that the policy will be moved by", "Submit"],
        forms["confirm"]: ["other prompts, at most, that best-of-n is served on", "Submit"],
        forms["readiness-validation"]: ["quickly trained backbones", "Submit"],
        forms["rlhf"]: ["Weight of the KL penalty", "a checkpoint folder", "Submit"],
        forms["tune"]: ["the confirmation included", "fresh seeds of the confirmation", "Submit"],
        forms["active-learning"]: ["paired repetitions", "Submit"],
        f"{services.ui}/runs/flow-run/{finished['id']}": ["from-ui-seed0", "Completed"],
    }
    browse.paste_password(services.ui, services.password)
    for address, expected in pages.items():
        page = browse(address, "1400,3000", expected).lower()
        missing = [text for text in expected if text.lower() not in page]
        assert not missing, f"{missing} not on {address}"


def lines_of(file):
    return file.read_text().count("\n")


@pytest.mark.parametrize(("asked", "state"), [("cancelled", "CANCELLED"), ("terminated", "CRASHED")])
def test_an_interrupted_run_ends_as_such_on_its_page_and_so_does_its_stage(services, smoke, asked, state, monkeypatch):
    """It is interrupted after it has waited for the device, which its page says as long as it does."""
    monkeypatch.setenv("RM_OPT_DEVICE_SLOTS", services.environment["RM_OPT_DEVICE_SLOTS"])
    parameters = {
        "preset": "smoke",
        "steps": 5000,
        "study": asked,
        "overrides": {"train.early_stopping_patience": None},
    }
    store = Store(services.home / "store")
    with device_slot(store, "mine-seed0"), device_slot(store, "ours-seed1"):
        started = services.trigger(parameters).raise_for_status().json()
        place = f"{services.api}/flow_runs/{started['id']}"

        def waiting():
            return services.http.get(place).json()["state_name"] == "Waiting for the device"

        run = services.wait(started["id"], until=waiting)
    assert run["state_name"] == "Waiting for the device", run["state"]
    held = rf"held by mine-seed0 \(pid {os.getpid()}, since [\d:]+\) and ours-seed1 "
    assert re.search(held, run["state"]["message"])

    def in_the_middle():
        tags = services.http.get(place).json()["tags"]
        logs = services.home.glob("store/.wip/train-*/metrics.jsonl")
        return any(tag.startswith("rm-pid:") for tag in tags) and sum(map(lines_of, logs)) > before

    before = sum(map(lines_of, services.home.glob("store/.wip/train-*/metrics.jsonl")))
    services.wait(started["id"], until=in_the_middle)
    run = services.http.get(place).json()
    assert (run["state_type"], run["state_name"]) == ("RUNNING", "Running"), run["state"]
    assert services.stage_processes()  # its stage is forked from the one server of all runs
    if asked == "cancelled":
        services.http.post(f"{place}/set_state", json={"state": {"type": "CANCELLING"}}).raise_for_status()
    else:
        [pid] = [tag.removeprefix("rm-pid:") for tag in run["tags"] if tag.startswith("rm-pid:")]
        os.kill(int(pid), signal.SIGTERM)
    assert services.wait(started["id"])["state_type"] == state
    assert any(re.search(f"train +waiting for the device, {held}", line) for line in services.logs(started["id"]))
    wanted = {"flow_runs": {"id": {"any_": [started["id"]]}}}
    tasks = services.http.post(f"{services.api}/task_runs/filter", json=wanted).raise_for_status().json()
    assert {task["name"]: task["state_type"] for task in tasks} == {"prepare": "COMPLETED", "train": "CRASHED"}


MEASURED = (
    "hessian/test_lambda_max", "hessian/test_lambda_max_residual", "hessian/test_lambda_min",
    "hessian/test_trace_estimate", "hessian/test_trace_standard_error", "hessian/test_margin_scale",
    "hessian/test_lambda_max_normalized",
)  # fmt: skip
STEPS = [8, 10]


def small_trajectory(study):
    """Ten steps, of which the eighth and the last are kept: in another order than their names'."""
    preset = PRESETS["smoke"]
    changes = {"steps": STEPS[-1], "save_every": STEPS[0], "eval_every": STEPS[-1]}
    landscape = preset.landscape.model_copy(update={"parts": ("normalized",)})
    update = {"study": study, "train": preset.train.model_copy(update=changes), "landscape": landscape}
    return preset.model_copy(update=update).model_dump(mode="json")


def test_a_trajectory_triggered_through_the_api_has_each_step_in_mlflow_and_runs_once(services, smoke, tmp_path):
    config = small_trajectory("along")
    started = services.trigger({"overrides": config}, "trajectory").raise_for_status().json()
    run = services.wait(started["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["name"] == "along-seed0-trajectory"
    [tracked] = services.mlflow_runs("along")
    tags = {tag["key"]: tag["value"] for tag in tracked["data"]["tags"]}
    assert tracked["info"]["status"] == "FINISHED"
    assert (tags["rm.kind"], tags["rm.cache"], tags["prefect.flow_run_id"]) == ("trajectory", "prepare", run["id"])
    for name in MEASURED:
        question = {"run_id": tracked["info"]["run_id"], "metric_key": name}
        answer = services.http.get(f"{services.mlflow}/api/2.0/mlflow/metrics/get-history", params=question).json()
        assert [int(point["step"]) for point in answer["metrics"]] == STEPS, name
    [description] = [text for text in services.artifacts(run["id"]) if "margins of 1" in text]
    assert "falls merely because margins grow" in description
    assert services.edges(run["id"]) == {
        "prepare": set(),
        "train": {"prepare"},
        "step_8": {"prepare", "train"},
        "step_10": {"prepare", "train"},
        "report": {"step_8", "step_10"},
    }
    assert services.bars(run["id"]) == [(100, "2 of 2 stages done"), (100, "2 of 2 checkpoints done")]
    assert "falls merely because margins grow" in services.report(run["id"])
    assert "at step 8 to" in tags["mlflow.note.content"]
    assert "report/report.html" in tags["mlflow.note.content"]
    assert tracked["inputs"]["dataset_inputs"][0]["dataset"]["name"] == "gold"

    before = {path: path.read_bytes() for path in services.home.glob("store/[!.]*/*/MANIFEST.json")}
    (tmp_path / "same.yaml").write_text(json.dumps(config))
    arguments = ["--preset", "smoke", "--config", tmp_path / "same.yaml", "--summary", tmp_path / "summary.json"]
    said = services.flow_command("trajectory", *arguments)
    outcome = json.loads((tmp_path / "summary.json").read_text())
    assert outcome["executed"] == []
    assert {path: path.read_bytes() for path in services.home.glob("store/[!.]*/*/MANIFEST.json")} == before
    assert [row["step"] for row in outcome["results"]["checkpoints"]] == STEPS
    assert outcome["figure"] in said
    with open(outcome["table"], newline="") as file:
        table = list(csv.DictReader(file))
    for row, shown in zip(outcome["results"]["checkpoints"], table, strict=True):
        assert float(shown["lambda_max"]) == row["metrics"]["hessian/lambda_max"]


def test_a_trajectory_without_checkpoints_is_refused_before_training(home):
    from flows.trajectory import trajectory

    config = small_trajectory("nowhere")
    config["train"]["save_every"] = None
    with pytest.raises(ConfigError, match=r"train\.save_every is not set"):
        trajectory.fn(overrides=config)
    assert not list((home / "store").glob("[!.]*"))


@pytest.fixture(scope="module")
def chosen(tiny_folder):
    """The parameters of a matrix of two small cells."""
    return MATRIX | {"model": str(tiny_folder)}


@pytest.fixture(scope="module")
def matrix(services, chosen):
    """The run of a matrix that was started as the UI does it."""
    answer = services.trigger(chosen, "experiment").raise_for_status().json()
    return services.wait(answer["id"], timeout_s=500)


def trained(services):
    return {path: path.read_bytes() for path in services.home.glob("store/train/*/MANIFEST.json")}


def test_a_matrix_started_in_the_ui_a_command_and_a_schedule_share_their_cells(services, chosen, matrix, tmp_path):
    assert matrix["state_type"] == "COMPLETED", matrix["state"]
    edges = services.edges(matrix["id"])
    cells = {name for name in edges if name.endswith("seed 0") and " of " not in name}
    assert len(cells) == 3
    assert edges["judge"] == cells
    assert edges["report"] == {"judge"}
    [part] = services.bars(matrix["id"])
    assert part == (100, "3 of 3 cells done")

    def tracked():
        """All runs, once the last of what they were told has been written, which no cell waits for."""
        found = services.mlflow_runs("baseline-smoke")
        return found if all(run["info"]["status"] == "FINISHED" for run in found) else None

    runs = {run["info"]["run_name"]: run for run in wait_for(tracked)}
    for name, run in runs.items():
        tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
        assert run["inputs"].get("dataset_inputs"), (name, run["info"]["status"])
        assert tags["mlflow.note.content"].startswith("### "), name
        assert ("mlflow.runColor" in tags) is (tags["rm.kind"] == "cell")
    before = trained(services)
    assert len(before) >= 3
    options = ("--seeds", 1, "--model", chosen["model"], "--summary", tmp_path / "summary.json")
    services.flow_command("experiment", "baseline", *options)
    outcome = json.loads((tmp_path / "summary.json").read_text())
    assert outcome["computed"] == []
    assert outcome["results"]["cost"]["num_cached"] == 3
    deployment = services.deployment("experiment")
    # The server looks for schedules once a minute; asked for it, it plans at once, and the first run is not yet past.
    soon = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()
    schedule = {"schedule": {"interval": 3600, "anchor_date": soon}, "active": True, "parameters": chosen}
    place = f"{services.api}/deployments/{deployment['id']}"
    [created] = services.http.post(f"{place}/schedules", json=[schedule]).raise_for_status().json()
    services.http.post(f"{place}/schedule", json={}).raise_for_status()
    planned = services.flow_runs(tags={"all_": ["auto-scheduled"]})
    run = min(planned, key=lambda one: one["expected_start_time"])
    assert run["auto_scheduled"]
    assert services.wait(run["id"])["state_type"] == "COMPLETED"
    services.http.delete(f"{place}/schedules/{created['id']}").raise_for_status()
    assert trained(services) == before
    # Studies of labels, which other tests of these services run, are decided, too.
    told = wait_for(lambda: [one for one in services.webhook.of("decided") if one["study"] == "baseline-smoke"])[0]
    assert told["verdicts"] == {one["name"]: one["verdict"] for one in outcome["results"]["hypotheses"]}
    assert "claim" in told["text"]


def test_the_schedules_that_are_shipped_are_paused(services):
    for name, cron in (("nightly-ablation", "0 2 * * *"), ("weekly-optimizers", "0 3 * * 0")):
        [schedule] = services.deployment("experiment", name)["schedules"]
        assert schedule["schedule"]["cron"] == cron
        assert not schedule["active"]


@pytest.mark.parametrize(
    ("field", "value"), [("size", "huge"), ("experiment", "abblation"), ("seeds", 0)], ids=["choice", "name", "bound"]
)
def test_a_bad_matrix_is_refused_by_the_form_naming_the_field(services, field, value):
    answer = services.trigger(MATRIX | {field: value}, "experiment")
    assert answer.status_code == 409
    assert field in answer.text
