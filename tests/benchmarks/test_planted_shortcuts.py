"""benchmarks/planted_shortcuts.py on a small model: a planted shortcut is found, marks that decide nothing are not."""

from collections import Counter
from pathlib import Path

import pytest

from rmcore.config.data import GoldConfig
from rmcore.data.gold.world import generate_pairs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def planted_shortcuts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planted_shortcuts

    return planted_shortcuts


def test_marks_decide_nothing_but_that_of_the_shortcut(planted_shortcuts):
    pairs = generate_pairs(GoldConfig(num_prompts=400, shortcut="none"), 0).pairs
    word = "quintessentially"
    sides = {
        shortcut: Counter(
            side
            for pair in planted_shortcuts.mark_pairs(pairs, 0, shortcut)
            for side in ("chosen", "rejected")
            if word in getattr(pair, side)
        )
        for shortcut in (None, "magic_word")
    }
    assert abs(sides[None]["chosen"] - sides[None]["rejected"]) <= 1
    assert sides[None]["chosen"] > 10
    assert sides["magic_word"]["rejected"] == 0
    assert sides["magic_word"]["chosen"] == pytest.approx(planted_shortcuts.SHARE * len(pairs), rel=0.15)


@pytest.mark.slow
def test_a_planted_word_is_found_and_marks_at_random_are_not(planted_shortcuts):
    found, clean = (
        planted_shortcuts.train_and_probe(case, 7, num_trained=250, steps=60)
        for case in ("magic_word", planted_shortcuts.NOTHING)
    )
    assert "magic_word" in found.violated
    assert not clean.violated
