"""Any source reads to the same pairs, whatever its form; its digest follows its content."""

import json
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import source_sample as sample
from rmcore.core.errors import DataError
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.sources import iter_records, load_pairs, source_digest, source_kind

ROWS, FORMATS, write = sample.ROWS, sample.FORMATS, sample.write
PAIRS = [PreferencePair(row["prompt"], "ja", "no", row["margin"], {"subset": "α"}) for row in ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_file_format_gives_the_same_pairs(tmp_path, form, packed):
    path = write(ROWS, tmp_path / f"data.{form}{packed}")
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


def test_a_limit_before_the_damage_reads_what_was_asked_for(tmp_path):
    path = write(ROWS, tmp_path / "data.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-30])
    assert len(load_pairs(str(path), limit=5).pairs) == 5


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


def test_named_columns(tmp_path):
    path = write([{"q": "p", "good": "a", "bad": "b", "gap": 2}], tmp_path / "data.csv")
    loaded = load_pairs(str(path), columns=ColumnMap("q", "good", "bad", "gap"))
    assert loaded.pairs == [PreferencePair("p", "a", "b", 2.0)]
    with pytest.raises(
        DataError, match=r"data\.csv: no layout fits the columns: the columns are 'q', 'good'.*--prompt-column"
    ):
        load_pairs(str(path))
    with pytest.raises(DataError, match="no column 'best'"):
        load_pairs(str(path), columns=ColumnMap(chosen="best"))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers() | st.text(max_size=4) | st.fixed_dictionaries({"a": st.text(max_size=9)}), max_size=9),
    st.integers(1, 7),
)
def test_the_json_stream_reads_what_the_whole_parser_reads_at_any_chunk_size(values, chunk):
    import io

    from rmcore.data.readers.json_stream import JsonText, array_values

    class Slow(io.StringIO):
        def read(self, size=-1):
            return super().read(min(size, chunk))

    assert list(array_values(JsonText(Slow(json.dumps(values, indent=1))))) == values


def test_what_a_source_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "plain").write_text("x")
    kinds = {
        "owner/name": "folder", "owner/other": "hub", "squad": "hub", "plain": "file", "none.jsonl.gz": "file",
        "a/b.parquet": "file", "./x": "file", "/x/y": "file", "~/x": "file", "a/b/c": "file", "": "folder",
    }  # fmt: skip
    assert {source: source_kind(source) for source in kinds} == kinds


def test_digest_follows_content_and_not_the_path(tmp_path):
    one, two = write(ROWS[:3], tmp_path / "one.csv"), write(ROWS[:3], tmp_path / "two.csv")
    assert source_digest(str(one)) == source_digest(str(two))
    write(ROWS[:4], two)
    assert source_digest(str(one)) != source_digest(str(two))
    with pytest.raises(DataError, match="cannot be read"):
        source_digest(str(tmp_path / "none.csv"))


def test_folder_digest_follows_names_and_content(tmp_path):
    digests = []
    for index, (name, text) in enumerate([("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("a/b", "x")]):
        file = tmp_path / str(index) / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        digests.append(source_digest(str(tmp_path / str(index))))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


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
