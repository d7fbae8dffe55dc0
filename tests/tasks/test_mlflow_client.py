"""How long a run waits for MLflow's answers, and what is said of them."""

import pytest
from mlflow.exceptions import MlflowException

from tasks import mlflow_client
from tasks.mlflow_client import IMPATIENT_SECONDS, RETRY_SECONDS, _PersistentClient, in_one_line


class Clock:
    """Time that passes while one sleeps, and not otherwise."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Refusing:
    """A server that refuses every row but one."""

    def log_batch(self, row):
        if row == "good":
            return row
        raise MlflowException("refused", error_code=1)  # BAD_REQUEST


def test_an_error_is_told_without_the_login_of_an_address():
    error = MlflowException("API request to https://me:secret@host/api failed with HTTPSConnectionPool\nmore")
    assert in_one_line(error) == "MlflowException: API request to https://host/api failed with HTTPSConnectionPool"
    assert in_one_line(ValueError("\n")) == "ValueError"


@pytest.mark.slow
def test_what_is_refused_for_good_is_waited_for_once(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(mlflow_client, "time", clock)
    client = _PersistentClient(Refusing())
    for number in range(20):
        with pytest.raises(MlflowException, match="refused"):
            client.log_batch(number)
        assert client.log_batch("good") == "good"
    assert RETRY_SECONDS < clock.now < RETRY_SECONDS + 4 + 19 * (IMPATIENT_SECONDS + 4)
