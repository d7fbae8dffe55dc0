"""Cells on other machines: which runs of them are waited for, started again, or given up."""

from datetime import timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed, Pending, Running

from flows import pool
from flows.pool import MOST_RESTARTS, PoolRunner


@pytest.fixture
def judged(monkeypatch):
    """Gives what becomes of a cell whose run has a state at a given time, and the states that runs are set to."""
    now, told = [0.0], []
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(pool, "say", lambda line: None)
    monkeypatch.setattr(PoolRunner, "_start", lambda self, client, plan, attempt: (attempt, uuid4()))
    runner, client = PoolRunner("study", "key"), SimpleNamespace()
    client.set_flow_run_state = lambda run, state, force: told.append((run, state.type.value))
    one = pool._Watched(SimpleNamespace(cell=SimpleNamespace(label="arm seed 0")), 0, uuid4())

    def judge(state, *, at=0.0, ran=timedelta()):
        now[0] = at
        return runner._judge(client, one, FlowRun(id=one.run, flow_id=uuid4(), state=state, total_run_time=ran))

    return judge, one, told


def test_a_cell_that_a_worker_claimed_and_did_not_start_is_given_up_for_another(judged):
    judge, one, told = judged
    late = pool.START_SECONDS + 1
    assert not any((judge(Pending())[0], judge(Running(), at=late)[0], judge(Pending(), at=late)[0]))
    assert told == []
    assert judge(Pending(), at=2 * late) == (False, None)
    assert told == [(one.run, "CRASHED")]
    first = one.run
    assert judge(Crashed(), at=2 * late) == (False, None)
    assert one.run != first
    assert judge(Pending(), at=3 * late) == (False, None)  # the next attempt has time of its own
    assert len(told) == 1


@pytest.mark.parametrize(("ran", "is_over"), [(timedelta(minutes=1), True), (timedelta(hours=8), False)])
def test_only_attempts_that_end_soon_are_counted(judged, ran, is_over):
    """A worker that has machines for hours at a time computes a training of days."""
    judge, _, _ = judged
    ends = [judge(Crashed(message="gone"), ran=ran) for _ in range(MOST_RESTARTS + 1)]
    assert [over for over, _ in ends] == [False] * MOST_RESTARTS + [is_over]
