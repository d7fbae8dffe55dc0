"""One row a side: rows of a pair find each other wherever they lie, and what is not one of each is set aside whole."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.data import DataConfig
from rmcore.core.errors import DataError
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.readers.sources import load_pairs, write_rejected
from rmcore.stages.prepare import load_sources
from source_sample import lines, write


def row(pair_id, role, text=None, prompt=None, **extra):
    text = f"{role} {pair_id}" if text is None else text
    return {"pair_id": pair_id, "role": role, "prompt": prompt or f"prompt {pair_id}", "response": text, **extra}


def whole(pair_id, **extra):
    return [row(pair_id, "chosen", **extra), row(pair_id, "rejected", **extra)]


def pair(pair_id, margin=None, **metadata):
    return PreferencePair(
        f"prompt {pair_id}", f"chosen {pair_id}", f"rejected {pair_id}", margin, metadata, str(pair_id)
    )


def load(rows, tmp_path, **options):
    return load_pairs(lines(rows, tmp_path / "sides.jsonl"), **options)


def reasons(loaded):
    return [(one.row, one.reason, one.pair_id) for one in loaded.rejected]


@pytest.mark.parametrize("name", ["response", "text", "completion"])
def test_labels_and_the_names_of_the_completion(tmp_path, name):
    rows = [
        {"pair_id": at, "label": label, "prompt": f"prompt {at}", name: f"{role} {at}"}
        for at, labels in enumerate([(0, 1), (False, True), ("0", "1"), (0.0, 1.0)])
        for role, label in zip(("rejected", "chosen"), labels, strict=True)
    ]
    assert load(rows, tmp_path).pairs == [pair(at) for at in range(4)]


@pytest.mark.parametrize("form", ["parquet", "json", "csv"])
def test_keys_of_meta_dialogues_and_message_lists(tmp_path, form):
    rows = [
        {"prompt": "prompt a", "response": f"{role} a", "meta": {"pair_id": "a", "role": role, "label": label}}
        for role, label in (("chosen", 1), ("rejected", 0))
    ]
    assert load_pairs(str(write(rows, tmp_path / f"sides.{form}"))).pairs == [pair("a")]
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    answers = [[{"role": "assistant", "content": text}] for text in "ab"]
    rows = [row("a", "chosen", answers[0], prompt), row("a", "rejected", answers[1], prompt)]
    turns = (Message("system", "s"), Message("user", "u"))
    loaded = load_pairs(str(write(rows, tmp_path / f"sides.{form}")))
    assert loaded.pairs == [PreferencePair(turns, "a", "b", pair_id="a")]


def test_what_the_rows_carry_beside_is_kept_for_each_side_where_it_differs(tmp_path):
    rows = [row("a", "chosen", model="m1", subset="x", n=None), row("a", "rejected", model="m2", subset="x", score=2)]
    (found,) = load(rows, tmp_path).pairs
    assert found.metadata == {"chosen_model": "m1", "rejected_model": "m2", "subset": "x", "rejected_score": 2}


BROKEN = {
    "other side missing": [row("a", "chosen")],
    "one side twice": [row("a", "chosen"), row("a", "chosen", "another")],
    "more than two rows of one pair": [*whole("a"), row("a", "chosen", "another")],
    "prompts differ": [row("a", "chosen"), row("a", "rejected", prompt="other")],
    "unknown role": [row("a", "chosen"), row("a", "best")],
    "role contradicts label": [row("a", "chosen", label=0), row("a", "rejected", label=1)],
    "missing rejected": [row("a", "chosen"), {**row("a", "rejected"), "response": None}],
    "empty chosen": [row("a", "chosen", " "), row("a", "rejected")],
}
OTHERWISE_BAD = {
    "identical sides": [row("a", "chosen", "same"), row("a", "rejected", "same")],
    "margins differ": [row("a", "chosen", margin=1), row("a", "rejected", margin=2)],
    "margin is not a finite number": [row("a", "chosen", margin="big"), row("a", "rejected")],
    "empty prompt": [row("a", "chosen", prompt=" "), row("a", "rejected", prompt=" ")],
}


@pytest.mark.parametrize(("reason", "rows"), (BROKEN | OTHERWISE_BAD).items(), ids=[*BROKEN, *OTHERWISE_BAD])
def test_a_group_that_is_no_pair_is_set_aside_whole_and_an_incomplete_one_an_error_on_request(tmp_path, reason, rows):
    among = [*rows[:1], *whole("good"), *rows[1:]]
    loaded = load(among, tmp_path)
    assert loaded.pairs == [pair("good")]
    assert reasons(loaded) == [(number, reason, "a") for number in [1, 4, 5][: len(rows)]]
    assert all("'a'" in one.excerpt for one in loaded.rejected)
    if reason in OTHERWISE_BAD:
        assert reasons(load(among, tmp_path, require_complete_pairs=True)) == reasons(loaded)
        return
    with pytest.raises(DataError, match=rf"1 pairs are incomplete \({reason}: 1\); the first are a \(row 1") as caught:
        load(among, tmp_path, require_complete_pairs=True)
    assert "data.require_complete_pairs" in str(caught.value)


def test_a_row_without_id_or_that_cannot_be_read_costs_its_pair(tmp_path):
    path = tmp_path / "sides.jsonl"
    lines([row("a", "chosen"), row(None, "rejected"), *whole("good"), row("b", "chosen")], path)
    with path.open("a") as file:
        file.write('{"pair_id": "b", "role"\n')
        file.write('{"pair_id": "\\ud800", "role": "chosen", "prompt": "p", "response": "x"}\n')
    loaded = load_pairs(str(path))
    assert reasons(loaded) == [
        (1, "other side missing", "a"),
        (2, "no pair_id", None),
        (5, "other side missing", "b"),
        (6, "not valid JSON", None),
        (7, "broken \\u escape", None),
    ]
    write_rejected(loaded.rejected, tmp_path / "rejected_rows.jsonl")
    assert json.loads((tmp_path / "rejected_rows.jsonl").read_text().splitlines()[0])["pair_id"] == "a"
    with pytest.raises(DataError, match=r"3 pairs are incomplete .* a \(row 1\), without pair_id \(row 2\), b \(row 5"):
        load_pairs(str(path), require_complete_pairs=True)


def test_pairs_in_one_row_that_lack_a_side_are_an_error_on_request_and_other_faults_are_not(tmp_path):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    faults = [good | {"rejected": "a"}, good | {"prompt": " "}, good | {"margin": "x"}, good | {"chosen": 3}]
    assert len(load([good, *faults], tmp_path, require_complete_pairs=True).rejected) == 4
    lacking = [good | {"chosen": None}, good | {"rejected": " "}, {"prompt": "p", "chosen": "a", "pair_id": "x9"}]
    assert len(load([good, *lacking], tmp_path).rejected) == 3
    with pytest.raises(DataError, match=r"3 pairs are incomplete \(missing chosen: 1, empty rejected: 1") as caught:
        load([good, *faults, *lacking], tmp_path, require_complete_pairs=True)
    assert "without pair_id (row 6), without pair_id (row 7), x9 (row 8)" in str(caught.value)


def test_the_setting_reaches_the_reader_of_both_sources(tmp_path):
    good = lines(whole("good"), tmp_path / "good.jsonl")
    bad = lines([*whole("bad"), row("a", "chosen")], tmp_path / "bad.jsonl")
    assert len(load_sources(DataConfig(source=bad, eval_source=good))) == 2
    for source, eval_source in ((bad, good), (good, bad)):
        with pytest.raises(DataError, match="incomplete"):
            load_sources(DataConfig(source=source, eval_source=eval_source, require_complete_pairs=True))


sides = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from(["chosen", "rejected", "chosen", "rejected", "?"]), st.booleans()),
    min_size=1,
    max_size=24,
)


@pytest.mark.slow
@given(sides, st.integers(1, 4))
def test_any_rows_are_paired_exactly_or_set_aside(tmp_path_factory, drawn, limit):
    rows = [row(str(key), role, prompt="other" if odd else None) for key, role, odd in drawn]
    rows += [row("end", "rejected"), row("end", "chosen")]
    source = lines(rows, tmp_path_factory.mktemp("sides") / "sides.jsonl")
    loaded, limited = load_pairs(source), load_pairs(source, limit=limit)
    groups = {}
    for number, one in enumerate(rows, start=1):
        groups.setdefault(one["pair_id"], []).append((number, one))
    good = [
        key
        for key, members in groups.items()
        if sorted(one["role"] for _, one in members) == ["chosen", "rejected"]
        and len({one["prompt"] for _, one in members}) == 1
    ]
    assert [one.pair_id for one in loaded.pairs] == good
    assert {one.row for one in loaded.rejected} == {n for key in groups.keys() - set(good) for n, _ in groups[key]}
    assert len(loaded.rejected) + 2 * len(loaded.pairs) == loaded.num_rows == len(rows)
    assert max(Counter(one.row for one in loaded.rejected).values(), default=1) == 1
    assert limited.pairs == loaded.pairs[:limit]
    assert (limited.rejected, limited.num_rows) == (loaded.rejected, len(rows))
