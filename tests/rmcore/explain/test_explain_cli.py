"""`rm-opt explain`: worst mistakes, a pair by its id, an answer of one's own, and calls that mean nothing."""

import json

import pytest
import torch
from typer.testing import CliRunner

from flows.cli import app
from rmcore.core.errors import ConfigError
from rmcore.data.pair import PreferencePair
from rmcore.data.table import write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.reporting.html.explained import answers


@pytest.fixture(scope="module")
def files(tmp_path_factory, gold_pairs, tiny_folder):
    """Held-out pairs, and a model that knows nothing."""
    folder = tmp_path_factory.mktemp("explain")
    write_pairs(gold_pairs[:40], folder / "test.parquet")
    with torch.random.fork_rng():
        BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128).save(folder / "model")
    return folder


def run(files, *words):
    own = ("explain", "--checkpoint", files / "model", "--out", files / "page.html", "--json", files / "found.json")
    done = CliRunner().invoke(app, [str(word) for word in (*own, *words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output, json.loads((files / "found.json").read_text()), (files / "page.html").read_text()


@pytest.mark.slow
def test_the_worst_mistakes(files):
    said, record, page = run(files, "--data", files / "test.parquet", "--mistakes", 2)
    assert f"{record['num_mistakes']} of 40 held-out pairs (" in said
    assert len(record["pairs"]) == 2
    assert record["checkpoint_digest"]
    for pair in record["pairs"]:
        [shown] = [one for one in answers(record)["pairs"] if one["pair_id"] == pair["pair_id"]]
        assert f"pair {pair['pair_id']}  margin {shown['margin']}  " in said
        assert pair["pair_id"] in page


@pytest.mark.slow
def test_one_pair_by_the_beginning_of_its_id(files, gold_pairs):
    pair = gold_pairs[7]
    _, record, page = run(files, "--data", files / "test.parquet", "--row", pair.pair_id[:10])
    assert [one["pair_id"] for one in record["pairs"]] == [pair.pair_id]
    assert record["num_pairs"] is None
    assert "Kinds of mistakes" not in page
    with pytest.raises(ConfigError, match=r"no pair of .* has such an id"):
        run(files, "--data", files / "test.parquet", "--row", "xyz")
    assert len(record["pairs"]) == 1
    with pytest.raises(ConfigError, match=r"40 pairs of .* have ids that begin so"):
        run(files, "--data", files / "test.parquet", "--row", "")


@pytest.mark.slow
def test_an_id_that_another_begins_with_names_its_own_pair(files, gold_pairs, tmp_path):
    ids = ["1", "10", "1", "2"]
    pairs = [PreferencePair(p.prompt, p.chosen, p.rejected, pair_id=i) for p, i in zip(gold_pairs, ids, strict=False)]
    write_pairs(pairs, tmp_path / "own.parquet")
    _, record, _ = run(files, "--data", tmp_path / "own.parquet", "--row", "1")
    assert [one["pair_id"] for one in record["pairs"]] == ["1", "1"]


@pytest.mark.slow
def test_an_answer_of_ones_own_alone_and_against_another(files):
    said, record, _ = run(files, "--prompt", "Say hello.", "--response", "Hello. How are you?")
    assert [len(one["sentences"]["spans"]) for one in record["answers"]] == [2]
    assert "'How are you?'" in said
    own = ("--prompt", "Say hello.", "--response", "Hello. How are you?", "--against", "No.")
    _, record, _ = run(files, *own)
    assert record["pairs"][0]["rejected"]["text"] == "No."


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "name what is to be explained"),
        (("--prompt", "Hi"), "--prompt and --response go together"),
        (("--response", "Hi"), "--prompt and --response go together"),
        (("--prompt", "Hi", "--response", "Ho", "--row", "a"), "--row names a pair of --data"),
        (("--data", "x", "--prompt", "Hi", "--response", "Ho"), "name what is to be explained"),
    ],
)
def test_calls_that_mean_nothing_are_refused_before_anything_is_read(files, words, why):
    with pytest.raises(ConfigError, match=why):
        run(files, *words)
