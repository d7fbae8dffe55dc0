"""The command that a verdict prints is short, and starts what it says: with the settings and the model of its run."""

import json
import shlex
import shutil

import pytest
from typer.testing import CliRunner

from experiments.presets import PRESETS
from flows import cli, cli_policy
from flows.cli_runs import found_runs
from flows.pipeline import run_name_of
from flows.settings import load_config
from flows.unfinished import recorded_config
from rmcore.config.data import DataConfig
from rmcore.config.evaluate import ReadinessConfig
from rmcore.config.policy import PolicyConfig
from rmcore.core.errors import ConfigError
from rmcore.evaluation.diagnosis import GateCheck
from rmcore.models.tiny import build_tiny
from rmcore.readiness.power import next_rung
from rmcore.readiness.verdict import verdict_on_labels, verdict_on_samples
from rmcore.stages.order import pipeline_stages, stage_of
from tasks.checkpoints import given_checkpoint

RUN = "mine-seed5-0123456789ab"
PASS = GateCheck("a", 0.7, 0.6, True, "a: 0.7, above 0.6")
FAIL = GateCheck("a", 0.5, 0.6, False, "a: 0.5, not above 0.6")
OPEN = GateCheck("a", 0.5, 0.6, False, "a: open", unclear=True)
DEMO = PRESETS["demo"].model_copy(update={"study": "mine", "seed": 5})
OWN = PRESETS["minilm"].model_copy(
    update={"study": "mine", "seed": 5, "data": DataConfig(source="pairs.csv", test_fraction=0.3)}
)
JUDGED = OWN.model_copy(update={"policy": PolicyConfig(name="my/policy", judge="json:dumps", temperature=0.7)})
FILED = OWN.model_copy(update={"policy": PolicyConfig(samples="judged.parquet")})
STARTED = PRESETS["rlhf"].model_copy(
    update={"study": "mine", "seed": 5, "data": OWN.data, "rlhf": None}
)  # as `rm-opt rlhf --mode rm` records it
BY_RL = ReadinessConfig(planned_optimizer="kl_optimum", planned_kl=1.0)


def on_samples(check):
    return verdict_on_samples([check], plan="a KL of 3 nats", judge="a judge", parts={}, num_telling=60)


LABELS = verdict_on_labels([PASS], None, {"value": 0.2, "num": 60})
CASES = {
    "gold pairs": (DEMO.model_copy(update={"policy": None}), LABELS, "readiness"),
    "own pairs": (OWN, LABELS, "best_of_n"),
    "unclear": (DEMO, on_samples(OPEN), "readiness"),
    "unclear, a file": (FILED, on_samples(OPEN), "readiness"),
    "not ready": (JUDGED, on_samples(FAIL), "readiness"),
    "ready": (DEMO, on_samples(PASS), "confirm"),
    "ready, a judge": (JUDGED, on_samples(PASS), "confirm"),
    "ready, people": (FILED, on_samples(PASS), "confirm"),
    "ready for RL": (JUDGED.model_copy(update={"readiness": BY_RL}), on_samples(PASS), "rlhf"),
    "ready for RL, no policy": (DEMO.model_copy(update={"readiness": BY_RL}), on_samples(PASS), "rlhf"),
}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A home in which a run with this config ended, and what commands would start there."""
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    checkpoint = tmp_path / "store" / "train" / "x" / "best"
    checkpoint.mkdir(parents=True)

    def record(config):
        folder = tmp_path / "reports" / RUN
        folder.mkdir(parents=True, exist_ok=True)
        stages = [{"name": "train", "path": str(checkpoint.parent)}]
        (folder / "summary.json").write_text(
            json.dumps({"config": config.model_dump(mode="json"), "stages": stages, "verdict": LABELS})
        )
        return checkpoint

    return record


@pytest.fixture
def started(monkeypatch):
    """Flow, checkpoint and config of what was started."""
    found = []

    class StartedError(Exception):
        pass

    def start(flow, preset, given, assignments=(), recorded=None, *, checkpoint, **_):
        name = flow.partition(":")[2]
        found.append(
            (name, checkpoint, load_config(preset, given.config, [*assignments, *(given.set_ or [])], recorded))
        )
        raise StartedError

    monkeypatch.setattr(cli_policy, "run_configured", start)

    def typed(*words):
        outcome = CliRunner().invoke(cli.app, list(words), prog_name="rm-opt")
        if not isinstance(outcome.exception, StartedError):
            raise outcome.exception or AssertionError(outcome.output)
        return found[-1]

    return typed


@pytest.mark.parametrize("case", CASES)
def test_a_printed_step_is_one_short_command_that_starts_it(case, recorded, started):
    config, verdict, flow = CASES[case]
    checkpoint = recorded(config)
    more = next_rung(verdict, config, [RUN])
    words = shlex.split(more["command"])
    assert words[0] == "rm-opt"
    assert RUN in words
    assert len(words) <= 9
    name, model, chosen = started(*words[1:])
    assert (name, model) == (flow, str(checkpoint))
    assert (chosen.seed, chosen.study, chosen.data) == (config.seed, config.study, config.data)
    if "YOUR_POLICY" in words:
        assert (chosen.policy.name, chosen.policy.samples) == ("YOUR_POLICY", None)
    elif config.policy is not None:
        for setting in ("name", "judge", "temperature", "judging"):
            assert getattr(chosen.policy, setting) == getattr(config.policy, setting)
    if flow == "confirm" and config.data.source != "gold":
        assert (chosen.policy.people is None) == (config.policy.judge is not None)
    assert (chosen.rlhf is not None) == (flow == "rlhf")
    if flow == "rlhf":
        assert chosen.rlhf.kl_target <= chosen.readiness.planned_kl


def test_a_run_is_found_by_how_its_name_begins_and_is_not_named_twice(recorded, started):
    recorded(JUDGED)
    assert started("readiness", "confirm", "mine-seed5-01")[2].policy.name == "my/policy"
    for words in (["--checkpoint", "out/best"], ["--data", "other.csv"], ["--preset", "demo"]):
        with pytest.raises(ConfigError, match=f"leave out {words[0]}"):
            started("readiness", "confirm", RUN, *words)


def test_a_model_that_is_gone_is_said_with_the_command_that_trains_it_again(recorded, started):
    recorded(JUDGED).rmdir()
    with pytest.raises(ConfigError, match="rm-opt run --from"):
        started("readiness", "policy", RUN)


def test_samples_replace_the_policy_that_a_trained_reward_model_started_from(recorded, started):
    checkpoint = recorded(STARTED)
    cost = next_rung(LABELS, STARTED, [RUN])["cost"]
    words = shlex.split(cost.partition("; then ")[2])
    name, model, chosen = started(*words[1:])
    assert (name, model) == ("readiness", str(checkpoint))
    assert started("readiness", "policy", RUN, "--set", "policy.samples=JUDGED_FILE") == (name, model, chosen)
    assert (chosen.policy.samples, chosen.data, chosen.train) == ("JUDGED_FILE", OWN.data, STARTED.train)
    assert stage_of("evaluate", chosen).settings == stage_of("evaluate", STARTED).settings  # it is found in the store


def test_a_run_whose_reward_model_alone_needed_the_policy_is_trained_again_on_labelled_pairs(recorded):
    recorded(STARTED)
    again = load_config(None, None, ["data.source=more.csv"], recorded_config(RUN, found_runs()))
    assert pipeline_stages(again) == ("prepare", "policy", "train", "evaluate", "readiness")
    judged = again.model_copy(update={"policy": again.policy.model_copy(update={"judge": "json:dumps"})})
    for more in (judged, again.model_copy(update={"rlhf": PRESETS["rlhf"].rlhf}), DEMO):
        assert "samples" in pipeline_stages(more)


def test_a_checkpoint_that_has_changed_since_it_was_judged_is_refused(recorded, started, tmp_path):
    recorded(OWN)
    place = build_tiny(tmp_path / "mine" / "best")
    file = tmp_path / "reports" / RUN / "summary.json"
    own = {"config": OWN.model_dump(mode="json"), "verdict": LABELS, "checkpoint": str(place)}
    own["checkpoint_digest"] = given_checkpoint(str(place), tmp_path / "given").digest
    words = ("readiness", "policy", RUN, "--samples", "judged.csv")
    file.write_text(json.dumps(own))
    assert started(*words)[1] == str(place)
    (place / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="another reward model"):
        started(*words)
    shutil.rmtree(place)
    with pytest.raises(ConfigError, match="is gone") as gone:
        started(*words)
    assert "rm-opt run --from" not in str(gone.value)  # which refuses a run of this kind


def test_the_step_of_a_checkpoint_without_a_run_starts_it_too(started):
    model = ["--checkpoint", "out/a b/best", "--data", "my pairs.csv"]
    words = shlex.split(next_rung(LABELS, OWN, model)["command"])
    name, checkpoint, chosen = started(*words[1:])
    assert (name, checkpoint, chosen.data.source) == ("best_of_n", "out/a b/best", "my pairs.csv")
    assert chosen.policy.name == "YOUR_POLICY"


def test_a_look_at_pairs_ends_with_the_command_that_trains_on_them_as_they_were_read(tmp_path, capsys):
    file = tmp_path / "my pairs.csv"
    file.write_text("question,chosen,rejected\n" + "".join(f"q{n},good {n},bad {n}\n" for n in range(4)))
    cli.app(["data", "check", str(file), "--prompt-column", "question", "--limit", "2"], standalone_mode=False)
    name, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert (name, words[:3], words[4::2]) == ("next", ["rm-opt", "run", "--data"], ["--set"] * 2)
    config = load_config("minilm", None, [f"data.source={words[3]}", *words[5::2]])
    assert config.data == DataConfig(source=str(file), prompt_column="question", limit=2)


def test_runs_on_other_samples_of_one_study_have_other_names_which_commands_take():
    names = {
        run_name_of(OWN.model_copy(update={"policy": PolicyConfig(samples=file)}), kind)
        for file in ("judged.parquet", "a/judged.parquet", "b/judged.parquet", "/else where/more judged.csv", "x" * 250)
        for kind in ("readiness", "")
    }
    assert len(names) == 10
    assert all(len(name) < 80 and shlex.quote(name) == name for name in names)
    assert run_name_of(OWN, "readiness") == "mine-seed5-readiness"
