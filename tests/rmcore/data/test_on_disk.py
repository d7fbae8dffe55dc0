"""Pairs on disk are the pairs in memory: the same ones in the same order, and memory does not hold their texts."""

import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.data import DataConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.tracking import NullTracker
from rmcore.data import tokenized
from rmcore.data.audit import audit
from rmcore.data.pair import Message, PreferencePair
from rmcore.data.pairs_on_disk import RowsOnDisk, RowWriter, select
from rmcore.data.table import PAIRS as FORM
from rmcore.data.table import write_pairs
from rmcore.data.tokenized import open_tokenized, select_training_pairs, write_tokenized
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages import prepare
from rmcore.stages.order import stage_of

POOLS = []


def pair(number: int) -> PreferencePair:
    prompt = f"prompt {number // 3}"
    turns = (Message("user", prompt), Message("assistant", "Hm."), Message("user", "Go on."))
    return PreferencePair(
        turns if number % 5 == 0 else prompt,
        f"good {number} ü",
        f"bad {number}",
        target_margin=number / 7 if number % 2 else None,
        metadata={"subset": f"s{number % 4}", "extra": [number]} if number % 3 else {},
    )


PAIRS = [pair(number) for number in range(1500)]


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    with RowWriter(tmp_path_factory.mktemp("spool") / "pairs.arrow", FORM) as writer:
        writer.extend(PAIRS[:700])
        writer.extend(PAIRS[700:])
    return writer.rows()


@given(st.lists(st.integers(0, len(PAIRS) - 1), max_size=30), st.slices(30))
def test_any_choice_of_them_is_that_choice_of_the_list(on_disk: RowsOnDisk, places, part):
    chosen = select(on_disk, np.array(places, dtype=np.int64))
    assert isinstance(chosen, RowsOnDisk)
    assert list(chosen) == [PAIRS[place] for place in places]
    assert list(chosen[part]) == [PAIRS[place] for place in places][part]
    assert [chosen[index] for index in range(len(chosen))] == list(chosen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"test_seed": 3}, {"pairs_per_prompt": 2}, {"eval_source": "b.parquet"}],
    ids=lambda more: next(iter(more), "plain"),
)
def test_a_source_read_onto_disk_is_split_and_audited_as_one_in_memory(tmp_path: Path, more):
    write_pairs(PAIRS, tmp_path / "a.parquet")
    write_pairs([*PAIRS[:30], *map(other, range(90))], tmp_path / "b.parquet")
    more = {name: str(tmp_path / value) if name == "eval_source" else value for name, value in more.items()}
    config = DataConfig(source=str(tmp_path / "a.parquet"), limit=1490, eval_limit=100, **more)
    in_memory, _, loaded = prepare.prepare(config, seed=1)
    (tmp_path / "spool").mkdir()
    on_disk, _, also = prepare.prepare(config, seed=1, spool=tmp_path / "spool")
    assert {name: list(pairs) for name, pairs in on_disk.items()} == in_memory
    assert all(isinstance(pairs, RowsOnDisk) for pairs in on_disk.values())
    assert audit(on_disk, also) == audit(in_memory, loaded)


def other(number: int) -> PreferencePair:
    return replace(pair(number), prompt=f"other {number // 3}", pair_id="")


@pytest.mark.slow
def test_preparing_holds_some_bytes_a_pair_and_not_the_texts(tmp_path: Path):
    """Python and Arrow together, at their peaks, hold less than they all: some batches, and no split as a whole."""

    def texts():
        for number in range(9000):
            yield PreferencePair(f"prompt {number}" + " x" * 500, "good " * 500, f"bad {number} " * 150)

    write_pairs(texts(), tmp_path / "a.parquet")
    num_bytes = sum(len(str(one.prompt)) + len(one.chosen) + len(one.rejected) for one in texts())
    out = tmp_path / "out"
    out.mkdir()
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)  # counts from now on
    POOLS.append(pool)  # it has to outlive whatever was allocated by it
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        settings = PipelineConfig(data=DataConfig(source=str(tmp_path / "a.parquet")))
        prepare.run(stage_of("prepare", settings), out, NullTracker(), lambda done, total, text: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert num_bytes > 40e6
    assert peak < num_bytes / 8
    assert pool.max_memory() < num_bytes * 0.6
    assert not list(out.glob(".pairs-*"))


@pytest.fixture(scope="module")
def renderer():
    return BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=24), seed=0, device=torch.device("cpu")).renderer


@pytest.fixture
def small_batches(monkeypatch):
    """Batches of 64 pairs."""
    monkeypatch.setattr(tokenized, "PAIRS_A_BATCH", 64)


@pytest.mark.parametrize(("over_length", "parts"), [("cut", 1), ("drop", 3), (None, 3)])
def test_tokens_on_disk_are_those_in_memory_whoever_shares_the_work(
    tmp_path: Path, renderer, small_batches, over_length, parts
):
    pairs = PAIRS[: 2 * 64 + 17]
    for number in range(parts):
        write_tokenized(renderer, pairs, tmp_path, over_length=over_length, share=(number, parts))
    found = open_tokenized(tmp_path, len(pairs), parts=parts)
    every = renderer.tokenize_pairs(pairs)
    kept, dropped = (every, []) if over_length is None else select_training_pairs(every, over_length=over_length)
    assert list(found.pairs) == kept
    assert [found.pairs[place] for place in (0, len(kept) // 2, -1)] == [kept[0], kept[len(kept) // 2], kept[-1]]
    assert found.pairs[5:9] == kept[5:9]
    assert found.pairs.lengths().tolist() == [[len(one.chosen.ids), len(one.rejected.ids)] for one in kept]
    assert [{**one, "row": None} for one in found.left_out()] == [{**one.to_dict(), "row": None} for one in dropped]
    assert [pairs[one["row"]].pair_id for one in found.left_out()] == [one.pair_id for one in dropped]
    assert found.num_left_out == len(dropped)
    assert bool(dropped) == (over_length == "drop")
    assert list(pickle.loads(pickle.dumps(found.pairs))) == kept  # noqa: S301 - what this test wrote
    with pytest.raises(IndexError):
        found.pairs[len(kept)]


def test_their_digest_knows_every_token_and_not_who_shared_the_work(tmp_path: Path, renderer, small_batches):
    def digest(pairs, parts=1):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        for number in range(parts):
            write_tokenized(renderer, pairs, folder, over_length="cut", share=(number, parts))
        return open_tokenized(folder, len(pairs), parts=parts).pairs.digest()

    pairs = PAIRS[:80]
    same = digest(pairs)
    assert digest(pairs, parts=2) == same
    swapped = PreferencePair(pairs[7].prompt, pairs[7].rejected, pairs[7].chosen, pairs[7].target_margin)
    changed = {
        "order": [*pairs[1:], pairs[0]],
        "fewer": pairs[:-1],
        "margin": [replace(pairs[0], target_margin=9.0), *pairs[1:]],
        "sides": [*pairs[:7], replace(swapped, pair_id=pairs[7].pair_id), *pairs[8:]],
        "id": [replace(pairs[0], pair_id="another"), *pairs[1:]],
    }
    assert len({same, *map(digest, changed.values())}) == 1 + len(changed)
