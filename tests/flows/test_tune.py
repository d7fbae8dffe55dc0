"""`rm-opt tune` as a user runs it: killed in the middle and resumed, its recipe run, its mistakes told."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.settings import load_config
from machine import wait_for
from rmcore.core.processes import marked, terminate
from rmcore.data.table import write_pairs
from used_homes import begin
from warm_commands import WarmCommands

pytestmark = pytest.mark.services
BASE = {
    "study": "small",
    "data": {"gold": {"num_prompts": 40, "pairs_per_prompt": 2}, "validation_fraction": 0.3, "test_fraction": 0.3},
    "model": {"max_seq_len": 96},
    "train": {
        "steps": 9, "warmup_steps": 0, "pairs_per_step": 2, "log_every": 3, "token_budget": 2048, "lr": 1e-3,
        "callbacks": [],
    },
    "evaluate": {"num_resamples": 100, "train_pairs": 4},
}  # fmt: skip
SPACE = {"train.lr": {"low": 1e-4, "high": 1e30, "log": True}, "train.schedule": ["cosine", "constant"]}
"""Most of it diverges: trials fail."""
TRIALS, SEEDS = 4, 2


class Place:
    """A home without any run, with a config and a space."""

    def __init__(self, folder, databases, prefect_server, model):
        self.home, self.folder = begin(folder / "home", databases), folder
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        self.environment = inherited | {
            "RM_OPT_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "RM_OPT_PRICE_PER_HOUR": "2",
        }
        self.environment |= {"RM_OPT_DEVICE_SLOTS": "1", **prefect_server}
        self.config = self.write("base", BASE | {"model": BASE["model"] | {"name": str(model)}})
        self.space = self.write("space", SPACE)
        self.warm = WarmCommands()

    def write(self, name, tree):
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree, sort_keys=False))
        return file

    def words(self, *more):
        return ["tune", "--config", self.config, "--space", self.space, "--seeds", SEEDS, "--name", "a", *more]

    def tune(self, *more, slots=1):
        out = self.home / "outcome.json"
        out.unlink(missing_ok=True)
        done = self.warm.run(
            [*self.words(*more), "--summary", out], self.environment | {"RM_OPT_DEVICE_SLOTS": str(slots)}
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        outcome = json.loads(out.read_text()) if out.is_file() and out.stat().st_size else None
        return done.returncode, outcome, done.stdout + done.stderr

    def finished(self, stage="train"):
        return set(self.home.glob(f"store/{stage}/*/MANIFEST.json"))

    def close(self):
        self.warm.close()
        terminate(marked("RM_OPT_HOME", str(self.home)))


@pytest.fixture(scope="module")
def place(tmp_path_factory, databases, prefect_server, tiny_folder):
    place = Place(tmp_path_factory.mktemp("tune"), databases, prefect_server, tiny_folder)
    yield place
    place.close()


@pytest.fixture(scope="module")
def killed(place):
    """The trainings that were stored when the search was killed."""
    command = [sys.executable, "-c", "from flows.cli import main; main()", *map(str, place.words("--trials", TRIALS))]
    process = subprocess.Popen(
        command, env=place.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    wait_for(lambda: process.poll() is not None or place.finished(), "no trial was finished", 280)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return {path: path.read_bytes() for path in place.finished()}


@pytest.fixture(scope="module")
def outcome(place, killed):
    """The search after the same command went on with it."""
    status, outcome, output = place.tune("--trials", TRIALS)
    assert status == 0, output
    assert {path: path.read_bytes() for path in killed} == killed  # not made again
    return outcome


def comparable(outcome):
    """What must not differ: all but times and paths."""
    results = outcome["results"]
    trials = [{name: one[name] for name in ("number", "state", "settings", "value")} for one in results["trials"]]
    return trials, results["winner_trial"], results["test"], results["difference"], results["headline"]


def test_a_search_that_was_killed_ends_as_one_that_was_not_and_computes_nothing_twice(
    place, outcome, tmp_path, databases, prefect_server, tiny_folder
):
    other = Place(tmp_path, databases, prefect_server, tiny_folder)
    shutil.copytree(place.home / "store", other.home / "store")
    other.config, other.space = place.config, place.space
    try:
        status, whole, output = other.tune("--trials", TRIALS)
    finally:
        other.close()
    assert status == 0, output
    assert whole["computed"] == []  # every trial was one of the killed search, to the last bit of its settings
    assert comparable(whole) == comparable(outcome)


def test_the_defaults_are_the_first_trial_and_failed_ones_do_not_stop_the_search(outcome):
    trials = outcome["results"]["trials"]
    assert [one["number"] for one in trials] == list(range(TRIALS))
    assert trials[0]["state"] == "complete"
    assert trials[0]["settings"] == {"train.lr": 1e-3, "train.schedule": "cosine"}
    assert 0 <= trials[0]["value"] <= 1
    assert outcome["failed"]
    assert all("finite" in one["why"] for one in trials if one["state"] == "failed")


def test_what_is_said_rests_on_fresh_seeds_and_pairs_that_no_trial_saw(place, outcome):
    results = outcome["results"]
    assert results["seeds"] == [1, 2]
    assert results["price_per_hour"] == 2
    assert min(results["search_seconds"], results["confirmation_seconds"]) > 0
    if not results["is_better"]:
        assert "keep the defaults" in results["headline"]
    tested, seen = set(), set()
    for folder in place.home.glob("store/prepare/*"):
        prompts = {name: prompts_of(folder / f"{name}.parquet") for name in ("train", "validation", "test")}
        tested |= prompts["test"]
        seen |= prompts["train"] | prompts["validation"]
    assert tested
    assert not tested & seen


def prompts_of(file):
    import pandas as pd

    return set(pd.read_parquet(file)["prompt_id"])


def test_page_record_and_recipe_are_left(place, outcome):
    report = Path(outcome["report"])
    assert outcome["results"]["headline"] in report.read_text()
    assert json.loads((report.parent / "summary.json").read_text())["name"] == "a"
    recipe = load_config(None, report.parent / "recipe.yaml", [])
    low = outcome["results"]["difference"]["ci_low"]
    is_better = low is not None and low > 0
    assert is_better == outcome["results"]["headline"].startswith("Better")
    number = outcome["results"]["winner_trial"] if is_better else 0
    chosen = outcome["results"]["trials"][number]["settings"]
    assert recipe.train.lr == chosen["train.lr"]
    assert recipe.seed == outcome["results"]["seeds"][0]
    assert recipe.policy is None
    done = place.warm.run(["run", "--plan", "--config", report.parent / "recipe.yaml"], place.environment)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()}
    for stage in ("prepare", "train", "evaluate"):  # the recipe's training is one of those that confirmed it
        assert "cached" in next(line for line in done.stdout.splitlines() if stage in line), planned


def test_an_objective_that_there_is_none_of_is_refused(place):
    status, _, output = place.tune("--objective", "speed")
    assert status == 2, output
    assert "'speed' is not one of" in output


def test_more_trials_continue_a_search_and_say_that_the_test_pairs_were_looked_at(place, outcome):
    status, more, output = place.tune("--trials", TRIALS + 1)
    assert status == 0, output
    first, second = outcome["results"], more["results"]
    assert second["trials"][:TRIALS] == first["trials"]
    assert f"trial {TRIALS - 1}" not in more["computed"]
    assert second["confirmed"] == sorted({first["winner_trial"], second["winner_trial"]})
    assert bool(second["notes"]) == (len(second["confirmed"]) > 1)


def test_pairs_of_ones_own_keep_their_test_from_every_seed(place, outcome, gold_pairs, tmp_path):
    write_pairs(gold_pairs[:120], tmp_path / "pairs.parquet")
    words = ["--trials", 2, "--name", "own", "--data", tmp_path / "pairs.parquet"]
    status, found, output = place.tune(*words, slots=2)  # two trials at once
    assert status == 0, output
    assert [one["number"] for one in found["results"]["trials"]] == [0, 1]
    recipe = yaml.safe_load(Path(found["recipe"]).read_text())
    assert recipe["data"]["source"] == str(tmp_path / "pairs.parquet")
    assert recipe["data"]["test_seed"] == 0
