"""What a report says of work that has parts."""

import io
import sys

import pytest

from rmcore.core.progress import counting_on, labelled, within


def test_parts_tell_a_report_of_the_whole():
    told = []

    def report(*state):
        told.append(state)

    labelled(report, "sides scored")(3, 8, "sides")
    counting_on(report, 2, 4)(3, 8, "sides")
    within(report, 1, 5, "seed 1")(3, 8, "entropy")
    assert told == [(3, 8, "sides scored"), (19, 32, "sides"), (1, 5, "seed 1: entropy")]


@pytest.mark.parametrize(("terminal", "said"), [(True, "\nerror: interrupted"), (False, "error: interrupted")])
def test_ctrl_c_is_told_below_its_echo(terminal, said, monkeypatch):
    from rmcore.cli.common import guard

    written = io.StringIO()
    written.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", written)

    def interrupted():
        raise KeyboardInterrupt

    assert guard(interrupted) == 130
    assert written.getvalue().startswith(said)
