"""A registration is frozen once, numbered, explained, and believed only as it was written."""

import json
import multiprocessing

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from machine import PATIENCE_S
from rmcore.core.errors import StoreError
from rmcore.core.manifests import make_key
from rmcore.study.registration import describe_changes, read_registration, register

CLAIM = {"name": "H1", "metric": "accuracy", "threshold": 0.03}
KEY = "0011aabbccdd"
OTHER = {"name": "H2", "metric": "ece", "threshold": 0.1}
DECLARED = {"name": "rates", "seeds": [0, 1], "hypotheses": [CLAIM, OTHER]}


def with_threshold(threshold):
    return DECLARED | {"hypotheses": [CLAIM | {"threshold": threshold}, OTHER]}


def test_the_same_declaration_is_the_same_registration(tmp_path):
    first = register(tmp_path, DECLARED)
    assert first["hash"] == make_key(DECLARED)
    assert (first["number"], first["changes"]) == (1, [])
    assert register(tmp_path, DECLARED) == first
    assert register(tmp_path, json.loads(json.dumps(DECLARED))) == first
    assert [str(path) for path in tmp_path.glob("*.json")] == [first["path"]]


def test_a_change_makes_the_next_one_and_says_what_changed(tmp_path):
    first = register(tmp_path, DECLARED)
    second = register(tmp_path, with_threshold(0.02))
    assert (second["number"], second["changes"]) == (2, ["hypotheses.H1.threshold: 0.03 -> 0.02"])
    assert second["hash"] != first["hash"]
    assert read_registration(tmp_path / first["path"])["frozen"] == DECLARED


def test_claims_are_as_old_as_their_first_writing(tmp_path):
    first, second, third = (register(tmp_path, with_threshold(threshold)) for threshold in (0.03, 0.02, 0.03))
    assert third == first
    assert register(tmp_path, with_threshold(0.02)) == second


def test_among_machines_they_are_as_old_as_the_first_writing_on_any(tmp_path):
    written = {}
    first = register(tmp_path / "a" / "rates", DECLARED, written.setdefault)
    [(name, content)] = written.items()
    earlier = json.loads(content) | {"frozen_at": "2020-01-01T00:00:00+00:00"}
    written[name] = json.dumps(earlier).encode()
    second = register(tmp_path / "b" / "rates", DECLARED, written.setdefault)
    assert second["frozen_at"] == "2020-01-01T00:00:00+00:00" != first["frozen_at"]
    assert second["hash"] == first["hash"]
    register(tmp_path / "b" / "rates", with_threshold(0.02), written.setdefault)
    assert len(written) == 2  # another declaration is another object
    written[name] = json.dumps(earlier | {"frozen": with_threshold(0.02)}).encode()
    with pytest.raises(StoreError, match="is not what was frozen"):
        register(tmp_path / "c" / "rates", DECLARED, written.setdefault)


def test_numbers_go_on_from_the_newest(tmp_path):
    first, second = register(tmp_path, with_threshold(0.1)), register(tmp_path, with_threshold(0.2))
    (tmp_path / first["path"]).unlink()
    third = register(tmp_path, with_threshold(0.3))
    assert (second["number"], third["number"]) == (2, 3)
    assert register(tmp_path, with_threshold(0.3)) == third


values = st.sampled_from([0, 1, 0.5, "text", None, True, [1, 2], (1, 2)])
records = st.fixed_dictionaries(
    {
        "base": st.dictionaries(st.sampled_from(["lr", "steps"]), values, min_size=1),
        "seeds": st.lists(st.integers(0, 3), min_size=1),
        "arms": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from("abc"), "changes": st.dictionaries(st.just("x"), values)}),
            unique_by=lambda arm: arm["name"],
        ),
    }
)


@pytest.mark.slow
@given(records, records)
@example({"base": {"lr": 1}}, {"base": {"lr": True}})
def test_what_differs_has_a_line_and_nothing_else_does(before, after):
    before, after = (json.loads(json.dumps(record)) for record in (before, after))
    assert bool(describe_changes(before, after)) == (make_key(before) != make_key(after))


def test_lines_name_what_was_added_removed_and_moved():
    added = describe_changes(DECLARED, DECLARED | {"target": 0.5})
    assert added == ["target added: 0.5"]
    [removed, *_] = describe_changes(DECLARED | {"target": 0.5}, DECLARED)
    assert removed == "target removed (was 0.5)"
    moved = describe_changes(DECLARED, DECLARED | {"hypotheses": [OTHER, CLAIM]})
    assert moved == ["hypotheses: in another order: H2, H1"]


def edited(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


EDITS = {
    "a threshold": {"frozen": with_threshold(0.5)},
    "the hash too": {"frozen": with_threshold(0.5), "hash": make_key(with_threshold(0.5))},
    "the number": {"number": 7},
    "no declaration": {"frozen": None},
}


@pytest.mark.parametrize("changes", EDITS.values(), ids=EDITS.keys())
def test_a_file_edited_by_hand_is_refused(changes, tmp_path):
    first = register(tmp_path, DECLARED)
    edited(tmp_path / first["path"], **changes)
    with pytest.raises(StoreError, match="was changed after it was frozen"):
        register(tmp_path, DECLARED)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_file_that_is_no_registration_is_refused(text, tmp_path):
    first = register(tmp_path, DECLARED)
    (tmp_path / first["path"]).write_text(text)
    with pytest.raises(StoreError, match="was changed after it was frozen"):
        register(tmp_path, with_threshold(0.5))


def register_at_once(folder, barrier, found):
    barrier.wait()
    found.put(register(folder, DECLARED))


@pytest.mark.slow
def test_processes_that_register_at_once_get_one_registration(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(4), context.Queue()
    workers = [context.Process(target=register_at_once, args=(tmp_path / "r", barrier, found)) for _ in range(4)]
    for worker in workers:
        worker.start()
    registrations = [found.get(timeout=PATIENCE_S) for _ in workers]
    for worker in workers:
        worker.join()
    assert all(one == registrations[0] for one in registrations)
    assert len(list((tmp_path / "r").glob("*.json"))) == 1


def look(verdict, *, still_open=("H2",), num_seeds=5, value=0.1):
    claims = [
        {"name": "H1", "verdict": verdict, "value": value},
        {"name": "H2", "verdict": "inconclusive", "value": 0.0},
    ]
    return {"num_seeds": num_seeds, "open": list(still_open), "claims": claims}
