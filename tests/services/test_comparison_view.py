"""The links of a matrix open MLflow's page on its cells, in a real browser."""

import json

import pytest

from rmcore.core.metrics import CELL_METRICS
from tasks.comparison_view import VIEW_TAG, charts_state, publish_view, saved_view, table_state
from tasks.mlflow_client import connect
from tasks.tracking import RunTracker

pytestmark = pytest.mark.services

MATRIX = "0123456789ab"
METRICS = ["eval/test_pairwise_accuracy", "calib/test_ece_debiased", "cost/train_seconds"]
WINDOW = "2600,2400"  # the table holds only the columns that fit
PARAMS = ["train.optimizer", "train.lr"]


def send_cell(matrix_key, arm, seed, accuracy):
    tags = {"rm.kind": "cell", "rm.matrix": matrix_key, "rm.arm": arm, "rm.seed": str(seed)}
    params = {"train.optimizer": arm, "train.lr": 0.02, "data.source": "not-shown.jsonl"}
    with RunTracker.start("demo", f"{arm} seed {seed}", tags, params, parent_uid=matrix_key) as cell:
        cell.log_metrics({METRICS[0]: accuracy, METRICS[1]: 0.0625, METRICS[2]: 32.5, "calib/noise": 0.1234567})
        cell.log_metrics({"train/loss": 0.6875}, step=1)


@pytest.fixture
def matrix(server):
    """A matrix with three cells, and a cell of another one beside it."""
    with RunTracker.start("demo", "optimizers", {"rm.kind": "matrix"}, {}, uid=MATRIX) as tracker:
        assert tracker.comparison_url is None
        publish_view(tracker, matrix_key=MATRIX, params=PARAMS, metrics=METRICS)
        for arm, seed, accuracy in (("muon", 0, 0.71875), ("muon", 2, 0.734375), ("lion", 0, 0.703125)):
            send_cell(MATRIX, arm, seed, accuracy)
        send_cell("ba9876543210", "another", 7, 0.5)
    assert not tracker.pending
    return tracker


def test_the_links_show_the_cells_with_their_columns_and_charts(browse, matrix):
    cells = ["muon seed 0", "muon seed 2", "lion seed 0"]
    columns = [
        f'col-id="{kind}.`{name}`"' for kind, names in (("params", PARAMS), ("metrics", METRICS)) for name in names
    ]
    columns += ['col-id="tags.`rm.arm`"', 'col-id="tags.`rm.seed`"']
    expected = [*cells, *columns, *METRICS, "0.71875", "0.734375", "0.703125", "0.0625", "32.5", "optimizers: table"]
    table = browse(matrix.comparison_url, WINDOW, expected)
    assert [text for text in expected if text not in table] == []
    unwanted = ["another seed 7", "not-shown.jsonl", "0.1234567", "does not exist"]
    assert [text for text in unwanted if text in table] == []

    expected = [
        *cells,
        *METRICS,
        "Cells",
        "Settings and trade-offs",
        "Learning curves",
        "train/loss",
        "optimizers: charts",
    ]
    charts = browse(matrix.comparison_charts_url, WINDOW, expected)
    assert [text for text in expected if text not in charts] == []
    assert [text for text in unwanted if text in charts] == []


def test_a_view_published_again_replaces_the_old_one(matrix, server):
    with RunTracker.start("demo", "optimizers", {"rm.kind": "matrix"}, {}, uid=MATRIX) as again:
        publish_view(again, matrix_key=MATRIX, params=PARAMS, metrics=METRICS[:1])
        assert again.comparison_url == matrix.comparison_url
    tags = connect(server.url).get_experiment_by_name("rm/demo").tags
    views = [json.loads(value) for name, value in tags.items() if name.startswith(VIEW_TAG)]
    assert sorted(view["name"] for view in views) == ["optimizers: charts", "optimizers: table"]


def test_without_mlflow_there_is_no_link(home, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with RunTracker.start("demo", "optimizers", {}, {}, uid=MATRIX) as tracker:
        publish_view(tracker, matrix_key=MATRIX, params=PARAMS, metrics=METRICS)
        assert (tracker.comparison_url, tracker.comparison_charts_url) == (None, None)


@pytest.mark.parametrize("state", [table_state, charts_state])
def test_a_view_of_every_metric_and_many_settings_is_one_that_mlflow_stores(state):
    from mlflow.utils.validation import _validate_experiment_tag

    settings = [f"train.some_rather_long_setting_{number}" for number in range(40)]
    _validate_experiment_tag(
        VIEW_TAG + "rm-0123456789ab-charts", saved_view("x" * 100, state(MATRIX, settings, list(CELL_METRICS)))
    )
