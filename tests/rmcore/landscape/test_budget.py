"""A time budget gives a work up by its own pace, and only then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.progress import silent
from rmcore.landscape.budget import OutOfTime, TimeBudget


class Clock:
    """Seconds that the work itself moves on."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def steps_done(report, clock, seconds):
    """How many steps of these lengths a work takes before it is given up."""
    for done, took in enumerate(seconds, start=1):
        clock.now += took
        try:
            report(done, len(seconds), "steps")
        except OutOfTime as late:
            return done, late
    return len(seconds), None


@given(st.floats(0.1, 10), st.integers(2, 40), st.floats(0.0, 30), st.floats(0.05, 3))
def test_a_steady_work_is_done_whole_or_given_up_after_two_steps(pace, total, extra, share_of_need):
    clock, need = Clock(), pace * total + extra
    budget = TimeBudget(share_of_need * need / 60, clock)
    done, late = steps_done(budget.kept(silent), clock, [pace + extra, *[pace] * (total - 1)])
    if share_of_need < 0.999 and total > 2:
        assert done <= 2
        assert late.had == pytest.approx(share_of_need * need)
        assert late.needed == pytest.approx(need if done == 2 else pace + extra)
    elif share_of_need > 1.001:
        assert (done, late) == (total, None)


def test_a_work_that_slows_down_is_given_up_on_the_way():
    clock = Clock()
    done, late = steps_done(TimeBudget(1.0, clock).kept(silent), clock, [1.0] * 10 + [20.0] * 10)
    assert 10 < done < 14
    assert late.needed > late.had == 60


def test_the_last_step_ends_the_work_however_late():
    clock = Clock()
    assert steps_done(TimeBudget(1.0, clock).kept(silent), clock, [1.0, 500.0]) == (2, None)


def test_a_count_that_begins_again_has_its_own_pace_and_what_is_left():
    clock = Clock()
    report = TimeBudget(1.0, clock).kept(silent)
    assert steps_done(report, clock, [5.0] * 8) == (8, None)
    assert steps_done(report, clock, [1.0] * 8) == (8, None)
    done, late = steps_done(report, clock, [4.0] * 8)
    assert done <= 3
    assert late.had == pytest.approx(60 - 40 - 8, abs=4.1)


def test_a_share_is_of_what_is_left_and_no_budget_is_no_limit():
    clock = Clock()
    budget = TimeBudget(1.0, clock)
    clock.now += 20
    _, late = steps_done(budget.kept(silent, share=0.5), clock, [30.0, 30.0])
    assert late.had == 20
    unlimited = TimeBudget(None, clock).kept(silent)
    assert steps_done(unlimited, clock, [1e9] * 3) == (3, None)
