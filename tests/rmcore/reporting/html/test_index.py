"""What was run is read from the records beside the reports, whatever else lies there, and listed on one safe page."""

import json
import os
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

import experiment_sample
import report_sample
from rmcore.core.errors import ConfigError
from rmcore.reporting.html.index import run_row, write_index
from rmcore.reporting.runs import INDEX, find_run, read_runs, short_names


@pytest.fixture
def reports(tmp_path):
    return tmp_path / "reports"


def lay(reports, name, record, *, created=None, page=True):
    folder = reports / name
    folder.mkdir(parents=True)
    if created is not None:
        record = record | {"created": created}
    text = record if isinstance(record, str) else json.dumps(record)
    (folder / "summary.json").write_text(text)
    if page:
        (folder / "report.html").write_text("<p>report</p>")
    return folder


def index_page(reports):
    write_index(reports)
    return reports / INDEX


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
    assert run.rung == ""
    assert run.accuracy is None
    assert run.device_seconds == record["cost"]["device_seconds"]


@pytest.mark.parametrize(
    ("record", "headline", "status"),
    [
        ({"verdict": {"status": "unclear", "headline": "Unclear", "rung": 4}}, "Unclear", "unclear"),
        ({"verdict": {"status": "of a later version", "headline": "New"}}, "New", "of a later version"),
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


DAMAGE = {
    "no JSON": b"{'a': 1}",
    "cut": b'{"verdict": {"status": "ready"',
    "binary": bytes(range(256)),
    "empty": b"",
    "NULs": b"\0" * 4096,
    "a list": b"[1]",
    "text": b'"ready"',
    "nested deeply": b'{"a":' + b"[" * 100_000,
    "a number of many digits": b'{"cost": {"device_seconds": ' + b"9" * 5000 + b"}}",
    "a number without a float": b'{"cost": {"device_seconds": ' + b"9" * 400 + b"}}",
    "not a number": b'{"metrics": {"pairwise_accuracy": {"value": NaN, "ci_low": 0, "ci_high": Infinity}}}',
    "half a character": b'{"headline": "\\ud800"}',
    "other fields": b'{"schema": 9, "verdict": {"status": {"now": "ready"}}, "stages": {"train": 3}}',
    "no moment": b'{"created": "yesterday"}',
    "the first moment": b'{"created": "0001-01-01T00:00:00+14:00"}',
    "the last moment": b'{"created": "9999-12-31T23:59:59-14:00"}',
}
OTHER_FILES = {
    "a folder": lambda file: file.mkdir(),
    "a link to nothing": lambda file: file.symlink_to("nowhere"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a link to another run's": lambda file: file.symlink_to("../good/summary.json"),
    "a pipe": os.mkfifo,
    "too large": lambda file: (file.touch(), os.truncate(file, 2**28)),
    "of a time that no clock shows": lambda file: (file.write_text("{"), os.utime(file, (2**40, 2**40))),
}


def all_that_shows(reports):
    """Every record, read for the list of runs, and the page of all of them."""
    runs = read_runs(reports)
    for run in runs:
        assert run_row(run)["finished"]
        assert run.finished.astimezone()
    assert sorted(run.finished for run in runs) == [run.finished for run in reversed(runs)]
    page = index_page(reports).read_text(encoding="utf-8")
    return {run.name: run for run in runs}, page


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DAMAGE, *OTHER_FILES])
def test_a_damaged_record_is_shown_as_unreadable_with_the_reason_and_hides_no_other(reports, kind):
    lay(reports, "good", pipeline())
    (reports / "damaged").mkdir()
    file = reports / "damaged" / "summary.json"
    if kind in DAMAGE:
        file.write_bytes(DAMAGE[kind])
    else:
        OTHER_FILES[kind](file)
    found, page = all_that_shows(reports)
    assert found["good"].problem is None
    assert found["damaged"].problem
    assert page.count("cannot be read") == 1


PLACES = st.sampled_from(
    [("verdict",), ("verdict", "status"), ("verdict", "headline"), ("verdict", "rung"), ("headline",), ("hypotheses",),
     ("hypotheses", 0), ("hypotheses", 0, "verdict"), ("metrics",), ("metrics", "pairwise_accuracy"),
     ("metrics", "pairwise_accuracy", "value"), ("metrics", "pairwise_accuracy", "ci_low"), ("stages",), ("stages", 0),
     ("stages", 0, "device_seconds"), ("cost",), ("cost", "device_seconds"), ("created",), ("config",)]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["status", "verdict", "value"]), inner),
    max_leaves=4,
)
GONE = object()


@pytest.mark.slow
@given(kind=st.sampled_from(["pipeline", "experiment"]), place=PLACES, value=VALUES | st.just(GONE))
def test_whatever_a_part_of_a_record_is_the_runs_are_listed(tmp_path_factory, kind, place, value):
    record = {"pipeline": report_sample, "experiment": experiment_sample}[kind].results()
    record = json.loads(json.dumps(record, default=str))
    part = record
    for step in place[:-1]:
        part = part.get(step, {}) if isinstance(part, dict) else part[step]
    if value is GONE and isinstance(part, dict):
        part.pop(place[-1], None)
    elif value is not GONE:
        part[place[-1]] = value
    reports = tmp_path_factory.mktemp("reports")
    lay(reports, "good", pipeline())
    lay(reports, "changed", record)
    found, page = all_that_shows(reports)
    assert found["good"].problem is None
    assert page.count("cannot be read") == (found["changed"].problem is not None)


@pytest.mark.slow
def test_the_newest_comes_first_and_nothing_is_no_error(reports):
    assert read_runs(reports) == []
    for name, day in (("b", "02"), ("a", "03"), ("c", "01")):
        lay(reports, name, pipeline(), created=f"2026-11-{day}T00:00:00+00:00")
    assert [run.name for run in read_runs(reports)] == ["a", "b", "c"]


@pytest.mark.slow
def test_a_run_is_found_by_the_shortest_name_by_its_key_and_by_no_other(reports):
    with pytest.raises(ConfigError, match="nothing was run yet"):
        find_run([], "demo")
    names = ["demo-seed0-aaaa11111111", "demo-seed0-aaaa22222222", "demo-seed0-bbbb33333333", "mine", "mine-seed1"]
    short = short_names(names)
    assert list(short.values()) == ["demo-seed0-aaaa1", "demo-seed0-aaaa2", "demo-seed0-bbbb", "mine", "mine-seed1"]
    for name in names:
        lay(reports, name, pipeline())
    runs = read_runs(reports)
    assert all(find_run(runs, short[name]).name == name for name in names)
    assert find_run(runs, "bbbb").name == "demo-seed0-bbbb33333333"
    for name, said in (("2222", "no run '2222'"), ("demo-seed0-aaaa", "'demo-seed0-aaaa' may be demo-seed0-aaaa"),
                       ("demo-seed2", "no run 'demo-seed2'; the newest are .*mine")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            find_run(runs, name)


def test_the_list_links_each_report_and_shows_verdict_and_rung(reports, parse):
    lay(reports, "demo-seed7-0123456789ab", pipeline())
    lay(reports, "drawn-seed0-best-of-n-0123456789ab", {"sampling": {}}, page=False)
    page = parse(index_page(reports).read_text(encoding="utf-8"))
    for link in page.values("href"):
        assert (reports / link).is_file()
    assert sorted(page.values("href")) == [
        "./demo-seed7-0123456789ab/report.html",
        "./drawn-seed0-best-of-n-0123456789ab/summary.json",
    ]
    assert "Not ready for a KL of 3 nats" in page.text
    for shown in ("3 of 4", "71.2 %", "69.0 to 73.4 %", "2026-11-21 01:30"):
        assert shown in page.text.replace("\u00a0", " ")


def test_no_name_and_no_record_can_bring_markup(reports, parse):
    evil = "<script>alert(1)</script>\"'&"
    lay(reports, "odd <b>&amp; javascript:x?#%41", pipeline(headline=evil, status="<i>"))
    page = parse(index_page(reports).read_text(encoding="utf-8"))
    page.assert_safe()
    assert not {"b", "i", "u", "img"} & set(page.tags)
    assert evil in page.text
    [link] = page.values("href")
    assert link == "./odd%20%3Cb%3E%26amp%3B%20javascript%3Ax%3F%23%2541/report.html"


def test_only_the_owner_reads_the_list(reports):
    reports.mkdir()
    before = os.umask(0)
    try:
        page = index_page(reports)
        page.chmod(0o644)
        assert index_page(reports).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert "Nothing was run yet" in page.read_text()
