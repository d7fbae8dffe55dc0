"""The commands as a user types them. Every failure is one clear message, never a traceback."""

import gzip
import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from safetensors.torch import load_file, save_file

from command_line import rm_opt, succeeded
from machine import PATIENCE_S
from rmcore.cli.guard import guard
from rmcore.cli.measure import num_trained_on
from rmcore.core.errors import JudgementsWantedError
from rmcore.data.table import read_pairs, write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.seal import PREFERENCE_FILE, write_seal
from rmcore.stages.stages import CURVATURE, stage_of_metric


@pytest.mark.slow
def test_the_console_script_fails_without_a_traceback(tmp_path):
    script = Path(sys.executable).with_name("rm-opt")
    command = [script, "data", "check", tmp_path / "absent.csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "absent.csv" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_info_tells_versions_and_hardware():
    shown = dict(line.split(maxsplit=1) for line in succeeded("info").splitlines())
    assert {"torch", "transformers", "peft", "prefect", "mlflow", "vllm", "CUDA", "GPU", "device", "home"} <= set(shown)


@pytest.fixture(scope="module")
def files(tmp_path_factory, gold_pairs):
    folder = tmp_path_factory.mktemp("cli")
    write_pairs(gold_pairs[:60], folder / "train.parquet")
    write_pairs(gold_pairs[60:100], folder / "test.parquet")
    return folder


TINY = ["--model", "tiny", "--max-seq-len", "96", "--batch-size", "8", "--log-every", "2", "--warmup-steps", "0"]


@pytest.fixture(scope="module")
def checkpoint(files):
    """The best one of a short training."""
    pairs = ["--data", files / "train.parquet", "--eval-data", files / "test.parquet", "--output-dir", files / "a"]
    succeeded("train", *TINY, *pairs, "--steps", 3, "--eval-every", 2, "--lr", "1e-3")
    return files / "a" / "best"


@pytest.mark.slow
def test_evaluate_shows_intervals_and_takes_beta_from_the_checkpoint(checkpoint, files, tmp_path):
    """No option names beta; the rewards that are written stay raw."""
    shutil.copytree(checkpoint, tmp_path / "model")
    records, rewards = {}, {}
    for beta in (1.0, 0.25):
        (tmp_path / "model" / PREFERENCE_FILE).write_text(json.dumps({"beta": beta}))
        write_seal(tmp_path / "model")
        named = ["--checkpoint", tmp_path / "model", "--data", files / "test.parquet"]
        places = ["--json", tmp_path / "numbers.json", "--rewards", tmp_path / "rewards.parquet"]
        said = succeeded("evaluate", *named, *places)
        assert said.index("It prefers the right side in ") < said.index("pairwise_accuracy")
        assert said.count(" to ") > 20  # intervals
        records[beta] = json.loads((tmp_path / "numbers.json").read_text())
        rewards[beta] = pd.read_parquet(tmp_path / "rewards.parquet")
        assert records[beta]["beta"] == beta
        margin = rewards[beta]["reward_chosen"].to_numpy(float) - rewards[beta]["reward_rejected"].to_numpy(float)
        assert records[beta]["metrics"]["loss"]["value"] == pytest.approx(np.logaddexp(0, -beta * margin).mean())
    pd.testing.assert_frame_equal(rewards[1.0], rewards[0.25])
    temperatures = [records[beta]["metrics"]["temperature"]["value"] for beta in (1.0, 0.25)]
    assert temperatures[0] is temperatures[1] is None or temperatures[0] == pytest.approx(4 * temperatures[1])


@pytest.mark.slow
def test_readiness_of_labelled_pairs_passes_a_model_that_they_speak_for(checkpoint, files, tmp_path):
    """Labels that the model agrees with, and a scale of its margins that makes it sure of them."""
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / PREFERENCE_FILE).write_text(json.dumps({"beta": 1e4}))
    write_seal(tmp_path / "model")
    rm = BradleyTerryRM.from_pretrained(str(tmp_path / "model"), device="cpu")
    for name in ("train", "test"):
        pairs = []
        for pair in read_pairs(files / f"{name}.parquet"):
            rewards = rm.score([pair.prompt] * 2, [pair.chosen, pair.rejected])
            turned = {"chosen": pair.rejected, "rejected": pair.chosen} if rewards[0] < rewards[1] else {}
            pairs.append(replace(pair, **turned))
        write_pairs(pairs, file := tmp_path / f"{name}.parquet")
        pd.read_parquet(file).rename(columns={"prompt": "question"}).to_parquet(file)
    out = tmp_path / "verdict.json"
    shared = ["--checkpoint", tmp_path / "model", "--data", tmp_path / "test.parquet", "--json", out]
    shared += ["--prompt-column", "question", "--device", "cpu"]
    shared += ["--num-pairs", 4] if stage_of_metric(CURVATURE) else []
    for words, status, unmeasured in (
        (["--train-data", tmp_path / "train.parquet"], "passes", set()),
        ([], "unclear", {"train_test_gap"}),
    ):
        said = succeeded("readiness", "pairs", *shared, *words)
        record = json.loads(out.read_text())
        assert record["verdict"]["headline"] in said
        assert record["next_rung"]["command"] in said
        assert {check["name"] for check in record["gate"] if check["value"] is None} == unmeasured
        assert record["verdict"]["status"] == status
        again = shlex.split(record["next_rung"]["command"])
        assert {"--device", "cpu"} <= set(again) or 'device="cpu"' in again
        assert "--prompt-column" in again or 'data.prompt_column="question"' in again


@pytest.mark.slow
def test_diff_is_the_first_model_minus_the_second(checkpoint, tiny_folder, files):
    out = files / "diff.json"
    succeeded("diff", checkpoint, tiny_folder, "--data", files / "test.parquet", "--json", out)
    compared = json.loads(out.read_text())["comparison"]
    accuracies = []
    for folder in (checkpoint, tiny_folder):
        rewards = BradleyTerryRM.from_pretrained(folder, device="cpu").score_pairs(read_pairs(files / "test.parquet"))
        accuracies.append((rewards[:, 0] > rewards[:, 1]).sum() / (rewards[:, 0] != rewards[:, 1]).sum())
    assert [compared[name]["value"] for name in ("accuracy_a", "accuracy_b")] == pytest.approx(accuracies)
    assert accuracies[0] != accuracies[1]
    assert compared["accuracy_difference"]["value"] == pytest.approx(accuracies[0] - accuracies[1])


@pytest.mark.slow
def test_a_dry_run_tells_the_cost_and_writes_nothing(files):
    before = set(files.iterdir())
    said = succeeded("train", *TINY, "--data", files / "train.parquet", "--output-dir", files / "dry", "--dry-run")
    assert set(files.iterdir()) == before
    for word in ("steps", "tokens", "memory", "time"):
        assert word in said


@pytest.fixture(scope="module")
def broken(files):
    """Files that cannot be used, by name."""
    (files / "empty.jsonl").write_text("")
    (files / "columns.csv").write_text("question,better,worse\na,b,c\n")
    (files / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 99)[:-9])
    return files


@pytest.fixture(scope="module")
def unusable(checkpoint, files):
    """Checkpoints that give no reward, by name."""
    for name in ("no_vocabulary", "nan", "overflowing"):
        shutil.copytree(checkpoint, files / name)
    (files / "no_vocabulary" / "tokenizer.json").unlink()
    for name, value in (("nan", float("nan")), ("overflowing", 3e38)):
        weights = load_file(files / name / "model.safetensors")
        weights["score.weight"].fill_(value)
        save_file(weights, files / name / "model.safetensors", metadata={"format": "pt"})
    for name in ("no_vocabulary", "nan", "overflowing"):
        write_seal(files / name)
    return files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "{d}/absent.parquet"], "absent.parquet"),
        (["--data", "{d}/empty.jsonl"], "empty"),
        (["--data", "{d}/columns.csv"], "--prompt-column"),
        (["--data", "{d}/cut.jsonl.gz"], "cut.jsonl.gz"),
        (["--data", "{d}/train.parquet", "--lr", "-1"], "train.lr"),
        (["--data", "{d}/train.parquet", "--optimizer", "adamm"], "'adamm' is not one of 'adamw'"),
        (["--data", "{d}/train.parquet", "--num-processes", "3"], "does not divide among num_processes=3"),
        (["--data", "{d}/train.parquet", "--leraning-rate", "1"], "No such option: --leraning-rate"),
        (["--data", "{d}/train.parquet", "--preset", "h300"], "choose one of h100, h200, cpu, smoke"),
        (["--data", "{d}/train.parquet", "--render-fn", "nowhere:f"], "nowhere cannot be imported"),
        (["--data", "{d}/train.parquet", "--max-seq-len", "5000"], "positions for 1024"),
        (["--data", "{d}/train.parquet", "--micro-token-budget", "20"], "cannot hold one pair"),
        (["--data", "{d}/train.parquet", "--lora-rank", "4"], "--lora-rank without --lora"),
        (["--data", "{d}/train.parquet", "--hf-dataset", "x/y"], "--data FILE for local data"),
        (["--hf-dataset", "no/where"], "no/where"),
        (["--data", "{d}/train.parquet", "--model", "{d}/absent"], "could not be loaded"),
        (["--data", "{d}/train.parquet", "--lr", "1e30", "--clip", "1e30", "--optimizer", "sgd"], "not finite"),
        (["--data", "{d}/train.parquet", "--device", "cuda"], "device=cuda"),
        (["--data", "{d}/train.parquet", "--model", "{d}/no_vocabulary"], "loses text"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_is_one_clear_error(broken, unusable, tmp_path, arguments, said):
    given = [argument.format(d=broken) for argument in arguments]
    own = [flag for flag in ("--model", "--max-seq-len") if flag in given]
    base = [x for flag, value in zip(TINY[::2], TINY[1::2], strict=True) if flag not in own for x in (flag, value)]
    done = rm_opt("train", *base, "--output-dir", tmp_path / "out", *given)
    assert done.status == 2
    assert said in done.err
    assert not (tmp_path / "out" / "best").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["score", "--out", "{d}/rewards.parquet"], ["evaluate", "--json", "{d}/numbers.json"]]
)
@pytest.mark.parametrize(
    ("name", "said"), [("no_vocabulary", "loses text"), ("nan", "score.weight"), ("overflowing", "chosen of pair ")]
)
def test_a_model_that_gives_no_rewards_is_one_clear_error(unusable, tmp_path, command, name, said):
    given = [argument.format(d=tmp_path) for argument in command]
    done = rm_opt(*given, "--checkpoint", unusable / name, "--data", unusable / "test.parquet")
    assert done.status == 2
    assert said in done.err
    assert not list(tmp_path.iterdir())


def test_a_finished_training_is_not_overwritten(checkpoint, files):
    done = rm_opt("train", *TINY, "--data", files / "train.parquet", "--output-dir", files / "a")
    assert done.status == 2
    assert "already holds a finished training" in done.err


@pytest.mark.slow
def test_early_stopping_can_be_switched_off(files, tmp_path):
    out = tmp_path / "out"
    succeeded(
        "train", *TINY, "--data", files / "train.parquet", "--eval-data", files / "test.parquet", "--steps", 8,
        "--eval-every", 1, "--lr", "1e-12", "--no-early-stopping", "--output-dir", out,
    )  # fmt: skip
    assert json.loads((out / "training.json").read_text())["num_steps"] == 8


def test_waiting_for_people_is_no_error(capsys):
    def command():
        raise JudgementsWantedError("24 of 24 pairs wait to be judged in to_judge/1.csv")

    assert guard(command) == 3
    assert capsys.readouterr().err == "waiting: 24 of 24 pairs wait to be judged in to_judge/1.csv\n"


def test_ctrl_c_in_a_command_says_once_that_it_was_interrupted(capsys):
    interrupted = typer.Typer()

    @interrupted.command()
    def command():
        raise KeyboardInterrupt

    assert guard(lambda: interrupted([], standalone_mode=False)) == 130
    assert capsys.readouterr().err.count("interrupted. Finished stages") == 1


@pytest.mark.slow
def test_pairs_that_a_checkpoint_was_trained_on_are_counted_and_others_are_not(files, checkpoint, tmp_path):
    """By the settings beside a training; else nothing is known."""
    train, test = (list(read_pairs(files / f"{name}.parquet")) for name in ("train", "test"))
    out = tmp_path / "out"
    shutil.copytree(checkpoint, out / "best")
    assert num_trained_on(str(out / "best"), train) == 0
    (out / "settings.json").write_text(json.dumps({"data": {"source": str(files / "train.parquet")}}))
    assert num_trained_on(str(out / "best"), [*test, *train[:5]]) == 5
    done = rm_opt("evaluate", "--checkpoint", out / "best", "--data", files / "train.parquet")
    assert f"{len(train)} of these {len(train)} pairs are pairs that it was trained on" in done.err
