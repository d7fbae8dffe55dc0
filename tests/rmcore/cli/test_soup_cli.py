"""`rm-opt soup` from checkpoints to a folder that loads anywhere, or to a refusal that leaves nothing."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from rmcore.cli import app
from rmcore.core.errors import ConfigError, ModelError
from rmcore.data.table import write_pairs
from rmcore.ensembles.ensemble_folder import checkpoint_digest
from rmcore.models.preference import write_beta
from rmcore.models.reward_model import BradleyTerryRM
from soup_sample import fitted, nudged, permuted

pytestmark = pytest.mark.slow

PROMPTS, RESPONSES = ["What is 2 + 2?", "Name a fruit."], ["4", "A pear, as everybody knows."]


@pytest.fixture(scope="module")
def home(tiny_folder, gold_pairs, tmp_path_factory):
    """A fitted model, two in its basin, the same function elsewhere, one of another beta, and pairs."""
    folder = tmp_path_factory.mktemp("soup")
    pairs = gold_pairs[:80]
    good = fitted(BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128), pairs)
    models = {"a": good, "b": nudged(good, 1), "c": nudged(good, 2), "elsewhere": permuted(good), "beta": good}
    for name, model in models.items():
        model.save(folder / name)
    write_beta(folder / "beta", 0.5)
    write_pairs(pairs, folder / "pairs.parquet")
    return folder


def run(home, out, *members, options=()):
    given = [*(str(home / name) for name in members), "--data", str(home / "pairs.parquet"), "--out", str(out)]
    return CliRunner().invoke(app, ["soup", *given, "--device", "cpu", "--num-resamples", "100", *options])


@pytest.mark.parametrize("how", ["uniform", "greedy"])
def test_an_average_in_one_basin_is_written_and_loads_anywhere(how, home, tmp_path):
    out = tmp_path / "out"
    # All agree on every pair of 21 prompts, which shows that at most 16 points are lost.
    options = ["--how", how, "--json", str(tmp_path / "also.json"), "--tolerance", "0.2"]
    result = run(home, out, "a", "b", "c", options=options)
    assert result.exit_code == 0, result.output
    record = json.loads((out / "soup.json").read_text())
    assert json.loads((tmp_path / "also.json").read_text()) == record
    assert record["accepted"]
    assert [one["digest"] for one in record["members"]] == [checkpoint_digest(home / name) for name in "abc"]
    kept = [one["checkpoint"] for one in record["members"] if one["kept"]]
    assert sum(record["weights"].values()) == pytest.approx(1)
    assert sorted(record["weights"]) == sorted(kept)
    assert [one["passed"] for one in record["checks"]] == [True, True, None]
    assert "cannot be measured" in result.output
    assert f"{len(kept)} passes a response" in result.output
    assert len(record["accuracy"]) == 5
    assert record["num_prompts"]["choose"] + record["num_prompts"]["judge"] == 40
    assert (out / "soup.png").read_bytes().startswith(b"\x89PNG")

    loaded = BradleyTerryRM.from_pretrained(out, device="cpu")
    members = [BradleyTerryRM.from_pretrained(name, device="cpu").model.state_dict() for name in kept]
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, torch.stack([one[name].double() for one in members]).mean(0).float())
    plain = AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    sides = loaded.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))
    assert tokenizer.decode(sides[0].ids) == loaded.tokenizer.decode(sides[0].ids)
    with torch.no_grad():
        rewards = [float(plain(input_ids=torch.tensor([side.ids])).logits) for side in sides]
    np.testing.assert_allclose(rewards, loaded.score(PROMPTS, RESPONSES), rtol=1e-4, atol=1e-5)


def test_the_same_function_elsewhere_is_refused_and_nothing_is_written(home, tmp_path):
    out = tmp_path / "out"
    given = ["--json", str(tmp_path / "record.json"), "--figure", str(tmp_path / "ways.png")]
    result = run(home, out, "a", "elsewhere", options=given)
    assert isinstance(result.exception, ModelError)
    assert "the average is refused, and nothing was written" in str(result.exception)
    assert "a barrier: " in str(result.exception)
    assert not out.exists()
    assert (tmp_path / "ways.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "record.json").read_text())
    assert not record["accepted"]
    values = list(record["accuracy"].values())
    assert values[0]["value"] == values[1]["value"]
    heights = [member["height"][0] for member in record["paths"]["members"]]
    assert all(height["ci_low"] > 0.01 for height in heights)


def test_the_greedy_choice_leaves_the_same_function_elsewhere_out(home, tmp_path):
    result = run(home, tmp_path / "out", "a", "elsewhere", options=["--how", "greedy"])
    assert isinstance(result.exception, ModelError)
    assert "nothing is left to average" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("members", "error", "words"),
    [
        (("a",), ConfigError, "name two or more"),
        (("a", "a"), ConfigError, "name each member once"),
        (("a", "beta"), ModelError, "has another beta than"),
        (("a", "nowhere"), ModelError, "no checkpoint folder"),
    ],
)
def test_members_that_cannot_be_averaged_are_refused_before_anything_is_scored(members, error, words, home, tmp_path):
    result = run(home, tmp_path / "out", *members)
    assert isinstance(result.exception, error)
    assert words in str(result.exception)
    assert "best " not in result.output


def test_recorded_bases_are_compared(home, tmp_path):
    for number, base in enumerate(("tiny", "minilm")):
        place = tmp_path / str(number) / "best"
        nudged(BradleyTerryRM.from_pretrained(home / "a", device="cpu"), number).save(place)
        (place.parent / "training.json").write_text("{}")
        (place.parent / "settings.json").write_text(json.dumps({"model": {"name": base}, "seed": 3}))
    result = run(home, tmp_path / "out", tmp_path / "0" / "best", tmp_path / "1" / "best")
    assert isinstance(result.exception, ModelError)
    assert "has another base than" in str(result.exception)
    assert "minilm, not tiny of seed 3" in str(result.exception)


def test_a_folder_that_holds_files_is_never_overwritten(home, tmp_path):
    (tmp_path / "kept").write_text("mine")
    result = run(home, tmp_path, "a", "b")
    assert isinstance(result.exception, ConfigError)
    assert (tmp_path / "kept").read_text() == "mine"
