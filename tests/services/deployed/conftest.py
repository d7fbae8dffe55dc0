"""What all tests of this folder share: one run of the smoke pipeline, started as the UI does, and samples of a policy.

The commands run in the same home as the worker, so that what a form has computed a command finds, and the reverse.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.presets import PRESETS
from machine import PATIENCE_S, found
from rmcore.config.data import GoldConfig
from rmcore.config.evaluate import ReadinessConfig
from rmcore.config.policy import PolicyConfig
from rmcore.data.gold.world import generate_pairs
from rmcore.data.table import write_pairs

SMALL = PRESETS["smoke"].model_copy(
    update={
        "evaluate": PRESETS["smoke"].evaluate.model_copy(update={"num_resamples": 100}),
        "readiness": ReadinessConfig(planned_kl=0.4),
    }
)


@pytest.fixture(scope="package")
def config(tiny_folder):
    """Settings of the smoke pipeline."""
    return SMALL.model_copy(update={"model": SMALL.model.model_copy(update={"name": str(tiny_folder)})})


@pytest.fixture(scope="package")
def own_pairs(tmp_path_factory):
    """Pairs of prompts that the model was not trained on: samples of the others would be set aside."""
    path = tmp_path_factory.mktemp("own") / "pairs.parquet"
    write_pairs(generate_pairs(GoldConfig(num_prompts=30, pairs_per_prompt=2), seed=7).pairs, path)
    return path


@pytest.fixture(scope="package")
def with_policy(config):
    """The same with a policy, which is also that of `drawn`."""
    policy = PolicyConfig(engine="generate", sft_examples=100, num_prompts=8, samples_per_prompt=8, max_new_tokens=40)
    return config.model_copy(update={"policy": policy})


@dataclass(frozen=True)
class Finished:
    """A flow run that has ended, and the folders of its artifacts by stage."""

    run: dict
    artifacts: dict[str, Path]


@pytest.fixture(scope="package")
def smoke(services, config):
    """The finished run of the study `from-ui`; its model is registered as rm-from-ui."""
    given = config.model_copy(update={"study": "from-ui"}).model_dump(mode="json")
    run = services.wait(services.trigger({"overrides": given}).raise_for_status().json()["id"])
    assert run["state_type"] == "COMPLETED", run["state"]
    [summary] = services.home.glob("reports/from-ui-*/summary.json")
    return Finished(run, {stage["name"]: Path(stage["path"]) for stage in json.loads(summary.read_text())["stages"]})


class Command:
    """Runs `rm-opt` in the services' home, with settings given as a file."""

    def __init__(self, services, folder):
        self.services, self.folder = services, folder

    def made(self):
        """Names of all artifacts there are, with their stages before them."""
        folders = [manifest.parent for manifest in found(self.services.home, "store/[!.]*/*/MANIFEST.json")]
        return {f"{folder.parent.name}/{folder.name}" for folder in folders}

    def __call__(self, *arguments, config=None, check=True):
        words = list(map(str, arguments))
        if config is not None:
            file = self.folder / "config.yaml"
            file.write_text(config.model_dump_json())
            words += ["--config", str(file)]
        done = self.services.warm.run(words, self.services.environment, self.folder, timeout=PATIENCE_S)
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        if check:
            told = [line for line in done.stderr.splitlines() if " so far" not in line]  # how far a long stage is
            assert (done.returncode, told) == (0, []), done.stdout + done.stderr
        return done

    def outcome(self, *arguments, config=None):
        """The summary of a command and what it printed, as one line."""
        summary = self.folder / "summary.json"
        done = self(*arguments, "--summary", summary, config=config)
        return json.loads(summary.read_text()), " ".join(done.stdout.split())


@pytest.fixture
def command(services, tmp_path):
    return Command(services, tmp_path)


def stages(made):
    return sorted(name.partition("/")[0] for name in made)


@pytest.fixture(scope="package")
def drawn(services, smoke, with_policy, tmp_path_factory):
    """Flow runs of best-of-n and readiness, started from their forms with a name, and the stages each computed."""
    command, runs = Command(services, tmp_path_factory.mktemp("drawn")), {}
    for flow, study in (("best-of-n", "chosen"), ("readiness", "judged")):
        before = command.made()
        given = with_policy.model_copy(update={"study": study}).model_dump(mode="json")
        started = services.trigger({"overrides": given}, flow, name=f"My {flow}").raise_for_status().json()
        run = services.wait(started["id"])
        assert (run["state_type"], run["name"]) == ("COMPLETED", f"My {flow}"), run["state"]
        runs[flow] = run, stages(command.made() - before)
    return runs
