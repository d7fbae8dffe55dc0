"""MLflow's pages in a real browser: the links of a matrix open its cells, and that of a run its verdict."""

import json
import re

import pytest
import yaml

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.files import write_json
from rmcore.core.metrics import CELL_METRICS
from rmcore.reporting.html.note import RUN_FILES, experiment_note, verdict_note
from rmcore.reporting.runs import KEY_DIGITS
from tasks.comparison_view import (
    EXPERIMENT_TAGS,
    RUN_COLOUR,
    VIEW_TAG,
    cells_view,
    charts_state,
    saved_view,
    table_state,
    view_tags,
)
from tasks.mlflow_client import connect
from tasks.projection import NOTE_TAG
from tasks.run_record import interval_tags
from tasks.tracking import RunTracker

pytestmark = pytest.mark.services

MATRIX = "0123456789ab"
METRICS = ["eval/test_pairwise_accuracy", "calib/test_ece_debiased", "cost/train_seconds"]
WINDOW = "3600,2400"  # the table holds only the columns that fit
COLOURS = {"muon": "#0072b2", "lion": "#d55e00", "another": "#000000"}
PARAMS = ["train.optimizer", "train.lr"]


def publish(tracker, metrics):
    view = cells_view("optimizers", MATRIX, metrics, METRICS[:1], PARAMS)
    tracker.tell(experiment_tags=view_tags(view))


def send_cell(matrix_key, arm, seed, accuracy):
    tags = {"rm.kind": "cell", "rm.matrix": matrix_key, "rm.arm": arm, "rm.seed": str(seed), RUN_COLOUR: COLOURS[arm]}
    params = {"train.optimizer": arm, "train.lr": 0.02, "data.source": "not-shown.jsonl"}
    with RunTracker.start("demo", f"{arm} seed {seed}", tags, params, parent_uid=matrix_key) as cell:
        ends = {"ci_low": accuracy - 0.25, "ci_high": accuracy + 0.25}
        numbers = {METRICS[0]: accuracy, METRICS[1]: 0.0625, METRICS[2]: 32.5, "calib/noise": 0.1234567}
        cell.tell(numbers=numbers | {"train/loss": 0.6875}, tags=interval_tags({METRICS[0]: ends}))


@pytest.fixture
def matrix(server):
    """A matrix with three cells, and a cell of another one beside it."""
    with RunTracker.start("demo", "optimizers", {"rm.kind": "matrix"}, {}, uid=MATRIX) as tracker:
        publish(tracker, METRICS)
        about = experiment_note("Optimizers", {"Side by side": str(tracker.comparison(MATRIX))})
        tracker.tell(experiment_tags={NOTE_TAG: about})
        for arm, seed, accuracy in (("muon", 0, 0.71875), ("muon", 2, 0.734375), ("lion", 0, 0.703125)):
            send_cell(MATRIX, arm, seed, accuracy)
        send_cell("ba9876543210", "another", 7, 0.5)
    assert not tracker.pending
    return tracker


def test_the_links_show_the_cells_with_their_columns_and_charts_and_a_view_published_again_replaces_the_old_one(
    browse, matrix, server
):
    cells = ["muon seed 0", "muon seed 2", "lion seed 0"]
    columns = [
        f'col-id="{kind}.`{name}`"' for kind, names in (("params", PARAMS), ("metrics", METRICS)) for name in names
    ]
    columns += ['col-id="tags.`rm.arm`"', 'col-id="tags.`rm.seed`"']
    columns += ['col-id="tags.`interval/test_pairwise_accuracy`"']
    expected = [
        *cells,
        *columns,
        *METRICS,
        "0.71875",
        "0.4688 to 0.9688",
        "0.734375",
        "0.703125",
        "0.0625",
        "32.5",
        "optimizers: table",
    ]
    table = browse(matrix.comparison(MATRIX), WINDOW, expected)
    assert [text for text in expected if text not in table] == []
    unwanted = ["another seed 7", "not-shown.jsonl", "0.1234567", "does not exist"]
    assert [text for text in unwanted if text in table] == []
    assert "rgb(0, 114, 178)" in table  # an arm's colour beside its cells
    assert "rgb(213, 94, 0)" in table

    expected = [
        *cells,
        *METRICS,
        "Cells",
        "Settings and trade-offs",
        "Learning curves",
        "train/loss",
        "optimizers: charts",
    ]
    charts = browse(matrix.comparison(MATRIX, charts=True), WINDOW, expected)
    assert [text for text in expected if text not in charts] == []
    assert [text for text in unwanted if text in charts] == []

    with RunTracker.start("demo", "optimizers", {"rm.kind": "matrix"}, {}, uid=MATRIX) as again:
        publish(again, METRICS[:1])
        assert again.comparison(MATRIX) == matrix.comparison(MATRIX)
    tags = connect(server.url).get_experiment_by_name("rm/demo").tags
    assert tags.items() >= EXPERIMENT_TAGS.items()
    assert tags["mlflow.note.content"] == f"[Side by side]({matrix.comparison(MATRIX)}) · Optimizers\n"
    views = [json.loads(value) for name, value in tags.items() if name.startswith(VIEW_TAG)]
    assert sorted(view["name"] for view in views) == ["optimizers: charts", "optimizers: table"]


@pytest.mark.parametrize("state", [table_state, charts_state])
def test_a_view_of_every_metric_and_many_settings_is_one_that_mlflow_stores(state):
    from mlflow.utils.validation import _validate_experiment_tag

    settings = [f"train.some_rather_long_setting_{number}" for number in range(40)]
    view = cells_view("x" * 100, MATRIX, list(CELL_METRICS), list(CELL_METRICS), settings)
    _validate_experiment_tag(VIEW_TAG + "rm-0123456789ab-charts", saved_view(view.name, state(view)))


RUNS = (("tiny", 0.71875, 1e-3), ("tiny", 0.734375, 2e-3), ("small", 0.75, 1e-3))


def test_the_runs_of_a_study_have_a_view_with_what_differs_and_what_matters(browse, server, tmp_path):
    """Three ordinary runs, each of which publishes the view anew."""
    for number, (model, accuracy, lr) in enumerate(RUNS):
        entry = {"value": accuracy, "ci_low": accuracy - 0.25, "ci_high": accuracy + 0.25}
        write_json(tmp_path / "summary.json", {"metrics": {METRICS[0]: entry, "eval/test_tie_rate": 0.1234567}})
        config = PipelineConfig().model_copy(
            update={"model": ModelConfig(name=model), "train": TrainConfig(lr=lr, weight_decay=0.0625)}
        )
        with RunTracker.start("demo", f"run {number}", {"rm.kind": "pipeline"}, config) as run:
            run.log_artifact_folder(tmp_path, "evaluate")
            run.tell(tags={"rm.verdict": "unclear", "rm.key": str(number) * 64})
            run.tell(study_text=["pipeline", "Three runs."])  # which names all that there are
    client = connect(server.url)
    experiment = client.get_experiment_by_name("rm/demo")
    link, charts = re.findall(r"\((#/[^)]+)\)", experiment.tags["mlflow.note.content"])
    [first, *_] = client.search_runs([experiment.experiment_id])
    assert len(first.data.params) <= 16
    assert client.download_artifacts(first.info.run_id, "settings.yaml", str(tmp_path))
    assert PipelineConfig.model_validate(yaml.safe_load((tmp_path / "settings.yaml").read_text())).train.lr == 1e-3
    named = [f"model={model}, lr={lr} · {str(number) * KEY_DIGITS}" for number, (model, _, lr) in enumerate(RUNS)]
    expected = [*named, "0.71875", "0.4688 to 0.9688", "0.734375", "unclear", "Runs: table"]
    expected += [f'col-id="params.`{name}`"' for name in ("model.name", "train.lr")]
    table = browse(f"{server.url}/{link}", WINDOW, expected)
    assert [text for text in expected if text not in table] == []
    unwanted = ['col-id="params.`train.weight_decay`"', 'col-id="params.`seed`"', "0.1234567", "does not exist"]
    assert [text for text in unwanted if text in table] == []
    expected = [*named, METRICS[0], "Settings and trade-offs", "Learning curves", "Runs: charts"]
    page = browse(f"{server.url}/{charts}", WINDOW, expected)
    assert [text for text in expected if text not in page] == []


def test_the_page_of_a_run_in_mlflow_says_its_verdict_and_no_markup_of_it(browse, server):
    verdict = {
        "rung": 1,
        "evidence": "labelled pairs",
        "status": "passes",
        "headline": "Passed <img src=x> *all* https://evil.example @evil :smile:",
        "reasons": ["<b>bold</b> [a](b) `c`"],
    }
    more = {"rung": 3, "evidence": "samples", "command": "rm-opt <b>x</b> *y*", "cost": "hours"}
    with RunTracker.start("demo", "seed 0", {}, {}) as tracker:
        tracker.tell(note=verdict_note(verdict, more, {"Report": f"{RUN_FILES}report/r.html"}, ["/a/place"]))
    browse(tracker.url, "1400,2000", ["seed 0"])
    read = "[...document.querySelectorAll('h3')].find(one => one.textContent.includes('Passed'))?.parentElement."
    shown = browse.wait(f"{read}textContent", lambda text: text is not None and "hours" in text)
    for text in (verdict["headline"], *verdict["reasons"], more["command"], "Evidence level 1 of 4", "/a/place"):
        assert text in shown
    markup = browse.run(f"{read}innerHTML")
    assert [tag for tag in ("<img", "<b>", "<em>", 'evil.example"', "github.com") if tag in markup] == []
    assert markup.count("<a ") == 1
    assert "/artifacts/report/r.html" in markup
