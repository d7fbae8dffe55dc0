"""What commands write: files that are what their names say, and text that any terminal's encoding takes."""

import io
import json
import sys
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from every_command import LEAVES
from flows.cli import main
from flows.console import CONSOLE_VARIABLE, say_notices
from rmcore.cli.guard import guard
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.files import full_places
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.stages import prepare
from rmcore.stages.order import stage_of
from source_sample import lines

LETTERS = "Grüße, 漢字 😀 \u2028"
FILES = {(path, one.name) for path, leaf in LEAVES.items() for one in leaf.params if one.name == "out"}
"""Every option that says where a command writes its result."""


def run(monkeypatch, *words, encoding="ascii"):
    """Exit status of a command line, and what it wrote to a standard output of that encoding."""
    written = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(written, encoding=encoding, write_through=True))
    monkeypatch.setattr(sys, "argv", ["rm-opt", *map(str, words)])
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    with pytest.raises(SystemExit) as ended:
        main()
    text = written.getvalue().decode(encoding)
    monkeypatch.undo()
    return ended.value.code, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "option"), sorted(FILES), ids=lambda one: one if isinstance(one, str) else " ".join(one)
)
def test_a_file_of_another_form_than_its_name_says_is_refused_before_anything_else(tmp_path, monkeypatch, path, option):
    """Its other inputs are not there, and are not looked for. Commands that write a folder say so."""
    [place] = [one for one in LEAVES[path].params if one.name == option]
    words = list(path)
    for one in LEAVES[path].params:
        if one is not place and one.required:
            words += [*one.opts[:1]] * (one.param_type_name == "option") + [str(tmp_path / "absent")]
    out = tmp_path / "result.xyz"
    status, said = run(monkeypatch, *words, *place.opts[:1] * (place.param_type_name == "option"), out)
    said = "".join(said.split())
    assert status == 2, said
    assert not out.is_file()
    writes_folder = "older" in place.help.partition(";")[0] or place.help.startswith("Where to write")
    assert ("nameitso" in said) != writes_folder, said


@pytest.mark.parametrize("path", [(), ("train",)], ids=["root", "train"])
def test_a_help_in_a_frame_is_written_where_the_terminal_knows_ascii_alone(monkeypatch, path):
    status, said = run(monkeypatch, *path, "--help")
    assert (status, "Usage" in said) == (0, True)


def test_letters_that_a_terminal_does_not_know_cost_no_result(tmp_path, monkeypatch):
    rows = [{"prompt": f"{LETTERS} {n}", "chosen": LETTERS, "rejected": "b", "source": LETTERS} for n in range(9)]
    rows.append({"prompt": LETTERS, "chosen": 1, LETTERS: 2})
    data = tmp_path / f"{LETTERS[:5]}.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    status, said = run(monkeypatch, "data", "check", data, "--json", tmp_path / "found.json")
    assert status == 0, said
    assert "Gr\\xfc\\xdfe" in said
    assert json.loads((tmp_path / "found.json").read_text())
    assert run(monkeypatch, "data", "check", tmp_path / LETTERS)[0] == 2
    assert run(monkeypatch, "data", "check", data, encoding="utf-8")[1].count("Grüße") >= 1


def test_processes_that_are_started_spell_out_too(monkeypatch):
    from subprocess import run as start

    for given, expected in (("ascii", "ascii"), ("latin-1:strict", "iso8859-1"), ("", None)):
        monkeypatch.setattr(sys, "argv", ["rm-opt", "--version"])
        monkeypatch.setenv("PYTHONIOENCODING", given)
        with pytest.raises(SystemExit):
            main()
        shown = start(
            [sys.executable, "-c", "import sys; print(sys.stdout.encoding, sys.stdout.errors)"],
            capture_output=True,
            check=True,
        ).stdout.decode()
        assert shown.split()[1] == "backslashreplace"
        assert expected in (None, shown.split()[0])


def test_a_full_disk_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert full_places(0) == ""
    assert f"TMPDIR ({tmp_path}) has" in full_places(2**62)
    assert str(Path.cwd()) in full_places(2**62)

    def write():
        with Path("/dev/full").open("w") as file:  # the error has no name: the file was open already
            file.write("a")

    assert guard(write) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_a_run_says_what_the_audit_warns_of_and_what_was_left_out(tmp_path, monkeypatch, capsys):
    rows = [
        {"prompt": f"p {i}", "a": "x", "b": "y", "winner": "tie" if i % 2 else "a", "margin": -i} for i in range(40)
    ]
    settings = PipelineConfig.model_validate({"data": {"source": lines(rows, tmp_path / "rows.jsonl")}})
    prepare.run(stage_of("prepare", settings), tmp_path, NullTracker(), silent)
    monkeypatch.setenv(CONSOLE_VARIABLE, "1")
    with disable_run_logger():
        say_notices("prepare", tmp_path)
    told = capsys.readouterr().out
    assert "19 of 20 pairs have a negative margin" in told
    assert "20 of 40 rows" in told
