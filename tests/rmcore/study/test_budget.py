"""A budget: lengths of time, what fits, and what is refused with its numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError
from rmcore.study.budget import Budget, Times, parse_duration

TIMES = Times(prepare=5.0, train=100.0, evaluate=10.0)


def test_lengths_of_time_are_read():
    assert [parse_duration(text) for text in ("90s", "60m", "1.5h", " 2 m ")] == [90, 3600, 5400, 120]


@pytest.mark.parametrize("text", ["", "60", "1d", "-5m", "0s", "5 minutes", "m", "1e3s", "nan"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(ConfigError, match="is no length of time; write 90s, 60m or"):
        parse_duration(text)


def test_a_budget_below_one_trial_and_its_confirmation_is_refused_with_the_numbers():
    least = 105 + 3 * (5 + 200 + 20)
    Budget(least, TIMES, 3).check()
    with pytest.raises(ConfigError) as error:
        Budget(least - 1, TIMES, 3).check()
    said = str(error.value)
    assert "12 min 59 s" in said  # the budget
    assert "1 min 45 s" in said  # the first trial
    assert "11 min 15 s" in said  # the confirmation
    assert "at least 13 min 00 s" in said


@given(st.floats(0, 1e5), st.integers(2, 10))
def test_what_fits_leaves_the_confirmation_its_time(spent, seeds):
    budget = Budget(3600, TIMES, seeds)
    fits = budget.fits(spent)
    assert fits == (spent + TIMES.train + budget.confirmation() <= 3600)
    assert not budget.fits(spent, winner=1000) or fits  # a winner that takes longer is confirmed longer
    assert not budget.fits(spent, trial=500) or fits


def test_more_trials_fit_where_most_are_given_up():
    whole, halved = Budget(3600, TIMES, 3).num_trials()
    assert whole == int((3600 - 675 - 5) / 100)
    assert 3 * whole < halved < 4.5 * whole
    assert Budget(3600, TIMES, 3, devices=4).num_trials()[0] > 4 * whole
