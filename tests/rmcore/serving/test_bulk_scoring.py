"""Parts that servers share: what was scored is kept, whatever happens to the others."""

import threading

import pandas as pd
import pytest

from machine import PATIENCE_S
from rmcore.core.errors import ServingError
from rmcore.data.parts import Part
from rmcore.ensembles.bulk import ScoredPart
from rmcore.serving import bulk_scoring
from rmcore.serving.bulk_scoring import VllmScorer


@pytest.fixture
def scorer(tmp_path):
    scorer = VllmScorer(str(tmp_path), number=2)
    scorer._free = bulk_scoring.SimpleQueue()
    for sides in ("first server", "second server"):
        scorer._free.put(sides)
    return scorer


def test_parts_come_as_they_are_scored_and_a_slow_one_keeps_no_server_idle(scorer, monkeypatch):
    let_go = threading.Event()

    def score(sides, part):
        assert part.number or let_go.wait(PATIENCE_S)
        return ScoredPart(part.number, pd.DataFrame(), 0, "")

    monkeypatch.setattr(bulk_scoring, "score_part", score)
    numbers = []
    for scored in scorer.scored(map(Part, range(6))):
        numbers.append(scored.number)
        if len(numbers) == 5:  # all others have been through the one server that is left
            let_go.set()
    assert numbers[-1] == 0
    assert sorted(numbers) == [*range(6)]


def test_before_a_failure_is_raised_what_was_scored_is_given(scorer, monkeypatch):
    begun, fails = threading.Event(), threading.Event()

    def score(sides, part):
        if part.number == 0:
            assert begun.wait(PATIENCE_S)
            fails.set()
            raise ServingError("the server is gone.")
        begun.set()
        assert fails.wait(PATIENCE_S)
        return ScoredPart(part.number, pd.DataFrame(), 0, "")

    monkeypatch.setattr(bulk_scoring, "score_part", score)
    parts = scorer.scored(map(Part, range(2)))
    assert next(parts).number == 1
    with pytest.raises(ServingError, match="gone"):
        next(parts)
