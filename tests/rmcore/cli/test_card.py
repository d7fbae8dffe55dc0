"""The card that `rm-opt export` writes: it says what is known, and its snippet gives the model's reward."""

import contextlib
import io
import json
import re
import shutil

import pandas as pd
import pytest
from huggingface_hub import ModelCard

import report_sample
from command_line import rm_opt, succeeded
from rmcore.cli.card import OWN_KEY, find_origin
from rmcore.core.manifests import MANIFEST
from rmcore.data.pair import prompt_text

HOSTILE = "a](http:b) <script>$x$ | c.jsonl"
"""Name of a file: a link, HTML, a formula and a new cell, were it Markdown."""


def write_pairs(path, pairs):
    rows = ({"prompt": prompt_text(one.prompt), "chosen": one.chosen, "rejected": one.rejected} for one in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def exported(best, out, *words):
    """Export a checkpoint; its card as text, and what was printed."""
    said = succeeded("export", "--checkpoint", best, "--out", out, *words)
    return (out / "README.md").read_text(), said


@pytest.fixture(scope="module")
def trained(tmp_path_factory, gold_pairs):
    """A training in each format of text, as `rm-opt train` leaves it."""
    folder = tmp_path_factory.mktemp("card")
    data = write_pairs(folder / HOSTILE, gold_pairs[:48])
    held_out = write_pairs(folder / "held_out.jsonl", gold_pairs[48:96])
    for name, flag in (("chat", "--use-chat-template"), ("plain", "--no-use-chat-template")):
        words = ["train", "--model", "tiny", "--data", data, "--eval-data", held_out, "--output-dir", folder / name]
        more = ["--steps", 2, "--max-seq-len", 128, "--lr", "1e-3", "--device", "cpu", flag]
        succeeded(*words, *more)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chat", "plain"])
def test_the_snippet_gives_the_reward_of_rm_opt_score(form, trained, tmp_path):
    best = trained / form / "best"
    card, _ = exported(best, tmp_path / "out")
    snippet = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("OWNER/NAME", str(tmp_path / "out"))
    rows = [("What is 2 + 2?", "It is 4."), ("Sort: pear, fig", "fig, pear\n\nGladly.")]
    space, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(snippet, space)
    data, out = tmp_path / "rows.jsonl", tmp_path / "rewards.parquet"
    data.write_text("".join(json.dumps({"prompt": prompt, "response": answer}) + "\n" for prompt, answer in rows))
    succeeded("score", "--checkpoint", best, "--data", data, "--out", out, "--device", "cpu")
    scored = pd.read_parquet(out)["reward"].tolist()
    assert [space["reward"](*row) for row in rows] == pytest.approx(scored, abs=1e-5)
    assert float(printed.getvalue()) == pytest.approx(scored[0], abs=1e-5)
    assert float(re.search(r"\)\)  # (-?[\d.]+)\n", snippet)[1]) == pytest.approx(scored[0], abs=1e-4)
    with pytest.raises(ValueError, match="and the model reads 128"):
        space["reward"]("word " * 200, "x")


@pytest.mark.slow
def test_a_training_s_card_says_what_is_known_and_what_is_not(trained, tmp_path):
    from markdown_it import MarkdownIt

    text, said = exported(trained / "chat" / "best", tmp_path / "out", "--license", "apache-2.0")
    assert "nobody judged" in said
    card = ModelCard(text)
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    assert (card.data.datasets, card.data.base_model) == (None, None)  # neither is on the hub
    assert card.data.eval_results is None
    assert "Nobody judged" in text
    assert "None were there when this card was written." in text
    assert "| licence of the pairs | not stated |" in text
    assert re.search(r"\| different pairs that were trained on \| 48, seen \d+ times in all \([\d.]+ passes\) \|", text)
    assert str(trained) not in text  # where things are is nobody's business
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text)
    assert not re.search("<script|href", page)
    assert "a](http:b) &lt;script&gt;$x$ | c.jsonl" in page.replace("&#36;", "$")


@pytest.mark.slow
def test_evidence_becomes_results_and_that_of_another_model_is_refused(trained, tmp_path):
    best, other = trained / "chat" / "best", trained / "plain" / "best"
    measured = tmp_path / "evaluate.json"
    words = ("--data", trained / "held_out.jsonl", "--device", "cpu")
    succeeded("evaluate", "--checkpoint", best, *words, "--json", measured)
    text, _ = exported(best, tmp_path / "out", "--evidence", measured)
    (result,) = ModelCard(text).data.eval_results
    accuracy = json.loads(measured.read_text())["metrics"]["pairwise_accuracy"]
    assert result.metric_value == round(accuracy["value"], 4)
    assert result.metric_args["n"] == accuracy["num"]
    assert result.metric_args["ci_low"] == round(accuracy["ci_low"], 4)
    assert result.dataset_name == "held_out.jsonl"
    words = ("--out", tmp_path / "other", "--evidence", measured)
    status, _, errors = rm_opt("export", "--checkpoint", other, *words)
    assert status == 2
    assert "was measured of another checkpoint" in errors


@pytest.mark.slow
def test_the_run_that_trained_it_is_found_by_its_place(trained, tmp_path):
    key = "ab" * 32
    artifact = tmp_path / "store" / "train" / f"tiny-{key[:12]}"
    shutil.copytree(trained / "chat", artifact)
    (artifact / "settings.json").unlink()
    manifest = {"key": key, "inputs": {"config": {"seed": 0, "model": {"name": "tiny"}, "train": {}}}}
    (artifact / "MANIFEST.json").write_text(json.dumps(manifest))
    results = report_sample.results()
    results["stages"] = [{"name": "train", "key": key}]
    report = tmp_path / "reports" / "demo-0123456789ab"
    report.mkdir(parents=True)
    (report / "summary.json").write_text(json.dumps(results))
    text, said = exported(artifact / "best", tmp_path / "out")
    assert results["verdict"]["headline"] in said
    verdict = ModelCard(text).data.to_dict()[OWN_KEY]["verdict"]
    assert (verdict["status"], verdict["headline"]) == (results["verdict"]["status"], results["verdict"]["headline"])
    assert "run demo-0123456789ab" in text


@pytest.mark.parametrize(
    "manifest", [{}, {"key": "ab"}, {"key": "ab", "inputs": None}, {"key": "ab", "inputs": {"config": 3}}]
)
def test_a_manifest_of_another_kind_is_that_of_no_store(manifest, tmp_path):
    best = tmp_path / "best"
    best.mkdir()
    for path, told in ((best / "config.json", {}), (tmp_path / "training.json", {}), (tmp_path / MANIFEST, manifest)):
        path.write_text(json.dumps(told))
    origin = find_origin(best)
    assert (origin.training, origin.settings, origin.run) == ({}, {}, None)


def test_evidence_that_cannot_be_read_is_told_before_anything_is_loaded(trained, tmp_path):
    words = ("--checkpoint", trained / "chat" / "best", "--evidence", trained / "chat" / "metrics.csv")
    status, _, errors = rm_opt("export", *words, "--out", tmp_path / "out")
    assert status == 2
    assert "metrics.csv cannot be read as a JSON object" in errors
    assert not (tmp_path / "out").exists()
