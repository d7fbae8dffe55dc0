"""Which evaluations count, which checkpoint folders are left, and that each is whole whatever happens meanwhile."""

import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from machine import largest_file
from rmcore.config.train import TrainConfig
from rmcore.core.errors import StoreError
from rmcore.training.ranks import ALONE
from rmcore.training.record import Selection
from rmcore.training.saving import CheckpointWriter, copy_checkpoint, repair_interrupted, save_checkpoint

# Few different values, so that ties occur.
VALUES = st.lists(
    st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.just(math.nan), st.just(math.inf)), max_size=12
)
HIGHER_IS_BETTER = {"eval/pairwise_accuracy": True, "eval/loss": False, "eval/ece": False}
SELECTIONS = st.tuples(st.sampled_from(sorted(HIGHER_IS_BETTER)), st.integers(1, 4))


def ranking(noted, higher):
    """Defined evaluations, best first, of equals the earlier."""
    defined = [(value, step) for step, value in noted if math.isfinite(value)]
    return sorted(defined, key=lambda entry: (-entry[0] if higher else entry[0], entry[1]))


def without_improvement(noted, higher):
    """Evaluations since the last one that was better than all before."""
    reference, since = None, 0
    for _, value in noted:
        better = math.isfinite(value) and (reference is None or (value > reference if higher else value < reference))
        reference, since = (value, 0) if better else (reference, since + 1)
    return since


@given(VALUES, SELECTIONS)
def test_selection_agrees_with_looking_at_everything_again(sequence, setting):
    metric, keep = setting
    selection, noted, there = Selection(metric, keep), [], set()
    for number, value in enumerate(sequence):
        step = 10 * (number + 1)
        noted.append((step, value))
        kept, dropped = selection.note(value, step)
        expected = ranking(noted, HIGHER_IS_BETTER[metric])
        assert selection.kept == expected[:keep]
        assert selection.best == (expected[0] if expected else None)
        assert selection.evaluations_since == without_improvement(noted, HIGHER_IS_BETTER[metric])
        # Who does as told has exactly the kept ones.
        there = (there | ({step} if kept else set())) - set(dropped)
        assert there == {one for _, one in selection.kept}
        assert kept == (step in there)


def mark(rm, value):
    """Give the head a value by which its checkpoint is recognised."""
    with torch.no_grad():
        rm.model.score.weight.fill_(value)


def marked(folder):
    return load_file(folder / "model.safetensors")["score.weight"].flatten()[0].item()


def steps_in(folder):
    return {int(path.name[5:]) for path in folder.glob("step_*")}


@pytest.mark.parametrize("top", [1, 3])
def test_what_is_kept(tmp_path, rm, top):
    config = TrainConfig(keep_top_k=top, save_every=4)
    writer = CheckpointWriter(rm, config, tmp_path, Selection.of(config), ALONE)
    values = [0.5, 0.7, 0.6, 0.2, 0.9, 0.8, 0.9, 0.1, 0.3]
    for step, value in enumerate(values, start=1):
        mark(rm, step)
        is_best = writer.evaluated(step, value)
        if writer.is_periodic(step):
            writer.save_step(step)
        assert is_best == (value > max(values[: step - 1], default=0.0))
        assert marked(tmp_path / "best") == writer.selection.best[1]
    writer.finished(len(values))
    top_steps = {5, 7, 6} if top == 3 else set()
    assert steps_in(tmp_path) == top_steps | {4, 8} | {9}
    assert all(marked(tmp_path / f"step_{step}") == step for step in steps_in(tmp_path))
    assert marked(tmp_path / "best") == 5
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_copy_takes_no_room_and_outlives_what_it_was_copied_from(tmp_path, rm):
    save_checkpoint(rm, tmp_path / "step_1")
    copy_checkpoint(tmp_path / "step_1", tmp_path / "best")
    assert os.path.samefile(*(tmp_path / name / "model.safetensors" for name in ("step_1", "best")))
    mark(rm, 7)
    kept = marked(tmp_path / "best")
    save_checkpoint(rm, tmp_path / "step_1")  # the same step again, after a resume
    assert (marked(tmp_path / "step_1"), marked(tmp_path / "best")) == (7, kept)
    shutil.rmtree(tmp_path / "step_1")
    assert marked(tmp_path / "best") == kept


def test_a_kill_between_the_two_renames_is_mended_and_what_is_not_ours_stays(tmp_path, rm):
    others = {".cache.tmp", ".work.old"}
    for name in (*others, ".step_7.old"):
        (tmp_path / name).mkdir()
    save_checkpoint(rm, tmp_path / "best")
    before = marked(tmp_path / "best")
    (tmp_path / "best").rename(tmp_path / ".best.old")
    (tmp_path / ".best.tmp").mkdir()
    repair_interrupted(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"best", "step_7", *others}
    assert marked(tmp_path / "best") == before


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path, rm):
    """The weights do not fit: they take half a MiB."""
    mark(rm, 1)
    save_checkpoint(rm, tmp_path / "best")
    mark(rm, 2)
    with largest_file(2**17), pytest.raises(StoreError, match=r"could not be written.*the one before it is untouched"):
        save_checkpoint(rm, tmp_path / "best")
    assert marked(tmp_path / "best") == 1
    assert [path.name for path in Path(tmp_path).iterdir()] == ["best"]
