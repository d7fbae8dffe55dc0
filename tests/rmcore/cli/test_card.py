"""`rm-opt card` as a user types it: a card that says what is known, and whose snippet gives the model's reward."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from huggingface_hub import ModelCard

import report_sample
from flows.cli import app
from rmcore.cli import card_facts
from rmcore.cli.card_facts import find_origin
from rmcore.cli.guard import guard
from rmcore.core.store import MANIFEST
from rmcore.data.pair import prompt_text
from rmcore.reporting.card.model_card import OWN_KEY, REPOSITORY, read_card

HOSTILE = "a](http:b) <script>$x$ | c.jsonl"
"""Name of a file: a link, HTML, a formula and a new cell, were it Markdown."""


def run(capsys, *words):
    """Status, standard output and standard error of `rm-opt`."""
    status = guard(lambda: app([*map(str, words)], standalone_mode=False))
    said = capsys.readouterr()
    return status, said.out, said.err


def write_pairs(path, pairs):
    rows = ({"prompt": prompt_text(one.prompt), "chosen": one.chosen, "rejected": one.rejected} for one in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, gold_pairs):
    """A training in each format of text, as `rm-opt train` leaves it."""
    folder = tmp_path_factory.mktemp("card")
    data = write_pairs(folder / HOSTILE, gold_pairs[:48])
    held_out = write_pairs(folder / "held_out.jsonl", gold_pairs[48:96])
    for name, flag in (("chat", "--use-chat-template"), ("plain", "--no-use-chat-template")):
        words = ["train", "--model", "tiny", "--data", data, "--eval-data", held_out, "--output-dir", folder / name]
        more = ["--steps", 2, "--max-seq-len", 128, "--lr", "1e-3", "--device", "cpu", flag]
        assert guard(lambda words=words, more=more: app([*map(str, [*words, *more])], standalone_mode=False)) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chat", "plain"])
def test_the_snippet_gives_the_reward_of_rm_opt_score(form, trained, tmp_path, capsys):
    best = trained / form / "best"
    card = tmp_path / "README.md"
    status, said, errors = run(capsys, "card", "--checkpoint", best, "--out", card, "--device", "cpu")
    assert status == 0, errors
    assert "not stated  the model's licence" in said
    snippet = re.search(r"```python\n(.*?)```", card.read_text(), re.DOTALL)[1].replace(REPOSITORY, str(best))
    rows = [("What is 2 + 2?", "It is 4."), ("Sort: pear, fig", "fig, pear\n\nGladly.")]
    space, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(snippet, space)
    data, out = tmp_path / "rows.jsonl", tmp_path / "rewards.parquet"
    data.write_text("".join(json.dumps({"prompt": prompt, "response": answer}) + "\n" for prompt, answer in rows))
    assert run(capsys, "score", "--checkpoint", best, "--data", data, "--out", out, "--device", "cpu")[0] == 0
    scored = pd.read_parquet(out)["reward"].tolist()
    assert [space["reward"](*row) for row in rows] == pytest.approx(scored, abs=1e-5)
    assert float(printed.getvalue()) == pytest.approx(scored[0], abs=1e-5)
    assert float(re.search(r"\)\)  # (-?[\d.]+)\n", snippet)[1]) == pytest.approx(scored[0], abs=1e-4)
    with pytest.raises(ValueError, match="and the model reads 128"):
        space["reward"]("word " * 200, "x")


@pytest.mark.slow
def test_a_training_s_card_says_what_is_known_and_what_is_not(trained, tmp_path, capsys):
    from markdown_it import MarkdownIt

    best, out = trained / "chat" / "best", tmp_path / "card.md"
    assert run(capsys, "card", "--checkpoint", best, "--out", out, "--license", "apache-2.0", "--device", "cpu")[0] == 0
    text = out.read_text()
    card = ModelCard(text)
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    assert (card.data.datasets, card.data.base_model) == (None, None)  # neither is on the hub
    assert card.data.eval_results is None  # validation pairs chose the step
    assert "The kept step was chosen on these pairs" in text
    assert "Nobody judged" in text
    assert "| licence of the pairs | not stated |" in text
    assert re.search(r"\| different pairs that were trained on \| 48, seen \d+ times in all \([\d.]+ passes\) \|", text)
    assert str(trained) not in text  # where things lie is nobody's business
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(card.text)
    assert not re.search("<script|href", page)
    assert "a](http:b) &lt;script&gt;$x$ | c.jsonl" in page.replace("&#36;", "$")


@pytest.mark.slow
def test_evidence_becomes_results_and_that_of_another_model_is_refused(trained, tmp_path, capsys):
    best, other = trained / "chat" / "best", trained / "plain" / "best"
    measured, out = tmp_path / "evaluate.json", tmp_path / "card.md"
    words = ("--data", trained / "held_out.jsonl", "--device", "cpu")
    assert run(capsys, "evaluate", "--checkpoint", best, *words, "--json", measured)[0] == 0
    command = ("card", "--out", out, "--device", "cpu", "--evidence", measured, "--checkpoint")
    assert run(capsys, *command, best)[0] == 0
    (result,) = ModelCard.load(out).data.eval_results
    accuracy = json.loads(measured.read_text())["metrics"]["pairwise_accuracy"]
    assert result.metric_value == round(accuracy["value"], 4)
    assert result.metric_args["n"] == accuracy["num"]
    assert result.metric_args["ci_low"] == round(accuracy["ci_low"], 4)
    assert result.dataset_name == "held_out.jsonl"
    assert "chosen on these" not in out.read_text()
    status, _, errors = run(capsys, *command, other)
    assert status == 2
    assert "was measured of another checkpoint" in errors


@pytest.mark.slow
def test_the_run_that_trained_it_is_found_by_its_place(trained, tmp_path, capsys):
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
    status, said, errors = run(capsys, "card", "--checkpoint", artifact / "best", "--device", "cpu")
    assert status == 0, errors
    assert "run demo-0123456789ab" in said
    own = read_card((artifact / "best" / "README.md").read_text())
    assert (own.status, own.headline) == (results["verdict"]["status"], results["verdict"]["headline"])


@pytest.mark.slow
def test_what_somebody_wrote_is_not_overwritten(trained, tmp_path, capsys):
    out = tmp_path / "README.md"
    command = ("card", "--checkpoint", trained / "chat" / "best", "--out", out, "--device", "cpu")
    assert run(capsys, *command)[0] == 0
    assert run(capsys, *command)[0] == 0  # its own it may
    out.write_text(out.read_text() + "\nOur data are from our shop.\n")
    status, _, errors = run(capsys, *command)
    assert (status, "was changed since" in errors) == (2, True)
    out.write_text("# My model\n")
    status, _, errors = run(capsys, *command)
    assert (status, "was not written by" in errors) == (2, True)
    assert out.read_text() == "# My model\n"
    for content in ("# Mon modèle\n".encode("latin-1"), b"---\na: [\n---\n"):
        out.write_bytes(content)
        status, _, errors = run(capsys, *command)
        assert (status, "was not written by" in errors) == (2, True)


@pytest.mark.parametrize(
    "manifest", [{}, {"key": "ab"}, {"key": "ab", "inputs": None}, {"key": "ab", "inputs": {"config": 3}}]
)
def test_a_manifest_of_another_kind_is_that_of_no_store(manifest, tmp_path):
    best = tmp_path / "best"
    best.mkdir()
    for path, told in ((best / "config.json", {}), (tmp_path / "training.json", {}), (tmp_path / MANIFEST, manifest)):
        path.write_text(json.dumps(told))
    origin = find_origin(str(best))
    assert (origin.training, origin.settings, origin.run) == ({}, None, None)


def test_a_training_near_the_root_lies_in_no_store(tmp_path, monkeypatch):
    (tmp_path / MANIFEST).write_text(json.dumps({"key": "ab", "inputs": {"config": {}}}))
    monkeypatch.chdir(tmp_path)
    assert card_facts._of_store(Path(".")) == (None, None)  # a relative path has as few parents as one near the root


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--checkpoint", "{0}/chat"), "no config.json in it; name {0}/chat/best"),
        (("--checkpoint", "{0}/chat/best", "--license", "my\n: licence"), "is no name of the hub for a licence"),
        (("--checkpoint", "{0}/chat/best", "--evidence", "{0}/chat/metrics.csv"), "metrics.csv cannot be read as JSON"),
    ],
)
def test_wrong_calls_are_told_before_anything_is_loaded(words, says, trained, capsys):
    status, _, errors = run(capsys, "card", *(str(word).format(trained) for word in words))
    assert status == 2
    assert says.format(trained) in errors
    assert OWN_KEY not in errors
