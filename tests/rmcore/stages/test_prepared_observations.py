"""Where a source says more than strict pairs, its observations are prepared beside them, and split as they are."""

import json
from pathlib import Path

import pytest

import preference_files as files
from rmcore.config.data import DataConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import DataError
from rmcore.core.tracking import NullTracker
from rmcore.data.observation import Kind
from rmcore.data.parquet_rows import RecordFile
from rmcore.data.readers.sources import load_pairs
from rmcore.data.splits import conversation
from rmcore.data.table import OBSERVATIONS, read_pairs
from rmcore.stages import prepare
from rmcore.stages.order import stage_of

SPLITS = ("train", "validation", "test")


def prepared(out: Path, **data):
    """The pairs and observations of each split, metrics and audit."""
    out.mkdir(exist_ok=True)
    settings = stage_of("prepare", PipelineConfig(data=DataConfig.model_validate(data)))
    prepare.run(settings, out, NullTracker(), lambda done, total, text: None)
    there = {path.name for path in out.iterdir()}
    names = [name for name in SPLITS if f"{name}.parquet" in there]
    pairs = {name: read_pairs(out / f"{name}.parquet") for name in names}
    with_more = [name for name in names if f"{name}_observations.parquet" in there]
    said = {name: list(RecordFile(OBSERVATIONS, out / f"{name}_observations.parquet")) for name in with_more}
    found = [json.loads((out / name).read_text()) for name in ("summary.json", "audit.json")]
    return pairs, said, found[0]["metrics"], found[1]


@pytest.mark.parametrize("more", [{}, {"test_seed": 5}, {"validation_fraction": 0}], ids=str)
@pytest.mark.parametrize("write", [files.write_ultrafeedback, files.write_arena, files.write_helpsteer2])
def test_a_prompts_observations_are_in_the_split_of_its_pairs_and_none_is_lost(tmp_path, write, more):
    source = write(tmp_path / "rows.jsonl", 60)
    pairs, said, metrics, audit = prepared(tmp_path / "out", source=source, **more)
    loaded = load_pairs(source)
    for record, records in ((loaded.pairs, pairs), (loaded.observations, said)):
        assert sum(map(len, records.values())) == len(record)
    prompts = {name: {conversation(one.prompt) for one in [*pairs[name], *said[name]]} for name in pairs}
    assert sum(map(len, prompts.values())) == len(set.union(*prompts.values())) == 60
    for name, some in said.items():
        assert metrics[f"eval/num_{name}_observations"] == len(some)
        assert audit["observations"][name]["num_observations"] == len(some)


def test_observations_change_nothing_in_how_pairs_are_split(tmp_path):
    source = files.write_arena(tmp_path / "rows.jsonl", 80)
    ties = {one.prompt for one in load_pairs(source).observations if one.kind is Kind.TIE}
    rows = [json.loads(row) for row in Path(source).read_text().splitlines()]
    strict = tmp_path / "strict.jsonl"
    strict.write_text("".join(json.dumps(row) + "\n" for row in rows if not row["winner_tie"]))
    pairs, said, _, _ = prepared(tmp_path / "a", source=source)
    alone, none, metrics, audit = prepared(tmp_path / "b", source=str(strict))
    assert pairs == alone
    assert (none, "observations" in audit) == ({}, False)
    assert not [name for name in metrics if name.endswith("observations")]
    assert len(ties) == sum(one.kind is Kind.TIE for some in said.values() for one in some) > 0


def test_a_held_out_source_keeps_its_prompts_for_itself(tmp_path):
    source = files.write_helpsteer2(tmp_path / "a.jsonl", 60)
    held_out = files.write_arena(tmp_path / "b.jsonl", 20)  # the first 20 battles have prompts of the 60
    pairs, said, _, audit = prepared(tmp_path / "out", source=source, eval_source=held_out)
    tested = {one.prompt for one in said["test"]}
    assert len(tested) == 20
    assert not tested & {one.prompt for name in ("train", "validation") for one in [*pairs[name], *said[name]]}
    assert audit["observations"]["test"]["kinds"].keys() == {"pair", "tie"}
    assert audit["observations"]["train"]["kinds"].keys() == {"grades"}


def test_grades_that_imply_no_pair_are_trained_on_where_pairs_are_held_out(tmp_path):
    source = files.write_helpsteer2(tmp_path / "a.jsonl", 60, num_answers=1)
    with pytest.raises(DataError, match=r"one graded answer, so no held-out pair .* data\.eval_source"):
        prepared(tmp_path / "refused", source=source)
    held_out = files.write_arena(tmp_path / "b.jsonl", 20, seed=1)
    pairs, said, metrics, _ = prepared(tmp_path / "out", source=source, eval_source=held_out)
    assert (pairs["train"], pairs["validation"]) == ([], [])
    assert len(said["train"]) + len(said["validation"]) == 60
    assert min(metrics["eval/num_train_observations"], len(said["validation"]), len(pairs["test"])) > 0
