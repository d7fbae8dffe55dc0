import json

import pytest
from safetensors import SafetensorError

from rmcore.core.errors import ConfigError, StoreError
from rmcore.core.tracking import METRICS_FILE
from rmcore.training.resume import begin, find_resume_point, new_state, read_beginning, rewind, tensor_digests

SETTINGS = {"train.lr": 0.1, "seed": 0}


PARTS = ("one.safetensors", "two.safetensors")


def publish(folder, step, num_rows=0):
    with new_state(folder, step, {"num_rows": num_rows}) as (place, digests):
        for name in PARTS:
            (place / name).write_bytes(b"tensors of %d" % step)
        digests.update(tensor_digests(place))


def test_the_newest_two_states_are_kept_and_the_newest_is_found(tmp_path):
    assert find_resume_point(tmp_path) is None
    for step in (2, 4, 10):
        publish(tmp_path, step)
    point = find_resume_point(tmp_path)
    assert (point.step, point.notes) == (10, ())
    assert [(point.state / name).read_bytes() for name in PARTS] == [b"tensors of 10"] * 2
    assert point.state.stat().st_mode & 0o077 == 0
    assert {path.name for path in (tmp_path / "resume").iterdir()} == {"step_4", "step_10"}


@pytest.mark.parametrize("harm", ["truncated", "changed", "no record", "half a record", "no tensors", "another file"])
def test_a_damaged_state_is_passed_over_with_a_note(tmp_path, harm):
    publish(tmp_path, 4)
    publish(tmp_path, 6)
    state, record = (tmp_path / "resume" / "step_6" / name for name in (PARTS[1], "record.json"))
    if harm == "truncated":
        state.write_bytes(state.read_bytes()[:-3])
    elif harm == "changed":
        state.write_bytes(b"T" + state.read_bytes()[1:])
    elif harm == "no record":
        record.unlink()
    elif harm == "half a record":
        record.write_text(record.read_text()[:20])
    elif harm == "another file":
        (state.parent / "three.safetensors").touch()
    else:
        state.unlink()
    point = find_resume_point(tmp_path)
    assert point.step == 4
    [note] = point.notes
    assert "step_6" in note
    assert "skipped" in note


def test_a_state_that_was_being_written_when_the_process_died_is_not_one(tmp_path):
    publish(tmp_path, 4)
    half = tmp_path / "resume" / ".step_6.tmp"
    half.mkdir()
    (half / PARTS[0]).write_bytes(b"ten")
    assert find_resume_point(tmp_path).step == 4
    publish(tmp_path, 6)
    assert not half.exists()


def test_rewinding_cuts_what_will_be_done_again(tmp_path):
    metrics = tmp_path / METRICS_FILE
    metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5)) + '{"ste')
    publish(tmp_path, 3, num_rows=3)
    assert rewind(tmp_path).step == 3
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 1, 2]
    begin(tmp_path, SETTINGS, {})
    assert rewind(tmp_path) is None
    assert metrics.read_text() == ""


def test_other_settings_are_refused_field_by_field(tmp_path):
    assert read_beginning(tmp_path, SETTINGS) is None
    begin(tmp_path, SETTINGS, {"token_budget": 512})
    assert read_beginning(tmp_path, SETTINGS) == {"token_budget": 512}
    publish(tmp_path, 3)
    with pytest.raises(ConfigError) as refused:
        read_beginning(tmp_path, {**SETTINGS, "train.lr": 0.2, "train.new": 1})
    message = str(refused.value)
    assert "train.lr: 0.1 there, 0.2 here" in message
    assert "train.new: 'absent' there, 1 here" in message
    assert "seed" not in message


def test_where_every_state_is_damaged_that_is_said(tmp_path, capsys):
    publish(tmp_path, 4)
    publish(tmp_path, 6)
    for state in (tmp_path / "resume").glob("step_*/*.safetensors"):
        state.write_bytes(b"")
    assert find_resume_point(tmp_path) is None
    said = capsys.readouterr().err
    assert "step_6" in said
    assert "from the beginning" in said


def test_a_state_after_a_damaged_newer_one_leaves_two_whole_ones(tmp_path):
    for step in (8, 100):
        publish(tmp_path, step)
    (tmp_path / "resume" / "step_100" / PARTS[0]).write_bytes(b"")
    assert find_resume_point(tmp_path).step == 8
    publish(tmp_path, 9)
    assert {path.name for path in (tmp_path / "resume").iterdir()} == {"step_8", "step_9"}


@pytest.mark.parametrize(
    "error", [RuntimeError("unexpected pos 64 vs 0"), OSError(28, "full"), SafetensorError("full")]
)
def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path, error):
    publish(tmp_path, 4)

    def fail():
        with new_state(tmp_path, 6, {"num_rows": 0}) as (place, _):
            (place / PARTS[0]).write_bytes(b"ten")
            raise error

    with pytest.raises(StoreError, match="Free space"):
        fail()
    assert find_resume_point(tmp_path).step == 4
    assert {path.name for path in (tmp_path / "resume").iterdir()} == {"step_4"}
