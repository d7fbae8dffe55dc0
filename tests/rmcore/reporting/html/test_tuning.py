"""The page and the figures of a search: what they say, and that they say it of small and of empty searches too."""

import copy

import numpy as np
import pytest
from matplotlib.image import imread

from rmcore.reporting.figures.numbers import MISSING
from rmcore.reporting.figures.tuning import (
    importance_figure,
    optimism_figure,
    parallel_coordinates_figure,
    trials_history_figure,
)
from rmcore.reporting.figures.tuning_cost import accuracy_cost_figure, pareto_front
from rmcore.reporting.html.tuning import (
    CAPTIONS,
    arm_rows,
    draw_tuning,
    trial_rows,
    tuning_markdown,
    write_tuning_report,
)
from rmcore.reporting.runs import read_runs
from tuning_sample import results

FIGURES = (
    trials_history_figure,
    importance_figure,
    parallel_coordinates_figure,
    accuracy_cost_figure,
    optimism_figure,
)


def texts(figure):
    found = [figure.get_suptitle()]
    for ax in figure.axes:
        found += [ax.get_xlabel(), ax.get_ylabel(), ax.get_title(loc="left"), *(text.get_text() for text in ax.texts)]
    return "\n".join(found)


def test_the_page_has_the_verdict_all_figures_and_the_recipe(tmp_path):
    found = results()
    figures = draw_tuning(found, tmp_path / "figures")
    assert figures.keys() == CAPTIONS.keys()
    assert all(imread(path).min() < 0.5 for path in figures.values())
    page = write_tuning_report(found, figures, "train:\n  lr: 0.0001\n", tmp_path / "report.html").read_text()
    for expected in (found["headline"], "optimism", "helpful-small", "lr: 0.0001", "1.50 at 2 an hour", "(MOVER)"):
        assert expected in page
    assert page.count("data:image/png") == len(figures)
    assert "was not drawn" not in page
    markdown = tuning_markdown(found)
    assert found["headline"].split("[")[0] in markdown
    assert "| train.lr | 5e-05 |" in markdown


def test_the_best_complete_trial_is_listed_first_and_given_up_ones_say_why():
    found = results()
    rows = trial_rows(found)
    assert len(rows) == len(found["trials"])
    assert rows[0][0] == str(found["winner"]["trial"])
    [failed] = [row for row in rows if row[1] == "failed"]
    assert failed[2:4] == [MISSING, MISSING]
    assert failed[-1] == "step 4: loss is not finite"
    assert all(row[-1] for row in rows if row[1] == "pruned")


@pytest.mark.parametrize("draw", FIGURES)
@pytest.mark.parametrize("num_trials", [1, 2, 8])
def test_small_searches_are_drawn_too(draw, num_trials):
    found = results(num_trials)
    draw(found).draw_without_rendering()


def test_a_loss_has_its_unit_and_the_front_goes_down():
    found = results()
    found |= {"objective": "loss", "label": "loss", "unit": "nats", "higher_is_better": False}
    for draw in FIGURES:
        draw(found).draw_without_rendering()
    assert "loss, nats, validation pairs" in texts(trials_history_figure(found))
    assert "better: left and down" in texts(accuracy_cost_figure(found))
    complete = [one for one in found["trials"] if one["state"] == "complete"]
    values = [one["values"][-1] for one in pareto_front(complete, found)]
    assert values == sorted(values, reverse=True)


def test_the_front_is_what_no_other_trial_beats_in_both():
    found = results(60)
    complete = [one for one in found["trials"] if one["state"] == "complete"]
    front = {one["number"] for one in pareto_front(complete, found)}
    for one in complete:
        beaten = any(
            other["train_seconds"] <= one["train_seconds"]
            and other["values"][-1] >= one["values"][-1]
            and (other["train_seconds"], other["values"][-1]) != (one["train_seconds"], one["values"][-1])
            for other in complete
        )
        assert (one["number"] in front) == (not beaten)


def test_few_trials_say_that_they_are_too_few():
    found = results() | {"importance": None}
    assert "too few trials" in texts(importance_figure(found))
    assert "cannot be told" in importance_figure(found).get_suptitle()


def test_where_the_defaults_win_there_is_one_arm():
    found = results()
    found["winner"] = copy.deepcopy(found["defaults"])
    assert len(arm_rows(found)) == 1
    optimism_figure(found).draw_without_rendering()


def test_an_arm_without_interval_is_drawn_as_its_seeds():
    found = results()
    found["winner"]["fresh"] |= {"ci_low": None, "ci_high": None, "reason": "constant"}
    [ax] = optimism_figure(found).axes
    points = np.concatenate([line.get_xdata() for line in ax.lines])
    assert len(points) > 0
    assert "[" not in arm_rows(found)[0][2]


def test_the_list_of_runs_shows_what_a_search_found(tmp_path):
    import json

    folder = tmp_path / "helpful-accuracy-0123456789ab"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(results()))
    [run] = read_runs(tmp_path)
    assert run.headline == results()["headline"]
    assert run.device_seconds == 2700.0
