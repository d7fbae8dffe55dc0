"""The start page without servers: what it shows where Prefect is away, and what it hands out of a home."""

import json
import socket

import pytest
from starlette.testclient import TestClient

from tasks.start_page import start_page_app


@pytest.fixture
def home(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("PREFECT_API_URL", f"{closed}/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    return tmp_path


@pytest.fixture
def client(home):
    return TestClient(start_page_app(home))


def test_where_prefect_does_not_answer_the_page_says_so_and_shows_the_rest(home, client):
    run = home / "reports" / "mine <b>-seed0-0123456789ab"
    run.mkdir()
    (run / "report.html").write_text("<!doctype html>the report")
    (run / "summary.json").write_text(json.dumps({"verdict": {"status": "ready", "headline": "<script>", "rung": 3}}))
    page = client.get("/")
    assert page.status_code == 200
    assert page.text.count("Prefect does not answer") == 1
    assert "http://127.0.0.1:5000" in page.text
    assert "<script" not in page.text
    assert "&lt;b&gt;" in page.text
    address, all_of_them = [word.split('"')[1] for word in page.text.split("<a ") if word.startswith('href="/reports/')]
    assert client.get(address).text == "<!doctype html>the report"
    assert "mine &lt;b&gt;" in client.get(all_of_them).text


def test_nothing_of_a_home_is_handed_out_but_reports(home, client):
    secret = home / "services" / "password"
    assert secret.is_file()
    for path in (
        "/reports/../services/password",
        "/reports/%2e%2e/services/password",
        "/services/password",
        "/reports",
    ):
        assert client.get(path).status_code in (404, 405)
    (home / "reports" / "link").symlink_to(secret)
    assert client.get("/reports/link").status_code == 404


def test_a_switch_says_what_it_takes_and_that_prefect_is_away(client):
    assert client.post("/schedules/a/b", content="active=perhaps").status_code == 400
    assert client.post("/schedules/a/b", content=b"\xff").status_code == 400
    assert client.post("/schedules/a/b", content="active=on&active=off").status_code == 400
    refused = client.post("/schedules/a/b", content="active=on", follow_redirects=False)
    assert refused.status_code == 502
    assert "did not switch" in refused.text
    assert client.get("/schedules/a/b").status_code == 405
