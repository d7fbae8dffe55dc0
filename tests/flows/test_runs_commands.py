"""`rm-opt runs`, `open` and `verdict`: read from a home, without a server; a browser only where there is a display."""

import json

import pytest
from typer.testing import CliRunner

import report_sample
from flows import cli, cli_runs
from flows.unfinished import FOLDER
from rmcore.core.errors import ConfigError
from rmcore.core.processes import this_process

pytestmark = pytest.mark.slow


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """A home with three runs, the last one without a report; no browser is ever started."""
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    for name in cli_runs.DISPLAYS:
        monkeypatch.delenv(name, raising=False)
    for day, name in enumerate(("demo-seed0-aaaa11111111", "demo-seed1-bbbb22222222", "drawn-seed0-cccc33333333"), 1):
        folder = tmp_path / "reports" / name
        folder.mkdir(parents=True)
        record = report_sample.results() | {"created": f"2026-11-0{day}T12:00:00+00:00"}
        (folder / "summary.json").write_text(json.dumps(record if "demo" in name else {"sampling": {}}))
        if "demo" in name:
            (folder / "report.html").write_text("<p>report</p>")
    return tmp_path / "reports"


@pytest.fixture
def opened(monkeypatch):
    addresses = []
    monkeypatch.setattr(cli_runs.webbrowser, "open", lambda address: addresses.append(address) or True)
    return addresses


def typed(*words):
    outcome = CliRunner().invoke(cli.app, list(words), prog_name="rm-opt", catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_runs_are_listed_newest_first_with_verdict_rung_and_accuracy(reports):
    said = typed("runs")
    lines = [line.split() for line in said.splitlines() if "-seed" in line]
    assert [line[0] for line in lines] == ["drawn-seed0-cccc", "demo-seed1-bbbb", "demo-seed0-aaaa"]
    assert "✗ not ready" in said
    assert "0.712 [0.690, 0.734]" in said
    assert " 3 " in said
    assert str(reports / "index.html") in said
    assert "2 older ones: rm-opt runs --limit 3" in typed("runs", "-n", "1")


def test_a_terminal_of_80_columns_shows_every_fact_whole(reports, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = typed("runs").partition("report      ")[0]
    assert max(map(len, table.splitlines())) <= 80
    words = " ".join(table.split())
    for fact in ("demo-seed1-bbbb", "11-02 ", "✗ not ready", "0.712 [0.690, 0.734]", "9 h 53 min", "max_seq_len=512,"):
        assert fact in words
    assert "…" not in table


def test_a_damaged_record_is_listed_with_the_reason(reports):
    file = reports / "demo-seed1-bbbb22222222" / "summary.json"
    file.write_text('{"verdict": {"rung": [3]}}')
    printed = typed("runs")
    assert sum("unreadable" in line for line in printed.splitlines()) == 2  # its row, and the reason
    assert f"{file}: verdict.rung is not as a run writes it" in printed
    assert "demo-seed0-aaaa" in printed
    assert "demo-seed1-bbbb" in typed("runs", "cannot be read")


def test_the_list_holds_what_was_asked_for(reports):
    assert "drawn" not in typed("runs", "Not Ready")
    assert "demo-seed0" in typed("runs", "DEMO-SEED0")
    assert "1 older ones: rm-opt runs 'not ready' --limit 2" in typed("runs", "not ready", "-n", "1")
    assert "none of 3 runs holds 'absent'" in typed("runs", "absent")


def test_a_home_where_nothing_ran_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path / "new"))
    assert "nothing was run to its end yet" in typed("runs")
    with pytest.raises(ConfigError, match="start with `rm-opt run`"):
        typed("open")
    assert not (tmp_path / "new").exists()


def asked_for_a_verdict(*words):
    outcome = CliRunner().invoke(cli.app, ["verdict", *words], prog_name="rm-opt")
    return outcome.exit_code, outcome.stdout


@pytest.mark.parametrize(
    ("status", "rung", "statuses"),
    [
        ("passes", 1, {"passes": 0, "ready": 12, "gained": 12}),
        ("fails", 2, {"passes": 10, "ready": 10, "gained": 10}),
        ("unclear", 2, {"passes": 11, "ready": 11, "gained": 11}),
        ("ready", 3, {"passes": 0, "ready": 0, "gained": 12}),
        ("not_ready", 3, {"passes": 10, "ready": 10, "gained": 10}),
        ("unclear", 3, {"passes": 11, "ready": 11, "gained": 11}),
        ("gained", 4, {"passes": 0, "ready": 0, "gained": 0}),
        ("lost", 4, {"passes": 10, "ready": 10, "gained": 10}),
    ],
)
def test_the_exit_status_of_a_verdict_says_whether_it_is_what_is_required(reports, status, rung, statuses):
    file = reports / "demo-seed1-bbbb22222222" / "summary.json"
    record = json.loads(file.read_text())
    record["verdict"] |= {"status": status, "rung": rung}
    file.write_text(json.dumps(record))
    for required, expected in statuses.items():
        code, said = asked_for_a_verdict("demo-seed1", "--require", required)
        found = json.loads(said)
        assert (code, found["exit_status"], found["verdict"]) == (expected, expected, record["verdict"])
        assert (found["run"], found["required"]) == ("demo-seed1-bbbb22222222", required)


def test_a_run_without_a_verdict_is_none_that_a_gate_could_pass(reports):
    for words, said in (([], "drawn-seed0-cccc33333333 has no verdict on a reward model"), (["absent"], "no run")):
        with pytest.raises(ConfigError, match=said):
            CliRunner().invoke(cli.app, ["verdict", *words], catch_exceptions=False)
    assert asked_for_a_verdict("demo-seed0")[0] == 10
    (reports / "demo-seed0-aaaa11111111" / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match=r"has no verdict .*: its record cannot be read"):
        CliRunner().invoke(cli.app, ["verdict", "demo-seed0"], catch_exceptions=False)


@pytest.mark.parametrize("owner", [None, this_process()])
def test_a_gate_does_not_take_the_verdict_of_an_older_run_for_that_of_one_that_has_not_ended(reports, owner):
    (reports / "drawn-seed0-cccc33333333" / "summary.json").unlink()
    file = reports / FOLDER / "demo-seed2.json"
    file.parent.mkdir()
    record = {"name": "demo-seed2", "started": "2026-11-02T11:00:00+00:00", "owner": owner, "config": {}}
    file.write_text(json.dumps(record))
    assert json.loads(asked_for_a_verdict()[1])["run"] == "demo-seed1-bbbb22222222"  # it ended an hour later
    file.write_text(json.dumps(record | {"started": "2026-11-02T13:00:00+00:00"}))
    with pytest.raises(ConfigError, match="demo-seed2, begun .* is still running" if owner else "has not ended well"):
        CliRunner().invoke(cli.app, ["verdict"], catch_exceptions=False)
    assert asked_for_a_verdict("demo-seed1")[0] == 10


def test_without_a_display_the_path_is_printed(reports, opened):
    assert str(reports / "demo-seed1-bbbb22222222" / "report.html") in typed("open")
    assert str(reports / "demo-seed0-aaaa11111111" / "report.html") in typed("open", "demo-seed0")
    assert opened == []


def test_the_report_is_opened_where_there_is_a_display(reports, opened, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    typed("open", "demo-seed0", "--print")
    assert opened == []
    typed("open", "demo-seed0")
    assert opened == [(reports / "demo-seed0-aaaa11111111" / "report.html").as_uri()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo"], "'demo' may be demo-seed1-bbbb22222222, demo-seed0-aaaa11111111"),
        (["none"], "no run 'none'"),
        (["drawn"], "has no report of its own"),
    ],
)
def test_what_cannot_be_opened_is_named(reports, words, said):
    with pytest.raises(ConfigError, match=said):
        typed("open", *words)


def test_the_shell_completes_names_of_runs(reports):
    asked = {"_RM_OPT_COMPLETE": "complete_bash", "COMP_WORDS": "rm-opt open demo-seed1", "COMP_CWORD": "2"}
    outcome = CliRunner().invoke(cli.app, [], prog_name="rm-opt", env=asked)
    assert outcome.output.split() == ["demo-seed1-bbbb22222222"]
