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
OTHER = {"name": "H2", "metric": "ece", "threshold": 0.1}
DECLARED = {"name": "rates", "seeds": [0, 1], "hypotheses": [CLAIM, OTHER]}


def with_threshold(threshold):
    return DECLARED | {"hypotheses": [CLAIM | {"threshold": threshold}, OTHER]}


def test_the_same_declaration_is_the_same_registration_and_a_change_the_next_one_which_says_what_changed(tmp_path):
    first = register(tmp_path, DECLARED)
    assert (first["hash"], first["number"], first["changes"]) == (make_key(DECLARED), 1, [])
    second = register(tmp_path, with_threshold(0.02))
    assert (second["number"], second["changes"]) == (2, ["hypotheses.H1.threshold: 0.03 -> 0.02"])
    # Claims are as old as their first writing.
    assert register(tmp_path, json.loads(json.dumps(DECLARED))) == first
    assert register(tmp_path, with_threshold(0.02)) == second
    assert sorted(str(path) for path in tmp_path.glob("*.json")) == [first["path"], second["path"]]
    assert read_registration(tmp_path / first["path"])["frozen"] == DECLARED


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


OTHERS = with_threshold(0.5)


@pytest.mark.parametrize(
    "changes",
    [{"frozen": OTHERS}, {"frozen": OTHERS, "hash": make_key(OTHERS)}, {"number": 7}, {"frozen": None}, "", "[]", "{}"],
)
def test_a_file_that_was_edited_or_is_no_registration_is_refused(changes, tmp_path):
    path = tmp_path / register(tmp_path, DECLARED)["path"]
    path.write_text(changes if isinstance(changes, str) else json.dumps(json.loads(path.read_text()) | changes))
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
