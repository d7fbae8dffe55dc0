"""Links that open MLflow's experiment page straight on the cells of one matrix.

MLflow's runs page hides children below their parents and shows columns of its own choice. Its saved views are the
way around: a tag `mlflow.sharedViewState.<id>` of the experiment holds the page's state, and the address parameter
`viewStateShareKey=<id>` opens it (read in the page's own code, MLflow 3.17). Two views are saved for a matrix: a table
with the settings that vary and the experiment's metrics as columns, and charts. Both are also in the page's menu of
saved views.
"""

import base64
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote

from tasks.model_training import ADDRESS_PARAMETER
from tasks.run_record import RunRecord

VIEW_TAG = "mlflow.sharedViewState."
RUN_NAME_COLUMN = "attributes.`Run Name`"
PIXELS_A_LETTER = 7
CURVES = ("train/loss", "eval/loss", "eval/pairwise_accuracy")
CARD = {"isGenerated": False, "deleted": False, "runsCountToCompare": 1000}
"""Fields of every chart of ours; a generated one would be made anew by the page."""
STEP_AXIS = {
    "lineSmoothness": 0,
    "scaleType": "linear",
    "xAxisScaleType": "linear",
    "xAxisKey": "step",
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "selectedXAxisMetricKey": "",
    "range": {},
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": True,
}


class MatrixTracker(Protocol):
    """Sends the outcome of a matrix to MLflow: `tasks.tracking.RunTracker`, which imports this module."""

    record: RunRecord
    matrix_key: str | None

    def set_experiment_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the experiment that the matrix's run belongs to."""


def publish_view(
    tracker: MatrixTracker,
    *,
    matrix_key: str,
    params: Sequence[str],
    metrics: Sequence[str],
    with_interval: Sequence[str] = (),
) -> None:
    """Save the two views of a matrix in the tracker's experiment, for `tracker.comparison()`. Returns at once.

    Args:
        tracker: of the matrix; its run's name is the views' name.
        matrix_key: value of the cells' tag `rm.matrix`.
        params: logged parameters that vary between cells, as columns in this order, for example `train.lr`.
        metrics: the experiment's metrics, at least one, the main one first.
        with_interval: those of them whose interval stands beside them in the table.
    """
    table = table_state(matrix_key, params, metrics, with_interval)
    charts = charts_state(matrix_key, params, metrics)
    name = tracker.record.run_name
    tracker.set_experiment_tags(
        {
            VIEW_TAG + view_id(matrix_key, charts=False): saved_view(f"{name}: table", table),
            VIEW_TAG + view_id(matrix_key, charts=True): saved_view(f"{name}: charts", charts),
        }
    )
    tracker.matrix_key = matrix_key


def comparison_url(experiment_page: str, matrix_key: str, *, charts: bool) -> str:
    """Address of a matrix's view.

    >>> comparison_url("http://127.0.0.1:5000/#/experiments/1", "0123456789ab", charts=False)
    'http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=rm-0123456789ab&workflowType=machine_learning'
    """
    mode = "&compareRunsMode=CHART" if charts else ""
    view = quote(view_id(matrix_key, charts=charts))
    return f"{experiment_page}/runs?viewStateShareKey={view}&{ADDRESS_PARAMETER}{mode}"


def view_id(matrix_key: str, *, charts: bool) -> str:
    """Name of a matrix's saved view within its experiment."""
    return f"rm-{matrix_key}{'-charts' if charts else ''}"


def saved_view(name: str, state: dict[str, Any]) -> str:
    """Value of the tag of a saved view: an envelope with the state, deflated as the page does it."""
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    now_ms = time.time_ns() // 1_000_000
    return json.dumps({"name": name, "createdAt": now_ms, "updatedAt": now_ms, "state": f"deflate;{packed}"})


def table_state(
    matrix_key: str, params: Sequence[str], metrics: Sequence[str], with_interval: Sequence[str] = ()
) -> dict[str, Any]:
    """State of the runs page that shows a matrix's cells as a table: metrics, varying settings, arm and seed.

    Metrics come first, because the run's name, pinned on the left, tells arm and seed already. Nothing else is shown
    but what the page always shows: when a run was made and how long it took to send.
    """
    ends = {name: (f"{name}_ci_low", f"{name}_ci_high") for name in with_interval}
    columns = [column for name in metrics for column in (name, *ends.get(name, ()))]
    named = [("metrics", name) for name in columns] + [("params", name) for name in params]
    named += [("tags", "rm.arm"), ("tags", "rm.seed")]
    widths = {_column(kind, name): _width(kind, name) for kind, name in named}
    return {
        **_cells(matrix_key),
        "selectedColumns": list(widths),
        "columnOrder": [RUN_NAME_COLUMN, *widths],
        "columnWidths": {RUN_NAME_COLUMN: 220, **widths},
    }


def _cells(matrix_key: str) -> dict[str, Any]:
    """State that both views share: which runs, in which order, all of them visible."""
    return {
        "searchFilter": f"tags.`rm.kind` = 'cell' AND tags.`rm.matrix` = '{matrix_key}'",
        "orderByKey": "tags.`mlflow.runName`",
        "orderByAsc": True,
        "runsHiddenMode": "SHOW_ALL",
    }


def _column(kind: str, name: str) -> str:
    return f"{kind}.`{name}`"


def _width(kind: str, name: str) -> int:
    """Pixels that hold the column's heading: the page cuts what is longer."""
    return max(180 if (kind, name) == ("tags", "rm.arm") else 90, 30 + PIXELS_A_LETTER * len(name))


def charts_state(matrix_key: str, params: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """State of the runs page that shows a matrix's cells as charts.

    Open sections: each metric by cell, the main metric against settings and other metrics, learning curves. The page
    adds a chart for every other number of the cells; those lie in closed sections below.
    """
    cards = {
        "Cells": [{"type": "BAR", "metricKey": name, "displayName": name} for name in metrics],
        "Settings and trade-offs": _trade_offs(params, metrics),
        "Learning curves": [{**STEP_AXIS, "type": "LINE", "metricKey": name} for name in CURVES],
    }
    groups = dict.fromkeys(name.partition("/")[0] for name in (*metrics, *CURVES))
    shown = [{"uuid": title, "name": title, "display": True, "isReordered": True, "columns": 3} for title in cards]
    closed = [{"uuid": group, "name": group, "display": False, "isReordered": True} for group in groups]
    return {
        **_cells(matrix_key),
        "compareRunCharts": [
            {**CARD, **card, "uuid": f"{title} {place}", "metricSectionId": title}
            for title, section in cards.items()
            for place, card in enumerate(section)
        ],
        "compareRunSections": [*shown, *closed],
        "isAccordionReordered": True,  # keep this order: the page sorts sections by name otherwise
    }


def _trade_offs(params: Sequence[str], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """The main metric against the settings (parallel axes) and against each other metric (one point a cell)."""
    main, *others = metrics
    scatters: list[dict[str, Any]] = [
        {"type": "SCATTER", "xaxis": {"key": other, "type": "METRIC"}, "yaxis": {"key": main, "type": "METRIC"}}
        for other in others
    ]
    axes = [{"type": "PARALLEL", "selectedParams": list(params), "selectedMetrics": [main]}] if params else []
    return [*axes, *scatters]
