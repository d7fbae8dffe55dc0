"""Any source reads to the same pairs, whatever its form, in one go or in parts; its digest follows its content."""

import json
import math
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import source_sample as sample
from rmcore.core.errors import DataError
from rmcore.data.audit import audit, format_audit
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.parts import SourceInParts
from rmcore.data.readers.json_values import json_values
from rmcore.data.readers.sources import iter_records, load_pairs, source_digest, source_kind
from rmcore.data.table import write_pairs
from source_sample import lines

ROWS, FORMATS, write = sample.ROWS, sample.FORMATS, sample.write
PAIRS = [PreferencePair(row["prompt"], "ja", "no", row["margin"], {"subset": "α"}) for row in ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_every_file_format_gives_the_same_pairs(tmp_path, form):
    path = write(ROWS, tmp_path / f"data.{form}")
    told = []
    loaded = load_pairs(str(path), report=lambda *at: told.append(at))
    assert told == [(0, 1, f"1,000 rows of {path}")]
    assert loaded.pairs == PAIRS
    assert (loaded.rejected, loaded.num_rows, loaded.source) == ([], 1200, str(path))
    assert [record.row for record in islice(iter_records(str(path)), 3)] == [1, 2, 3]


def test_limit_counts_pairs_and_stops_reading(tmp_path):
    path = write(ROWS, tmp_path / "data.jsonl")
    loaded = load_pairs(str(path), limit=7)
    assert (loaded.pairs, loaded.num_rows) == (PAIRS[:7], 7)
    ranked = {"prompt": "p", "answers": ["a", "b", "c"], "ranks": [1, 2, 3]}
    loaded = load_pairs(str(write([ranked] * 5, tmp_path / "ranked.json")), limit=4)
    assert (len(loaded.pairs), loaded.num_rows, loaded.layout) == (4, 2, "ranked answers")


@pytest.mark.parametrize(("limit", "num_rows", "num_ties"), [(1, 3, 0), (3, 3, 0), (4, 6, 1), (5, 6, 1)])
def test_a_limit_cuts_no_record_so_every_label_of_those_that_were_read_is_counted(tmp_path, limit, num_rows, num_ties):
    fields = {"prompt": "Name a tool.", "response_1": "A cloud.", "response_2": "A hammer."}
    votes = [("response_1", "response_1", "response_2"), ("response_2", "response_2", "tie"), ("response_1",) * 3]
    said = [[{"value": value, "user_id": str(who)} for who, value in enumerate(one)] for one in votes]
    path = str(write([{"fields": fields, "responses": {"preferred": one}} for one in said], tmp_path / "votes.json"))
    loaded, parts = load_pairs(path, limit=limit), SourceInParts(path, 2, limit=limit)
    assert (loaded.layout, len(loaded.pairs)) == ("Argilla", limit)
    assert (loaded.num_rows, loaded.num_ties) == (num_rows, num_ties)
    assert sum(len(part) for part in parts) == limit
    assert (parts.num_rows, parts.num_unusable) == (num_rows, num_ties)


@pytest.fixture(scope="module")
def dataset_folders(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("folders")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(folder / "one"))
    shuffled = whole.select(range(3)), whole.select(range(3, 5))
    datasets.DatasetDict({"train": shuffled[0], "test": shuffled[1]}).save_to_disk(str(folder / "dict"))
    return folder


def test_datasets_folders(dataset_folders):
    assert load_pairs(str(dataset_folders / "one")).pairs == PAIRS
    assert load_pairs(str(dataset_folders / "dict")).pairs == PAIRS[:3]
    assert load_pairs(str(dataset_folders / "dict"), split="test").pairs == PAIRS[3:5]
    with pytest.raises(DataError, match="no split 'dev', its splits are train, test"):
        load_pairs(str(dataset_folders / "dict"), split="dev")


def test_bad_datasets_folders(dataset_folders, tmp_path):
    with pytest.raises(DataError, match="is no folder of datasets' save_to_disk"):
        load_pairs(str(tmp_path))
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text((dataset_folders / "one" / name).read_text())
    with pytest.raises(DataError, match="missing or damaged"):
        load_pairs(str(tmp_path))
    arrow = next((dataset_folders / "one").glob("*.arrow"))
    (tmp_path / arrow.name).write_bytes(arrow.read_bytes()[:-5000])
    with pytest.raises(DataError, match="missing or damaged"):
        load_pairs(str(tmp_path))
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DataError, match="missing or damaged"):
        load_pairs(str(tmp_path))


@given(
    st.lists(st.integers() | st.text(max_size=4) | st.fixed_dictionaries({"a": st.text(max_size=5)}), max_size=4),
    st.sampled_from([None, 1]),
)
def test_json_values_are_what_the_whole_parser_reads(values, indent):
    assert list(json_values(json.dumps(values, indent=indent))) == values
    objects = [{"n": value} for value in values]
    assert list(json_values("\n".join(json.dumps(one, indent=indent) for one in objects))) == objects


def test_what_a_source_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "plain").write_text("x")
    kinds = {
        "owner/name": "folder", "owner/other": "hub", "squad": "hub", "plain": "file", "none.jsonl.gz": "file",
        "a/b.parquet": "file", "./x": "file", "/x/y": "file", "~/x": "file", "a/b/c": "file", "": "folder",
        "pairs.xlsx": "file", "a/b.Arrow": "file", "b.parquet.gz": "file",
    }  # fmt: skip
    assert {source: source_kind(source) for source in kinds} == kinds


def test_digest_follows_names_in_a_folder_and_content_and_not_the_path(tmp_path):
    digests = []
    for index, (name, text) in enumerate([("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("a/b", "x")]):
        file = tmp_path / str(index) / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        digests.append((source_digest(str(tmp_path / str(index))), source_digest(str(file))))
    assert digests[0] == digests[1]
    folders, files = ({*each} for each in zip(*digests, strict=True))
    assert (len(folders), len(files)) == (4, 2)
    with pytest.raises(DataError, match="cannot be read"):
        source_digest(str(tmp_path / "none.csv"))


@pytest.mark.slow
def test_public_data_has_its_known_counts(data_folder):
    folder = data_folder
    alpaca = load_pairs(str(folder / "alpacaeval_train.parquet"))
    assert (len(alpaca.pairs), alpaca.rejected, alpaca.layout) == (10_591, [], "plain strings")
    assert all(pair.target_margin >= 2 for pair in alpaca.pairs)
    assert set(alpaca.pairs[0].metadata) == {"chosen_model", "rejected_model", "source"}
    harmless = load_pairs(str(folder / "hh_harmless_base_test.jsonl.gz"))
    assert (harmless.num_rows, len(harmless.pairs), harmless.layout) == (2_312, 2_303, "dialogues")
    found = [row.reason for row in harmless.rejected]
    assert {reason: found.count(reason) for reason in found} == {"prompts differ": 5, "empty chosen": 4}
    turns = [
        pair.prompt if isinstance(pair.prompt, tuple) else (Message("user", pair.prompt),) for pair in harmless.pairs
    ]
    assert all(prompt[0].role == prompt[-1].role == "user" for prompt in turns)


def prompts_file(path, *prompts):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines([{"prompt": one, "chosen": "a", "rejected": "b"} for one in prompts], path)


FOLDERS = {
    "shards": "data/train-00000-of-00002.jsonl data/train-00001-of-00002.jsonl data/test-00000-of-00001.jsonl",
    "with a digest": "train-00000-of-00002-ab12.jsonl train-00001-of-00002-ab12.jsonl test.jsonl",
    "numbers": "data/train/0000.jsonl data/train/0001.jsonl data/test/0000.jsonl",
}


@pytest.mark.parametrize("names", FOLDERS.values(), ids=FOLDERS)
def test_the_files_of_a_split_are_one_data_set_in_the_order_of_their_numbers(tmp_path, names):
    first, second, *tests = (tmp_path / name for name in names.split())
    for path, prompts in zip((first, second, *tests), ("pq", "rs", "t"), strict=False):
        prompts_file(path, *prompts, "")
    for name in ("README.md", "dataset_infos.json"):
        (tmp_path / name).write_text("{}")
    loaded = load_pairs(str(tmp_path))
    assert [pair.prompt for pair in loaded.pairs] == [*"pqrs"]
    assert [row.row for row in loaded.rejected] == [3, 6]
    assert [pair.prompt for pair in load_pairs(str(tmp_path), split="test").pairs] == ["t"]
    with pytest.raises(DataError, match="no file in it is named as the split 'dev'"):
        load_pairs(str(tmp_path), split="dev")
    second.rename(second.with_name(second.name.replace("1", "3", 1)))
    with pytest.raises(DataError, match="lacks file 1 of the split 'train'"):
        load_pairs(str(tmp_path))


@pytest.mark.parametrize(
    "names", ["a-0.jsonl a-1.jsonl", "part-00000-3f2a-c000.jsonl", "train.jsonl data/train-00000-of-00001.jsonl"]
)
def test_files_that_need_not_be_one_data_set_are_refused(tmp_path, names):
    for name in names.split():
        prompts_file(tmp_path / name, "p")
    with pytest.raises(DataError, match=r"no file in it is named as the split|which one is meant is unknown"):
        load_pairs(str(tmp_path))


RESPONSES = [{"prompt": f"p{number}", "response": None if number % 5 == 3 else f"r{number}"} for number in range(23)]
RESPONSES[8] = {"prompt": " ", "response": "a blank prompt"}
RESPONSES[13] = {"prompt": ["two"], "response": "no text"}
RESPONSES[18] = {"prompt": "half a pair of \ud800", "response": "no Unicode"}
UNUSABLE = {3, 8, 13, 18}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gold_pairs):
    place = tmp_path_factory.mktemp("parts")
    write_pairs(gold_pairs[:31], place / "pairs.parquet")
    rows = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in gold_pairs[:31]]
    text = [*map(json.dumps, rows[:4]), "not JSON", '{"prompt": "p", "chosen": "same", "rejected": "same"}']
    (place / "pairs.jsonl").write_text("\n".join([*text, *map(json.dumps, rows[4:])]))
    sides = [
        {"pair_id": pair.pair_id, "role": role, "prompt": pair.prompt, "response": getattr(pair, role)}
        for role in ("chosen", "rejected")
        for pair in gold_pairs[:31]
    ]
    lines(sides, place / "sides.jsonl")
    lines(RESPONSES, place / "responses.jsonl")
    return place


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.integers(1, 40), st.none() | st.integers(1, 40), st.sampled_from(["pairs.parquet", "pairs.jsonl", "sides.jsonl"])
)
def test_the_pairs_of_all_parts_are_those_of_the_source(folder, size, limit, name):
    source = SourceInParts(str(folder / name), size, limit=limit)
    parts = list(source)
    whole = load_pairs(str(folder / name), limit=limit)
    assert [pair.pair_id for part in parts for pair in part.pairs] == [pair.pair_id for pair in whole.pairs]
    assert [part.number for part in parts] == list(range(len(parts)))
    assert all(len(part) == size for part in parts[:-1])
    assert 0 < len(parts[-1]) <= size
    if limit is None:
        assert (source.num_rows, source.num_unusable) == (whole.num_rows, len(whole.rejected))


@settings(max_examples=25)
@given(st.integers(1, 30), st.none() | st.integers(1, 30) | st.just(10**30))
def test_the_responses_of_all_parts_are_those_of_the_source(folder, size, limit):
    source, read = SourceInParts(str(folder / "responses.jsonl"), size, limit=limit), RESPONSES[:limit]
    parts = list(source)
    usable = [place for place in range(len(read)) if place not in UNUSABLE]
    expected = [(read[place]["prompt"], read[place]["response"]) for place in usable]
    assert [row for part in parts for row in part.responses] == expected
    assert [row - 1 for part in parts for row in part.rows] == usable
    assert [len(part.rows) for part in parts] == [len(part) for part in parts]
    assert (source.num_rows, source.num_unusable) == (len(read), len(read) - len(usable))


def test_a_damaged_first_line_says_nothing_about_the_others_and_no_row_is_read_before_it_is_asked_for(folder, tmp_path):
    """So memory holds one part, however long the file is."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(["not JSON", *map(json.dumps, RESPONSES)]))
    source = SourceInParts(str(path), 5)
    parts = iter(source)
    assert [prompt for prompt, _ in next(parts).responses] == ["p0", "p1", "p2", "p4", "p5"]
    assert (source.num_rows, source.num_unusable) == (7, 2)
    source = SourceInParts(str(folder / "pairs.parquet"), 5)
    assert [source.num_rows for _ in source] == [5, 10, 15, 20, 25, 30, 31]


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": "p", "chosen": "a", "rejected": "b"}],
        [{"pair_id": "1", "role": role, "prompt": "p", "response": role} for role in ("chosen", "rejected")],
    ],
    ids=["pair", "sides of a pair"],
)
def test_pairs_are_not_taken_for_responses(tmp_path, rows):
    [part] = SourceInParts(lines(rows, tmp_path / "rows.jsonl"), 10)
    assert (len(part.pairs), part.responses) == (1, [])


PAIR = {"prompt": "What is on it?", "chosen": "A cat.", "rejected": "A dog."}
SCORED = {"prompt": "What is on it?", "response": "A cat.", "system": "Be brief."}
NAMED = [
    *({"documents": ["x"]}, {"context": "It is dark."}, {"History": [["q", "a"]]}, {"input": "apple"}),
    {"chat_template_kwargs": {"enable_thinking": False}},
]
NOT_NAMED = [
    *({"question": " What is on it? "}, {"context": ""}, {"images": []}, {"images": "[]"}, {"input": None}, {"n": "x"})
]


@pytest.mark.parametrize("part", [*NAMED, *NOT_NAMED])
def test_a_column_like_a_part_of_the_prompt_is_named_wherever_rows_are_read(tmp_path, part):
    pairs = lines([PAIR, PAIR | part], tmp_path / "pairs.jsonl")
    rows = lines([SCORED, SCORED | part], tmp_path / "rows.jsonl")
    loaded = load_pairs(pairs)
    for size in (1, 100):
        for source in (SourceInParts(pairs, size), SourceInParts(rows, size)):
            assert sum(map(len, source)) == 2
            said = [f"{name!r} (in 1 of the " in notice for notice in source.notices for name in part]
            assert said == [True] * (part in NAMED)
    assert len(loaded.notices()) == (part in NAMED)
    for notice in loaded.notices():
        assert f"NOTE     {notice}" in format_audit(audit({"all": loaded.pairs}, [loaded]))


@pytest.mark.parametrize("first", ["round", "", None, math.nan])
def test_an_input_that_a_layout_reads_is_not(tmp_path, first):
    row = {"instruction": "Name it.", "input": first, "chosen": "A ball.", "rejected": "A box."}
    loaded = load_pairs(lines([row], tmp_path / "data.jsonl"))
    assert loaded.notices() == []
    assert loaded.pairs[0].prompt == ("Name it.\nround" if first == "round" else "Name it.")
