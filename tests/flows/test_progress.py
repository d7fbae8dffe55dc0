"""The bar of a flow run: what it counts, how often it is drawn, and that nothing of it ends a run."""

import threading

import pytest

from flows.console import Progress, drawn
from machine import PATIENCE_S
from rmcore.core.errors import ServiceError


def test_the_parts_that_are_done_and_the_shares_of_those_that_run_add_up():
    progress = Progress("cells", 4)
    with progress.part("a") as hear_a:
        with progress.part("b") as hear_b:
            hear_a(0.25)
            hear_b(0.5)
            assert progress.shown() == (18.75, "0 of 4 cells done; a at 25 %, b at 50 %")
        assert progress.shown() == (31.25, "1 of 4 cells done; a at 25 %")
        with pytest.raises(KeyError), progress.part("c"):
            raise KeyError  # a cell that fails is done with, too
    assert progress.shown() == (75.0, "3 of 4 cells done")


def test_it_is_drawn_once_a_while_and_at_the_end_and_a_server_that_is_away_changes_nothing():
    seen, away = [], threading.Event()

    def draw(percent, text):
        seen.append(percent)
        away.set()
        raise ServiceError("Prefect does not answer")

    progress = Progress("stages", 2)
    with drawn(progress, draw, seconds=600):
        for name in ("prepare", "train"):
            with progress.part(name) as hear:
                hear(0.5)
                assert away.wait(timeout=PATIENCE_S)
    assert seen[-1] == 100.0
    assert len(seen) == 2  # the first change and the end, whatever came between them
