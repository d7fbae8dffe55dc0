"""The whole pipeline as a user runs it: real Prefect and MLflow on files, each run in a process of its own.

Works in a copy of the packages, so that a test can change a stage's code. A run is a program started anew, with a
Prefect server of its own, or where neither matters one forked from what has imported all, beside a server of the tests.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from experiments.presets import PRESETS
from machine import PATIENCE_S, family, found, num_lines, wait_for
from nano_model import make_nano
from pixels.sitecustomize import FOLDER as PIXELS
from rmcore.core.processes import marked, terminate
from rmcore.stages.order import pipeline_stages
from tasks.home import default_tracking_uri
from tasks.mlflow_client import connect
from used_homes import begin
from warm_commands import WarmCommands

pytestmark = pytest.mark.services
ROOT = Path(__file__).resolve().parents[2]
STAGES = [*pipeline_stages(PRESETS["smoke"])]
PATIENT = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600"}
"""Many tests may share the cores."""
SMOKE = ["--preset", "smoke", "--set", "evaluate.num_resamples=100"]
"""All stages."""


class Workplace:
    """A copy of the code and a home without any run.

    Args:
        folder: an empty one.
        databases: what the home begins with, see `used_homes`.
        prefect_server: environment of commands that share a Prefect server.
    """

    def __init__(self, folder: Path, databases: Path, prefect_server: dict[str, str]):
        self.code, self.home = folder / "code", begin(folder / "home", databases)
        for package in ("rmcore", "tasks", "flows", "experiments"):
            shutil.copytree(ROOT / package, self.code / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.code)
        make_nano(self.code)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        self.environment = inherited | {"PYTHONPATH": f"{self.code}:{PIXELS}", "RM_OPT_HOME": str(self.home)} | PATIENT
        self.server = prefect_server
        self.beside_server = self.environment | prefect_server
        self.warm = WarmCommands()

    def rm_opt(self, *arguments, check=True, anew=False, **environment):
        if anew:
            command = [sys.executable, "-c", "from flows.cli import main; main()", *map(str, arguments)]
            environment = self.environment | environment
            done = subprocess.run(
                command, cwd=self.code, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
            )
        else:
            done = self.warm.run(arguments, self.beside_server | environment, self.code)
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def manifests(self):
        return {path: path.read_bytes() for path in found(self.home, "store/[!.]*/*/MANIFEST.json")}

    def run(self, *changes, anew=False, **environment):
        """Run the smoke pipeline; which stages wrote a manifest, the summary and the finished process."""
        before, out = self.manifests(), self.home / "summary.json"
        done = self.rm_opt("run", *SMOKE, *changes, "--summary", out, anew=anew, **environment)
        written = {path.parent.parent.name for path, text in self.manifests().items() if before.get(path) != text}
        return [name for name in STAGES if name in written], json.loads(out.read_text()), done


@pytest.fixture(scope="module")
def place(tmp_path_factory, databases, prefect_server):
    place = Workplace(tmp_path_factory.mktemp("pipeline"), databases, prefect_server)
    try:
        executed, summary, done = place.run()
        assert executed == summary["executed"] == STAGES
        assert [line for line in done.stderr.splitlines() if " so far" not in line] == []  # but how far a long stage is
        yield place
    finally:
        place.warm.close()
        terminate(marked("RM_OPT_HOME", str(place.home)))  # what a test that failed may have left


@pytest.fixture(scope="module")
def finished(place):
    executed, summary, done = place.run()
    assert executed == summary["executed"] == []
    assert "nothing: every stage was cached" in done.stdout
    return summary


def artifact(summary, name):
    return Path(next(stage["path"] for stage in summary["results"]["stages"] if stage["name"] == name))


def test_results_lie_where_the_command_said(finished):
    assert Path(finished["report"]).read_text().startswith("<!doctype html>")
    assert (Path(finished["checkpoint"]) / "model.safetensors").is_file()
    verdict = finished["results"]["verdict"]
    assert verdict["rung"] == 1  # there is no policy
    assert verdict["status"] in ("passes", "fails", "unclear")
    more = finished["results"]["next_rung"]
    if verdict["status"] == "passes":
        assert (more["rung"], finished["checkpoint"] in more["command"]) == (3, True)
    else:  # six steps teach little: the run is mended first, by its name
        assert (more["rung"], more["command"][:30]) == (1, "rm-opt run --from smoke-seed0-")


def test_mlflow_holds_both_runs_complete_and_one_model_version(place, finished):
    client = connect(default_tracking_uri(place.home))
    [experiment] = client.search_experiments(filter_string="name = 'rm/smoke'")
    second, first = client.search_runs([experiment.experiment_id])
    assert len(client.search_model_versions("name = 'rm-smoke'")) == 1
    assert client.get_model_version_by_alias("rm-smoke", "candidate").version == 1
    losses = [client.get_metric_history(run.info.run_id, "train/loss") for run in (first, second)]
    assert [point.step for point in losses[0]] == [2, 4, 6]
    # The cached run is as complete as the computed one.
    assert len({tuple((point.step, point.value) for point in loss) for loss in losses}) == 1
    cards = finished["results"]["metrics"]
    for run, cache in ((first, "none"), (second, ",".join(STAGES))):
        tags, metrics, params = run.data.tags, run.data.metrics, run.data.params
        files = {file.path for file in client.list_artifacts(run.info.run_id)}
        assert run.info.status == "FINISHED"
        assert run.info.run_name.startswith("num_resamples=100 · ")  # by what it changes of its preset
        assert (tags["rm.kind"], tags["rm.cache"]) == ("pipeline", cache)
        assert "**Evidence level 1 of 4**: labelled pairs" in tags["mlflow.note.content"]
        assert {"numbers.json", "settings.yaml", "report"} <= files
        own = [name for name in metrics if not name.startswith("system/")]
        assert (len(own) <= 20, len(params) <= 30, params["train.steps"]) == (True, True, "6")
        assert not [name for name in own if "_ci_" in name or name.count("/") != 1]
        assert tags["interval/test_pairwise_accuracy"]
        assert metrics["eval/test_pairwise_accuracy"] == pytest.approx(cards["pairwise_accuracy"]["value"])


def test_a_damaged_and_a_deleted_artifact_are_made_again_and_nothing_else(place, finished):
    """The training gives the same weights once more, so what follows it stays valid."""
    rewards = artifact(finished, "evaluate") / "rewards.parquet"
    cut = rewards.read_bytes()[:-1]
    rewards.write_bytes(cut)
    shutil.rmtree(artifact(finished, "readiness"))
    shutil.rmtree(artifact(finished, "train"))
    executed, _, done = place.run()
    assert executed == ["train", "evaluate", "readiness"]
    assert f"{rewards} has {len(cut)} bytes" in done.stdout


def test_a_change_in_a_stages_code_runs_it_again_and_neither_a_comment_nor_how_it_is_run_does(place, finished):
    module = place.code / "rmcore" / "readiness" / "original_score.py"
    text = module.read_text()
    try:
        module.write_text(text + "\n# a comment\n")
        assert place.run("--set", "train.resume_every_seconds=7", "--set", "train.log_every=1")[0] == []
        module.write_text(text + "\nUNUSED = 1\n")
        assert place.run()[0] == ["readiness"]
    finally:
        module.write_text(text)


def test_a_refusal_inside_a_stage_reaches_the_user_as_it_was_said(place):
    arguments = ["run", *SMOKE, "--set", "model.max_seq_len=4000"]
    done = place.rm_opt(*arguments, check=False)
    assert done.returncode == 2
    assert "max_seq_len=4000, but tiny has positions for 1024 tokens" in done.stderr
    assert not list(place.home.glob("store/.wip/*"))  # nothing was begun


LONG = {
    "train.steps": 600, "train.log_every": 1, "train.save_every": 200, "train.eval_every": 200,
    "train.pairs_per_step": 2, "train.early_stopping_patience": 99, "data.gold.num_prompts": 80,
}  # fmt: skip
ARGUMENTS = [word for name, value in LONG.items() for word in ("--set", f"{name}={value}")]


class Training:
    """A pipeline run that is in the middle of a training, in a process group of its own as a terminal makes it."""

    def __init__(self, place, *, saves_s):
        # A shell that starts the tests in the background has them ignore Ctrl-C, and whatever they start too.
        audible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        program = f"{audible}; from flows.cli import main; main()"
        changes = [*ARGUMENTS, "--set", f"train.resume_every_seconds={saves_s}"]
        self.place, self.before = place, self.progress(place)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "run", *SMOKE, *changes],
            cwd=place.code, env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    @staticmethod
    def progress(place):
        """Steps that were logged, and states that were saved: names of unfinished trainings only."""
        lines = num_lines(found(place.home, "store/.wip/train-*/metrics.jsonl"))
        states = found(place.home, "store/.wip/train-*/resume/step_*")
        return lines, {path.name for path in states}

    def wait_for(self, made):
        """Until `made(before, now)` says that it has got far enough."""
        wait_for(lambda: self.process.poll() is not None or made(self.before, self.progress(self.place)))
        assert self.process.poll() is None, self.process.communicate()

    def end(self, number):
        """Send the signal to all its processes; what the run has said by the time it has ended.

        Prefect's embedded server meanwhile takes connections and answers none, as one that is ending on a busy machine.
        """
        [server] = [one for one, words in family(self.process.pid).items() if "tasks.guarded_server" in words]
        server.suspend()
        try:
            os.killpg(self.process.pid, number)
            self.process.wait(timeout=PATIENCE_S)
        finally:
            if server.is_running():
                server.resume()
        output, errors = self.process.communicate(timeout=PATIENCE_S)  # the server holds the other end of the pipe, too
        return output + errors


def logged(before, now):
    return now[0] > before[0]


def saved(before, now):
    return bool(now[1] - before[1])


def history(artifact):
    rows = [json.loads(line) for line in (artifact / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["metrics"].get("train/loss")) for row in rows]


def test_a_run_that_is_ended_again_and_again_goes_on_where_it_was(place, finished):
    """Ctrl-C in a terminal, everything killed; the same command each time. A polite end: see the tests of matrices."""
    training = Training(place, saves_s=9999)
    training.wait_for(logged)
    said = training.end(signal.SIGINT)
    assert training.process.returncode == 130, said
    assert "Traceback" not in said
    assert "interrupted" in said
    assert saved(training.before, training.progress(place))  # when it was asked to end, or never
    training = Training(place, saves_s=0.2)
    training.wait_for(saved)
    os.killpg(training.process.pid, signal.SIGSTOP)
    [unfinished] = place.home.glob("store/.wip/train-*")
    unfinished.with_name("train-nobodys").mkdir()
    place.rm_opt("store", "gc", "--keep", 9)
    assert list(place.home.glob("store/.wip/*")) == [unfinished]  # someone works on it
    training.end(signal.SIGKILL)
    executed, summary, done = place.run(*ARGUMENTS)
    assert executed == STAGES[1:]
    trained = artifact(summary, "train")
    record = json.loads((trained / "training.json").read_text())
    assert record["num_steps"] == LONG["train.steps"]
    resumed = record["resumed_from"]
    assert len(resumed) == 2
    assert 0 < resumed[0] < resumed[1]
    assert f"train resumes from step {resumed[-1]}" in done.stderr
    assert [step for step, loss in history(trained) if loss is not None] == list(
        range(1, LONG["train.steps"] + 1)
    )  # each once
    assert not unfinished.exists()
    assert not (trained / "resume").exists()
    assert "RUNNING" not in selected(place, "mlflow/mlflow.db", "SELECT status FROM runs")


def selected(place, database, query):
    with closing(sqlite3.connect(place.home / database)) as connection:
        return {value for (value,) in connection.execute(query)}


def test_services_that_do_not_answer_do_not_stop_a_run_and_how_often_is_resampled_changes_what_resamples(
    place, finished
):
    """After the runs that were killed: the next one with Prefect's database of this home ends them in it."""
    dead = "http://127.0.0.1:9"
    executed, summary, done = place.run(
        "--set", "evaluate.num_resamples=170",
        anew=True, MLFLOW_TRACKING_URI=dead, PREFECT_API_URL=f"{dead}/api",
    )  # fmt: skip
    assert executed == ["evaluate", "readiness"]
    query = "SELECT state_type FROM flow_run UNION SELECT state_type FROM task_run"
    assert "RUNNING" not in selected(place, "prefect/prefect.db", query)
    why = place.rm_opt("store", "why", summary["results"]["stages"][-1]["key"][:12]).stdout
    assert "config.num_resamples: 100 -> 170" in why
    assert "rm-opt store sync" in done.stderr
    assert "the embedded API is used" in done.stderr
    refused = place.rm_opt("store", "sync", check=False)
    assert refused.returncode == 2
    assert "still fails" in refused.stderr


def test_the_store_is_listed_and_bounded(place, finished):
    assert place.rm_opt("store", "ls").stdout.count("readiness") >= 2
    place.rm_opt("store", "gc", "--keep", 1)
    kept = [path.parent.parent.name for path in place.manifests()]
    assert len(kept) == len({*kept})
    assert {*kept} == {*STAGES}
