"""A training that was stopped and resumed is the training that was left alone."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, StoreError, TrainingError
from rmcore.training.optimizers import make_optimizer
from rmcore.training.resume import find_resume_point
from rmcore.training.state import load_state

pytestmark = pytest.mark.slow

LORA = {"lora": {"dropout": 0.3}}  # frozen weights, adapters and random numbers all matter


def test_the_table_has_every_step_once_after_going_on_from_an_older_state(start, undisturbed, tmp_path, stopped):
    folder = tmp_path / "stopped"
    stopped(folder, 3)  # its state is of step 3
    with (folder / "metrics.csv").open("a") as file:  # as if steps after the state had been done before a kill
        file.write("4,9,9,9,9,9,9,9\n5,9,9,9,")
    start(folder).run()
    assert (folder / "metrics.csv").read_text() == (undisturbed.folder / "metrics.csv").read_text()


def test_a_training_stopped_at_every_step_is_the_same_too(tmp_path, start, stopped):
    # log_every=4 does not divide the stopping steps: what was averaged before counts in the next line.
    changes = {"model": LORA, "precision": "bf16", "keep_top_k": 3, "save_every": 4, "eval_every": 1, "log_every": 4}
    undisturbed = start(tmp_path / "undisturbed", **changes).run()
    for step in range(1, 6):
        stopped(tmp_path / "stopped", step, **changes)
    resumed = start(tmp_path / "stopped", **changes).run()
    assert resumed.result.resumed_from == [1, 2, 3, 4, 5]
    resumed.assert_same(undisturbed)


def test_patience_counts_across_an_interruption(tmp_path, start, stopped):
    changes = {"lr": 1e-12, "steps": 50, "eval_every": 1, "early_stopping_patience": 4}
    stopped(tmp_path, 3, **changes)  # one best evaluation and two without improvement
    resumed = start(tmp_path, **changes)
    assert resumed.trainer.progress.selection.evaluations_since == 2
    resumed.run()
    assert resumed.result.num_steps == 5
    assert "did not improve for 4 evaluations" in resumed.result.stop_reason


class Killed(BaseException):
    """Ends a training on the spot, as SIGKILL does."""


def killed(start, folder, step, **changes):
    """Kill a training as `step` is done."""

    def stop(done):
        if done == step:
            raise Killed

    with pytest.raises(Killed):
        start(folder, stop=stop, **changes).run()


BY_LOSS = {"best_metric": "eval/loss", "steps": 10, "lr": 3e-4, "model": {"name": "tiny"}}
"""A loss that falls from evaluation to evaluation."""


def steps_in(folder):
    return {int(path.name.removeprefix("step_")) for path in folder.glob("step_*")}


def test_checkpoints_are_those_of_the_state_that_was_resumed_and_not_of_the_part_that_was_lost(
    tmp_path, start, stopped
):
    folder = tmp_path / "killed"
    changes = BY_LOSS | {"keep_top_k": 2, "save_every": 5}
    stopped(folder, 2, **changes)
    known = load_file(folder / "best" / "model.safetensors")
    killed(start, folder, 7, **changes)
    lost = load_file(folder / "best" / "model.safetensors")
    assert not all(torch.equal(lost[name], value) for name, value in known.items())
    assert steps_in(folder) == {4, 5, 6}

    stopped(folder, 3, **changes)
    assert steps_in(folder) == {2}
    best = load_file(folder / "best" / "model.safetensors")
    assert all(torch.equal(best[name], value) for name, value in known.items())
    undisturbed = start(tmp_path / "undisturbed", **changes).run()
    start(folder, **changes).run().assert_same(undisturbed)


def content_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_settings_are_refused_by_name_and_nothing_is_touched(tmp_path, start, stopped):
    stopped(tmp_path, 3)
    state = content_of(find_resume_point(tmp_path).state)
    with pytest.raises(ConfigError) as refused:
        start(tmp_path, lr=2e-3, optimizer="sgd", settings={"model.name": "other"})
    for difference in (
        "train.lr: 0.001 there, 0.002 here",
        "train.optimizer: 'adamw' there, 'sgd' here",
        "model.name: 'absent' there, 'other' here",
    ):
        assert difference in str(refused.value)
    assert "train.steps" not in str(refused.value)
    assert content_of(find_resume_point(tmp_path).state) == state


def test_other_pairs_of_the_same_number_are_refused(tmp_path, start, gold_pairs, stopped):
    stopped(tmp_path, 3)
    for changes, name in (({"pairs": gold_pairs[50:70]}, "train"), ({"held_out": gold_pairs[50:60]}, "validation")):
        with pytest.raises(ConfigError, match=rf"pairs\.{name}: '(\d+) pairs, .*' there, '\1 pairs, .*' here"):
            start(tmp_path, **changes)


def test_fields_that_do_not_change_the_weights_may_differ(tmp_path, start, undisturbed, stopped):
    stopped(tmp_path / "stopped", 3)
    more = {"num_workers": 1, "profile_memory": True, "resume_every_seconds": 0}
    resumed = start(tmp_path / "stopped", **more).run()
    resumed.assert_same(undisturbed)
    assert "cost/host_mib" in resumed.trainer.progress.rows[4]


def test_the_budget_chosen_at_the_beginning_stays(tmp_path, start, monkeypatch, stopped):
    """Another machine has other memory, and the cut of a step decides how it rounds."""
    changes = {"token_budget": None, "model": {"name": "tiny"}}
    undisturbed = start(tmp_path / "undisturbed", **changes).run()
    stopped(tmp_path / "stopped", 3, **changes)
    chosen = undisturbed.result.token_budget
    monkeypatch.setattr("rmcore.training.memory.total_bytes", lambda device: 10**8)
    assert start(tmp_path / "elsewhere", **changes).trainer.progress.token_budget < chosen
    resumed = start(tmp_path / "stopped", **changes).run()
    assert resumed.result.token_budget == chosen
    resumed.assert_same(undisturbed)


class Program:
    """What runs when someone unpickles it."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", [".metadata", "shard-00001-model-00001-of-00001.safetensors"])
def test_a_state_that_holds_a_program_is_refused_and_not_run(tmp_path, start, name, stopped):
    """`.metadata` is what torch's distributed checkpoint unpickles where it is in its own format."""
    stopped(tmp_path, 3)
    state = find_resume_point(tmp_path).state
    for file in content_of(state):
        (state / file).unlink()
    (state / name).write_bytes(pickle.dumps(Program(tmp_path / "trace")))
    model = start(tmp_path / "another").rm.model
    with pytest.raises((StoreError, TrainingError)):
        load_state(state, model, make_optimizer(model, TrainConfig()))
    assert not (tmp_path / "trace").exists()
