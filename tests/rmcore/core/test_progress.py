"""What a report says of work that has parts, and how work tells of itself where nobody sees a bar."""

import io
import os
import re
import subprocess
import sys
import threading

import pytest

from machine import PATIENCE_S
from rmcore.core.progress import counting_on, duration, labelled, progress_lines, within


def test_parts_tell_a_report_of_the_whole():
    told = []

    def report(*state):
        told.append(state)

    labelled(report, "sides scored")(3, 8, "sides")
    counting_on(report, 2, 4)(3, 8, "sides")
    within(report, 1, 5, "seed 1")(3, 8, "entropy")
    assert told == [(3, 8, "sides scored"), (19, 32, "sides"), (1, 5, "seed 1: entropy")]


def test_a_long_work_writes_a_line_now_and_then_also_while_it_says_nothing():
    """And tells how long it will take by what was done since its first report: a resumed one begins in the middle."""
    source, sink = os.pipe()
    with os.fdopen(source) as lines, progress_lines("train", sink, 0.01) as report:
        assert re.match(r"train      begins, \d+\.\d s so far", lines.readline())
        report(100, 300, "")
        assert "100 of 300" in next(line for line in lines if "begins" not in line)
        report(200, 300, "loss 0.431")
        told = next(line for line in lines if "200 of 300" in line)
        assert told.startswith("train      200 of 300 · loss 0.431, ")
        assert told.endswith(" left\n")
        report(1, 300, "seed 1")  # the next part: nothing is known yet of how long it takes
        assert "left" not in next(line for line in lines if "seed 1" in line)
        report(300, 300, "loss 0.43")
        assert "left" not in next(line for line in lines if "300 of 300" in line)
    os.close(sink)


def test_a_reader_that_has_gone_costs_the_work_nothing():
    source, sink = os.pipe()
    with progress_lines("train", sink, 0.01) as report:
        os.close(source)
        report(1, 2, "")
        while any(thread.name == "progress" for thread in threading.enumerate()):
            report(1, 2, "")  # it ends by itself, long before the work does
    os.close(sink)


def test_a_command_whose_standard_error_is_a_file_tells_by_lines(tmp_path):
    """In a process of its own, with the seconds between lines shortened."""
    program = (
        "import rmcore.core.progress as p, time\n"
        "p.LINE_SECONDS = 0.01\n"
        "with p.progress_bar('score') as report:\n"
        "    report(1, 3, 'rows')\n"
        f"    while '1 of 3' not in open({str(tmp_path / 'log')!r}).read(): pass\n"
    )
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", program], stderr=log, check=True, timeout=PATIENCE_S)
    assert "score      1 of 3 · rows, " in (tmp_path / "log").read_text()


def test_durations_are_as_people_say_them():
    assert [duration(s) for s in (3.21, 125, 3599.7, 7800)] == ["3.2 s", "2 min 05 s", "1 h 00 min", "2 h 10 min"]


@pytest.mark.parametrize(("terminal", "said"), [(True, "\nerror: interrupted"), (False, "error: interrupted")])
def test_ctrl_c_is_told_below_its_echo(terminal, said, monkeypatch):
    from rmcore.cli.guard import guard

    written = io.StringIO()
    written.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", written)

    def interrupted():
        raise KeyboardInterrupt

    assert guard(interrupted) == 130
    assert written.getvalue().startswith(said)
