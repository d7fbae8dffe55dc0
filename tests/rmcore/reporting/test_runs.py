"""What was run is read from the records next to the reports, whatever else is there, and listed on one safe page."""

import json
import os
from datetime import UTC, datetime

import pytest

import experiment_sample
import report_sample
from rmcore.core.errors import ConfigError
from rmcore.reporting.runs import INDEX, find_run, read_runs, run_row, short_names, write_index


@pytest.fixture
def reports(tmp_path):
    return tmp_path / "reports"


def lay(reports, name, record, *, page=True):
    folder = reports / name
    folder.mkdir(parents=True)
    (folder / "summary.json").write_bytes(record if isinstance(record, bytes) else json.dumps(record).encode())
    if page:
        (folder / "report.html").write_text("<p>report</p>")


def index_page(reports):
    write_index(reports)
    return (reports / INDEX).read_text(encoding="utf-8")


def pipeline(**verdict):
    record = report_sample.results()
    record["verdict"] |= verdict
    return record


def test_a_run_of_the_pipeline_is_told_by_its_record(reports):
    lay(reports, "demo-seed7-0123456789ab", pipeline())
    [run] = read_runs(reports)
    assert (run.name, run.status, run.rung) == ("demo-seed7-0123456789ab", "not ready", "3 of 4")
    assert run.headline.startswith("Not ready for a KL of 3 nats")
    assert run.style.tone == "bad"
    assert (run.accuracy["value"], run.accuracy["ci_low"]) == (0.712, pytest.approx(0.69))
    assert run.device_seconds == pytest.approx(sum(3.2 * 10**index for index in range(1, 5)))
    assert run.finished == datetime(2026, 11, 21, 1, 30, tzinfo=UTC)
    assert run.report == reports / run.name / "report.html"


def test_an_experiment_counts_its_verdicts_and_its_cells_time(reports):
    record = experiment_sample.results()
    lay(reports, "ablation-smoke-0123456789ab", record)
    [run] = read_runs(reports)
    assert "refuted" in run.headline
    assert run.headline == run.status
    assert (run.rung, run.accuracy) == ("", None)
    assert run.device_seconds == record["cost"]["device_seconds"]


@pytest.mark.parametrize(
    ("record", "headline", "status"),
    [
        ({"verdict": {"status": "unclear", "headline": "Unclear", "rung": 4}}, "Unclear", "unclear"),
        ({"verdict": "H1 is inconclusive"}, "H1 is inconclusive", ""),
        ({"headline": "40 % fewer labels"}, "40 % fewer labels", ""),
        ({"sampling": {}}, "no verdict: it measured, and judged nothing", ""),
    ],
)
def test_other_runs_say_what_they_have(reports, record, headline, status):
    lay(reports, "other", record, page=False)
    [run] = read_runs(reports)
    assert (run.headline, run.status) == (headline, status)
    assert (run.accuracy, run.device_seconds, run.report) == (None, None, None)


@pytest.mark.parametrize(
    "content",
    [
        b'{"verdict": {"status": "ready"',
        b"\0" * 4096,
        b'{"a":' + b"[" * 100_000,
        b"[1]",
        b'{"headline": "\\ud800"}',
        b'{"verdict": {"status": {"now": "ready"}}, "stages": {"train": 3}}',
        b'{"created": "yesterday"}',
        None,
    ],
    ids=["cut", "NULs", "nested deeply", "a list", "half a character", "other fields", "no moment", "a folder"],
)
def test_a_damaged_record_is_shown_as_unreadable_with_the_reason_and_hides_no_other(reports, content):
    lay(reports, "good", {"headline": "fine"})
    if content is None:
        (reports / "damaged" / "summary.json").mkdir(parents=True)
    else:
        lay(reports, "damaged", content)
    runs = {run.name: run for run in read_runs(reports)}
    assert runs["good"].problem is None
    assert runs["damaged"].problem
    assert run_row(runs["damaged"])["finished"]
    assert index_page(reports).count("cannot be read") == 1


def test_a_record_that_names_a_path_that_is_not_utf8_is_listed(reports):
    lay(reports, "named", b'{"headline": "fine", "config": {"data": {"source": "caf\\udce9.csv"}}}')
    [run] = read_runs(reports)
    assert (run.problem, run.headline) == (None, "fine")
    assert "cannot be read" not in index_page(reports)


def test_the_newest_comes_first_and_nothing_is_no_error(reports):
    assert read_runs(reports) == []
    for name, day in (("b", "02"), ("a", "03"), ("c", "01")):
        lay(reports, name, {"created": f"2026-11-{day}T00:00:00+00:00"})
    assert [run.name for run in read_runs(reports)] == ["a", "b", "c"]


def test_a_run_is_found_by_the_shortest_name_by_its_key_and_by_no_other(reports):
    with pytest.raises(ConfigError, match="nothing was run yet"):
        find_run([], "demo")
    names = ["demo-seed0-aaaa11111111", "demo-seed0-aaaa22222222", "demo-seed0-bbbb33333333", "mine", "mine-seed1"]
    short = short_names(names)
    assert list(short.values()) == ["demo-seed0-aaaa1", "demo-seed0-aaaa2", "demo-seed0-bbbb", "mine", "mine-seed1"]
    for name in names:
        lay(reports, name, {})
    runs = read_runs(reports)
    assert all(find_run(runs, short[name]).name == name for name in names)
    assert find_run(runs, "bbbb").name == "demo-seed0-bbbb33333333"
    for name, said in (("2222", "no run '2222'"), ("demo-seed0-aaaa", "'demo-seed0-aaaa' may be demo-seed0-aaaa"),
                       ("demo-seed2", "no run 'demo-seed2'; the newest are .*mine")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            find_run(runs, name)


def test_the_list_links_each_report_shows_its_verdict_and_is_read_by_its_owner_alone(reports, parse):
    lay(reports, "demo-seed7-0123456789ab", pipeline())
    lay(reports, "drawn-seed0-best-of-n-0123456789ab", {"sampling": {}}, page=False)
    before = os.umask(0)
    try:
        page = parse(index_page(reports))
        assert (reports / INDEX).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert sorted(page.values("href")) == [
        "./demo-seed7-0123456789ab/report.html",
        "./drawn-seed0-best-of-n-0123456789ab/summary.json",
    ]
    assert all((reports / link).is_file() for link in page.values("href"))
    for told in ("Not ready for a KL of 3 nats", "3 of 4", "71.2 %", "69.0 to 73.4 %", "2026-11-21 01:30"):
        assert told in page.text.replace("\u00a0", " ")


def test_no_name_and_no_record_can_bring_markup(reports, parse):
    evil = "<script>alert(1)</script>\"'&"
    lay(reports, "odd <b>&amp; javascript:x?#%41", pipeline(headline=evil, status="<i>"))
    page = parse(index_page(reports))
    page.assert_safe()
    assert not {"b", "i", "u", "img"} & set(page.tags)
    assert evil in page.text
    [link] = page.values("href")
    assert link == "./odd%20%3Cb%3E%26amp%3B%20javascript%3Ax%3F%23%2541/report.html"
