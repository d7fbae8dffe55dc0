"""A matrix as a user runs it: real Prefect and MLflow on files, each command in a process of its own.

The one that is ended by a signal has a Prefect server of its own, the others share one.
"""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from machine import PATIENCE_S, family, found, wait_for
from pixels.sitecustomize import FOLDER as PIXELS
from rmcore.core.processes import marked, runs, terminate
from rmcore.reporting.figures.claims import verdict_words
from tasks.home import default_tracking_uri
from tasks.mlflow_client import connect
from used_homes import begin
from warm_commands import WarmCommands

pytestmark = pytest.mark.services
DECLARED = {
    "name": "rates",
    "title": "Two learning rates",
    "question": "Does a larger learning rate order more pairs as the labels do?",
    "base": {
        "data": {"gold": {"num_prompts": 40, "pairs_per_prompt": 1}, "validation_fraction": 0.2},
        "model": {"name": "MODEL", "max_seq_len": 256},
        "train": {
            "steps": 3, "warmup_steps": 0, "pairs_per_step": 4, "eval_every": 3, "log_every": 1, "token_budget": 8192,
        },
        "evaluate": {"num_resamples": 100, "train_pairs": 10},
    },
    "factors": [
        {
            "name": "lr",
            "levels": {
                "small": {"train.lr": 1e-4},
                "large": {"train.lr": 1e-3},
                "same": {"train.lr": 1e-4},
                "diverging": {"train.lr": 1e30},  # known only when the second step is done
            },
        }
    ],
    "control": "small",
    "seeds": [0, 1],
    "metrics": ["eval/test_pairwise_accuracy", "calib/test_ece_debiased", "cost/train_seconds"],
    "hypotheses": [
        {
            "name": "H1",
            "claim": "The larger rate is at least as accurate, within half of all pairs.",
            "metric": "eval/test_pairwise_accuracy",
            "comparison": "difference",
            "arm": "large",
            "direction": "above",
            "threshold": -0.5,
        }
    ],
    "budget_minutes": 60,
}  # fmt: skip


class Place:
    """A home without any run and a declared experiment.

    Args:
        folder: an empty one.
        databases: what the home begins with, see `used_homes`.
        prefect_server: environment of commands that share a Prefect server.
        model: folder of the small model that stands for MODEL in what is declared.
    """

    def __init__(self, folder, databases, prefect_server, model):
        self.home, self.folder, self.model = begin(folder / "home", databases), folder, model
        self.file = self.declare(DECLARED)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        self.environment = inherited | {"RM_OPT_HOME": str(self.home), "OMP_NUM_THREADS": "1", "PYTHONPATH": PIXELS}
        self.environment |= {"RM_OPT_DEVICE_SLOTS": "2", "COLUMNS": "200"}
        self.environment |= {
            "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600"
        }  # many tests may share the cores
        self.beside_server = self.environment | prefect_server
        self.warm = WarmCommands()

    def declare(self, declared):
        file = self.folder / f"{declared['name']}.yaml"
        file.write_text(yaml.safe_dump(declared, sort_keys=False).replace("MODEL", str(self.model)))
        return file

    def start(self, *arguments):
        # A shell that starts the tests in the background has them ignore Ctrl-C, and whatever they start too.
        audible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        command = [sys.executable, "-c", f"{audible}; from flows.cli import main; main()", *map(str, arguments)]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def rm_opt(self, *arguments):
        done = self.warm.run(arguments, self.beside_server)
        output, errors = done.stdout, done.stderr
        assert "Traceback" not in output + errors, output + errors
        return done.returncode, output, errors

    def experiment(self, file=None):
        out = self.home / "summary.json"
        status, output, errors = self.rm_opt("experiment", file or self.file, "--summary", out)
        assert status in (0, 1), output + errors
        return status, json.loads(out.read_text()), output + errors

    def manifests(self, stage="[!.]*"):
        """Bytes of the manifest of every finished artifact: the same bytes were not made again.

        Folders with a dot hold what is not finished, its manifest perhaps written already.
        """
        return {path: path.read_bytes() for path in found(self.home, f"store/{stage}/*/MANIFEST.json")}


@pytest.fixture(scope="module")
def place(tmp_path_factory, databases, prefect_server, tiny_folder):
    place = Place(tmp_path_factory.mktemp("matrix"), databases, prefect_server, tiny_folder)
    yield place
    place.warm.close()
    terminate(marked("RM_OPT_HOME", str(place.home)))  # what a test that failed may have left


@pytest.fixture(scope="module")
def finished(place):
    """The matrix after it was ended in the middle and started again; what was seen of its end."""
    process = place.start("experiment", place.file)
    wait_for(lambda: process.poll() is not None or place.manifests("evaluate"), "no cell was finished")
    assert process.poll() is None, process.communicate()
    stages = [one for one, words in family(process.pid).items() if "rmcore.core.child_process" in words]
    process.terminate()  # the command alone: its children hear of it from the command
    output, errors = process.communicate(timeout=PATIENCE_S)
    ended, before = (process.returncode, output + errors, stages), place.manifests()
    status, outcome, said = place.experiment()
    return status, outcome, said, before, ended


def test_a_signal_ends_every_stage(finished):
    """SIGTERM, by which a run is cancelled in the UI, to the command alone; Ctrl-C: see the tests of the pipeline."""
    *_, (status, said, stages) = finished
    assert status == 130, said
    assert "Traceback" not in said
    assert said.count("interrupted") == 1
    assert stages
    # The process that forks the stages is ended last, and the command does not wait for it.
    wait_for(lambda: not any(map(runs, stages)))


def test_a_matrix_that_was_ended_repeats_no_finished_cell(place, finished):
    _status, outcome, _said, before, _ended = finished
    after = place.manifests()
    assert before
    assert {path: after.get(path) for path in before} == before
    assert len(outcome["computed"]) < 4  # of small and large, two seeds each
    assert outcome["results"]["registration"]["number"] == 1  # that of the one that was ended
    assert len(place.manifests("prepare")) == 2  # shared by all arms of a seed


def test_one_arm_that_fails_neither_stops_nor_spoils_the_others(finished):
    status, outcome, said, *_ = finished
    assert status == 1
    assert sorted(outcome["failed"]) == ["diverging seed 0", "diverging seed 1"]
    cells = {(cell["arm"], cell["seed"]): cell for cell in outcome["results"]["cells"]}
    assert "Lower the learning rate" in cells["diverging", 0]["error"]
    assert said.count("failed      diverging") == 2
    arms = {arm["name"]: arm for arm in outcome["results"]["arms"]}
    assert arms["small"]["metrics"]["eval/test_pairwise_accuracy"]["num"] == 2
    assert arms["diverging"]["metrics"]["eval/test_pairwise_accuracy"]["value"] is None
    assert arms["small"]["merged"] == ["same"]
    [hypothesis] = outcome["results"]["hypotheses"]
    assert hypothesis["num_seeds"] == 2
    assert hypothesis["value"] is not None


def test_the_plan_runs_nothing_and_says_what_would_run_and_why(place, finished):
    before = place.manifests()
    status, output, errors = place.rm_opt("experiment", place.file, "--plan")
    assert status == 0, errors
    lines = {line.split("│")[1].strip(): line for line in output.splitlines() if line.count("│") > 3}
    assert [lines[f"{arm} seeds 0, 1"].split("│")[2].strip() for arm in ("small", "large")] == ["cached"] * 2
    assert re.search(r"train: differs from \w{12} in config.train.lr \S+ -> 1e\+30", lines["diverging seeds 0, 1"])
    assert "same: the same settings as small" in output
    assert place.manifests() == before


def test_a_changed_claim_makes_a_new_registration_and_shares_the_cells(place, finished):
    first = finished[1]["results"]["registration"]
    declared = json.loads(json.dumps(DECLARED))
    declared["hypotheses"][0]["threshold"] = -0.4
    del declared["factors"][0]["levels"]["diverging"]
    place.declare(declared)
    try:
        status, outcome, _ = place.experiment()
    finally:
        place.declare(DECLARED)
    second = outcome["results"]["registration"]
    assert (status, outcome["computed"]) == (0, [])
    assert second["number"] == first["number"] + 1
    assert any("hypotheses.H1.threshold: -0.5 -> -0.4" in line for line in second["changes"])
    assert any("had been trained before this registration" in note for note in outcome["results"]["notes"])


def test_mlflow_has_one_parent_a_registration_and_one_child_a_cell(place, finished):
    client, outcome = connect(default_tracking_uri(place.home)), finished[1]["results"]
    [experiment] = client.search_experiments(filter_string="name = 'rm/rates-custom'")
    found = client.search_runs([experiment.experiment_id])
    [parent] = [run for run in found if run.data.tags.get("rm.registration") == outcome["registration"]["hash"]]
    assert parent.data.tags["rm.kind"] == "matrix"
    assert parent.data.tags["rm.verdict.H1"] == verdict_words(outcome["hypotheses"][0])
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"report", "figures", "registration"} <= files
    small = outcome["arms"][0]["metrics"]["eval/test_pairwise_accuracy"]["value"]
    assert parent.data.metrics["eval/test_pairwise_accuracy.small"] == pytest.approx(small)
    below = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    cells = {run.info.run_name: run.data.metrics for run in below if run.info.status == "FINISHED"}
    assert sorted(cells) == [f"{arm} seed {seed}" for arm in ("large", "small") for seed in (0, 1)]
    assert "eval/test_pairwise_accuracy" in cells["small seed 0"]
    assert all(name.count("/") == 1 for run in found for name in run.data.metrics)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seeds": []}, "seeds"),  # and whatever else the declaration itself refuses
        ({"budget_minutes": 0.001}, "budget_minutes"),
        ({"base": DECLARED["base"] | {"model": {"name": "tiny", "max_seq_len": 4000}}}, "max_seq_len=4000"),
    ],
)
def test_a_bad_declaration_is_refused_before_any_work(place, finished, change, named):
    before = place.manifests()
    status, _output, errors = place.rm_opt("experiment", place.declare(DECLARED | {"name": "bad"} | change))
    assert status == 2
    assert named in errors
    assert place.manifests() == before
    assert not list(place.home.glob("registrations/bad-*/*.json"))
