"""The page of a search: the verdict, both arms, every trial with why it ended, and the recipe."""

from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.page import write_block_report
from rmcore.reporting.html.tuning import arm_rows, tuning_block
from tuning_sample import results


def test_the_page_has_the_verdict_the_arms_the_space_all_trials_and_the_recipe(tmp_path):
    found = results()
    block = tuning_block(found, "train:\n  lr: 0.0001\n")
    page = write_block_report("a", block, {}, tmp_path / "report.html").read_text()
    for expected in (
        found["headline"],
        "(MOVER)",
        "logarithmic",
        "lr: 0.0001",
        "1.50 at 2 an hour",
        "looked at before",
    ):
        assert expected in page
    [trials] = [part.tables[0] for part in block.parts if part.title == "The trials"]
    for one, row in zip(found["trials"], trials.rows, strict=True):
        assert row[:2] == [str(one["number"]), one["state"]]
        assert one["why"] in page
    assert "recipe.yaml" not in markdown(tuning_block(found))  # which sums up


def test_a_search_that_the_defaults_win_has_one_arm():
    assert len(arm_rows(results())) == 2
    assert [row[0] for row in arm_rows(results() | {"winner_trial": 0})] == ["defaults, trial 0"]
