"""Files whose names are not UTF-8 are read and written, and printed to whatever standard output there is; names with
escapes in them do not drive the terminal.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmcore.cli import app
from rmcore.cli.guard import FAILED, guard
from rmcore.data.readers.sources import load_pairs, source_digest

RM_OPT = Path(sys.executable).with_name("rm-opt")
NAME = os.fsdecode(b"caf\xe9")
ROW = {"prompt": "p\u00e9\u4e2d", "chosen": "a", "rejected": "b"}


def rm_opt(*args, encoding):
    environment = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}
    return subprocess.run([RM_OPT, *map(str, args)], capture_output=True, env=environment, check=False)


@pytest.mark.slow
def test_data_commands(tmp_path):
    source = tmp_path / f"{NAME}.jsonl"
    source.write_text(json.dumps(ROW, ensure_ascii=False) + "\n", encoding="utf-8")
    report = tmp_path / f"{NAME}.json"
    checked = rm_opt("data", "check", source, "--json", report, encoding="ascii")
    assert (checked.returncode, checked.stderr) == (0, b"")
    assert json.loads(report.read_text())["num_pairs"] == 1
    for form in ("parquet", "jsonl"):
        target = tmp_path / f"{NAME}-out.{form}"
        converted = rm_opt("data", "convert", source, target, encoding="ascii")
        assert (converted.returncode, converted.stderr) == (0, b"")
        assert load_pairs(str(target)).pairs == load_pairs(str(source)).pairs
    absent = rm_opt("data", "check", tmp_path / f"{NAME}.csv", encoding="ascii")
    assert absent.returncode == 2
    assert absent.stderr.startswith(b"error: ")
    assert b"Traceback" not in absent.stderr


@pytest.mark.slow
def test_what_a_library_cannot_open_is_named(tmp_path):
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps({**ROW, "prompt": f"p{i}"}) + "\n" for i in range(40)))
    done = rm_opt("train", "-m", "tiny", "-d", source, "--output-dir", tmp_path / NAME, encoding="utf-8")
    assert (done.returncode, b"is not UTF-8" in done.stderr, b"Traceback" in done.stderr) == (2, True, False)


def test_names_that_drive_a_terminal_are_printed_as_text(tmp_path, capsys):
    source = tmp_path / "\x1b]0;title\x07\x9b2J.jsonl"
    source.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"chosen": "b"}) + "\n")
    absent = ["data", "check", f"{source}.csv"]
    for words, status in (
        (["data", "check", source], 0),
        (["data", "convert", source, f"{source}.parquet"], 0),
        (absent, FAILED),
    ):
        assert guard(lambda words=words: app([*map(str, words)], standalone_mode=False)) == status
    shown = capsys.readouterr()
    assert "title" in shown.out
    assert "title" in shown.err
    assert all(line.isprintable() for line in (shown.out + shown.err).split("\n"))


def test_a_folder(tmp_path):
    folder = tmp_path / NAME / "data"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    assert len(load_pairs(str(tmp_path / NAME)).pairs) == 1
    assert source_digest(str(tmp_path / NAME))
