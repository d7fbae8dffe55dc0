"""The figures of the saving study: every curve and saving is on them, what does not exist is said."""

import numpy as np
import pytest

from rmcore.reporting.figures.active import label_efficiency_figure, label_savings_figure
from rmcore.reporting.figures.style import save

NAMES = ("random", "entropy", "variance", "bald", "d-optimal")
COUNTS = [100, 200, 400, 800]


def study(levels=(0.0, 0.25), missing=()):
    def row(value):
        return {"value": value, "ci_low": value - 0.02, "ci_high": value + 0.02}

    def saving(name, share, value):
        known = (name, share) not in missing
        found = row(value) if known else dict.fromkeys(("value", "ci_low", "ci_high"))
        censored = {"num_seeds": 10, "num_censored_active": 0 if known else 3, "num_censored_random": 0}
        return {"share": share, "target": 0.7, "reason": None} | found | censored

    curves = {
        name: [row(0.6 + 0.02 * np.log(count) + 0.01 * place) for count in COUNTS] for place, name in enumerate(NAMES)
    }
    savings = {
        name: [saving(name, share, 0.1 * place - 0.2) for share in (0.5, 0.8)] for place, name in enumerate(NAMES[1:])
    }
    return {
        "headline": "40% fewer labels: refuted for every acquisition function",
        "claims": [{"threshold": 0.4}, {"threshold": 0.0}],
        "noise": [
            {"noise": noise, "num_labels": COUNTS, "curves": curves, "end": 0.75, "savings": savings}
            for noise in levels
        ],
    }


@pytest.mark.parametrize("levels", [(0.0,), (0.0, 0.1, 0.25)])
def test_each_noise_level_has_a_panel_with_every_curve(levels):
    figure = label_efficiency_figure(study(levels))
    assert len(figure.axes) == len(levels)
    for ax in figure.axes:
        drawn = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
        assert set(drawn) == set(NAMES)
        assert list(drawn["bald"].get_xdata()) == COUNTS
    assert figure.get_suptitle().startswith("40% fewer labels")


def test_savings_have_intervals_and_what_is_censored_is_written():
    figure = label_savings_figure(study(missing={("bald", 0.8)}))
    for ax in figure.axes:
        points = {line.get_label(): len(line.get_xdata()) for line in ax.lines if line.get_label() in NAMES}
        assert points == {"entropy": 2, "variance": 2, "bald": 1, "d-optimal": 2}
        [text] = [one.get_text() for one in ax.texts]
        assert text == "bald: not reached in 3 of 10 seeds"
    low, high = figure.axes[0].get_ylim()
    assert (low, high) == (1.5, -0.5)


@pytest.mark.slow
def test_nothing_reached_at_all_is_still_a_figure(tmp_path):
    everything = {(name, share) for name in NAMES for share in (0.5, 0.8)}
    place = save(label_savings_figure(study(missing=everything)), tmp_path / "savings.png")
    assert place.read_bytes().startswith(b"\x89PNG")
    first = save(label_efficiency_figure(study()), tmp_path / "curves.png").read_bytes()
    assert save(label_efficiency_figure(study()), tmp_path / "again.png").read_bytes() == first
