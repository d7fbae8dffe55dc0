"""The environment of these tests: a key, and retries that wait for nothing."""

import pytest

from judge_server import KEY


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
