"""Links that open MLflow's experiment page straight on the runs of a study, or on the cells of one matrix.

MLflow's runs page hides children below their parents and shows columns of its own choice. Its saved views are the
way around: a tag `mlflow.sharedViewState.<id>` of the experiment holds the page's state, and the address parameter
`viewStateShareKey=<id>` opens it (read in the page's own code, MLflow 3.17). Two views are saved: a table with the
settings that vary and the main numbers as columns, and charts. Both are also in the page's menu of saved views.
"""

import base64
import json
import time
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from rmcore.config.pipeline import GROUPS, PipelineConfig
from rmcore.core.metrics import HEADLINE, NUM_COLUMNS
from rmcore.core.store import flatten
from tasks.run_record import COMPARED, interval_tag, texts

ADDRESS_PARAMETER = "workflowType=machine_learning"
"""Part of each address of ours: MLflow's page opens as for model training, not for language-model applications."""
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
RUN_COLOUR = "mlflow.runColor"
"""Tag with the colour that MLflow's tables and charts give a run, `#rrggbb`; without it, one of a hash of its id."""
VIEW_TAG = "mlflow.sharedViewState."
RUN_NAME_COLUMN = "attributes.`Run Name`"
PIXELS_A_LETTER = 7
MOST_NAME = 240
"""Characters of a run's name, which the first digits of its key follow: MLflow's column has 250, and PostgreSQL refuses
more."""
MOST_PARAMS = 40
"""Columns of settings: MLflow stores no larger view."""
CURVES = ("train/loss", "eval/loss", "eval/pairwise_accuracy")
CARD = {"isGenerated": False, "deleted": False, "runsCountToCompare": 1000}
"""Fields of every chart of ours; the page would make a generated one again."""
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


@dataclass(frozen=True, slots=True)
class View:
    """Runs of one experiment side by side: which, and what is shown of them."""

    key: str
    """Names it within its experiment."""
    name: str
    """Its name in the page's menu."""
    bars: str
    """Name of the runs together: Cells."""
    chosen: str
    """MLflow's filter of the runs."""
    order: str
    """Column that the runs are sorted by, backwards where a minus is before it."""
    metrics: Sequence[str]
    """At least one, the main one first."""
    intervals: Collection[str]
    """Those of them whose interval has a column."""
    params: Sequence[str]
    """Settings that vary between the runs, as columns in this order."""
    tags: Sequence[str]
    """Columns at the end."""


def cells_view(
    name: str, matrix_key: str, metrics: Sequence[str], intervals: Collection[str], params: Sequence[str]
) -> View:
    """The cells of a matrix; `matrix_key` is the value of their tag `rm.matrix`."""
    chosen, order = f"tags.`rm.kind` = 'cell' AND tags.`rm.matrix` = '{matrix_key}'", "tags.`mlflow.runName`"
    return View(matrix_key, name, "Cells", chosen, order, metrics, intervals, params, ("rm.arm", "rm.seed"))


def study_view(
    kind: str, params: Sequence[Mapping[str, str]], measured: Collection[str], tags: Collection[str]
) -> View:
    """All runs of one kind, with the settings in which they differ and the numbers that are looked at first.

    Args:
        kind: value of their tag `rm.kind`.
        params: what each of them has as parameters.
        measured: names of the metrics that any of them has.
        tags: names of the tags that any of them has.
    """
    varied = _varied(params)
    shown = [name for name in HEADLINE if name in measured][:NUM_COLUMNS] or [HEADLINE[0]]
    intervals = [name for name in shown if interval_tag(name) in tags]
    chosen, order = f"tags.`rm.kind` = '{kind}'", "-attributes.start_time"
    return View(kind, "Runs", "Runs", chosen, order, shown, intervals, varied[:MOST_PARAMS], ("rm.verdict",))


def _varied(params: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys((*COMPARED, *sorted({name for one in params for name in one})))
    return [name for name in names if len({one.get(name) for one in params}) > 1]


def told_apart(params: Sequence[Mapping[str, str]]) -> list[str]:
    """Name each run by the settings in which the runs differ, as a legend has to; "": none.

    All of them are named and none is cut, as far as `MOST_NAME` characters hold them.
    A setting that a run lacks as a parameter has its default; one that is None is left out. It is called by the last
    part of its name, or where that says little by its group: model=tiny.

    >>> told_apart([{"model.name": "tiny", "seed": "0"}, {"model.name": "tiny", "seed": "0", "train.beta": "2.0"}])
    ['beta=1.0', 'beta=2.0']
    """
    usual = texts(flatten(PipelineConfig().model_dump(mode="json"), GROUPS))
    varied = _varied(params)
    parts = {name: name.rsplit(".", 2)[-2:] for name in varied}
    short = {name: part[0] if part[-1] in ("name", "source") else part[-1] for name, part in parts.items()}
    shared = Counter(short.values())
    called = {name: one if shared[one] == 1 else name for name, one in short.items()}
    values = [_told([one.get(name, usual.get(name, "None")) for one in params]) for name in varied]
    named = (
        ", ".join(f"{called[name]}={of[at]}" for name, of in zip(varied, values, strict=True) if of[at] != "None")
        for at in range(len(params))
    )
    return [name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 1]}…" for name in named]


def _told(values: Sequence[str]) -> Sequence[str]:
    """The values of a setting: of paths and addresses the last part, where that tells all of them apart."""
    last = [value.rpartition("/")[2] for value in values]
    return last if len({*last}) == len({*values}) else values


def view_tags(view: View) -> dict[str, str]:
    """Tags of the experiment that save a table and charts of a view."""
    return {
        VIEW_TAG + view_id(view.key, charts=False): saved_view(f"{view.name}: table", table_state(view)),
        VIEW_TAG + view_id(view.key, charts=True): saved_view(f"{view.name}: charts", charts_state(view)),
    }


def comparison_url(experiment_page: str, key: str, *, charts: bool) -> str:
    """Address of the view that is named by `key` in its experiment.

    >>> comparison_url("http://127.0.0.1:5000/#/experiments/1", "0123456789ab", charts=False)
    'http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=rm-0123456789ab&workflowType=machine_learning'
    """
    mode = "&compareRunsMode=CHART" if charts else ""
    view = quote(view_id(key, charts=charts))
    return f"{experiment_page}/runs?viewStateShareKey={view}&{ADDRESS_PARAMETER}{mode}"


def view_id(key: str, *, charts: bool) -> str:
    """Name of a saved view within its experiment."""
    return f"rm-{key}{'-charts' if charts else ''}"


def saved_view(name: str, state: dict[str, Any]) -> str:
    """Value of the tag of a saved view: an envelope with the state, deflated as the page does it."""
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode(), 9)).decode()
    now_ms = time.time_ns() // 1_000_000
    return json.dumps({"name": name, "createdAt": now_ms, "updatedAt": now_ms, "state": f"deflate;{packed}"})


def _runs(view: View) -> dict[str, Any]:
    """State that table and charts share: which runs, in which order, all of them visible."""
    return {
        "searchFilter": view.chosen,
        "orderByKey": view.order.removeprefix("-"),
        "orderByAsc": not view.order.startswith("-"),
        "runsHiddenMode": "SHOW_ALL",
    }


def table_state(view: View) -> dict[str, Any]:
    """State of the runs page that shows a table: metrics with their intervals, varying settings, tags.

    Metrics come first, because the run's name, pinned on the left, tells what it is already. Nothing else is shown
    but what the page always shows: when a run was made and how long it took to send.
    """
    columns: list[tuple[str, str]] = []
    for name in view.metrics:
        columns += [("metrics", name), *([("tags", interval_tag(name))] if name in view.intervals else [])]
    columns += [("params", name) for name in view.params] + [("tags", name) for name in view.tags]
    # Wide enough for the column's heading: the page cuts what is longer.
    widths = {
        f"{kind}.`{name}`": max(180 if name == "rm.arm" else 90, 30 + PIXELS_A_LETTER * len(name))
        for kind, name in columns
    }
    return {
        **_runs(view),
        "selectedColumns": list(widths),
        "columnOrder": [RUN_NAME_COLUMN, *widths],
        "columnWidths": {RUN_NAME_COLUMN: 220, **widths},
    }


def charts_state(view: View) -> dict[str, Any]:
    """State of the runs page that shows charts.

    Open sections: each metric by run, the main metric against settings (parallel axes) and other metrics (one point a
    run), learning curves. The page adds a chart for every other number of the runs; those are in closed sections below.
    """
    main, *others = view.metrics
    axes = [{"type": "PARALLEL", "selectedParams": list(view.params), "selectedMetrics": [main]}]
    scatters = [
        {"type": "SCATTER", "xaxis": {"key": other, "type": "METRIC"}, "yaxis": {"key": main, "type": "METRIC"}}
        for other in others
    ]
    cards: dict[str, list[dict[str, Any]]] = {
        view.bars: [{"type": "BAR", "metricKey": name, "displayName": name} for name in view.metrics],
        "Settings and trade-offs": [*(axes if view.params else []), *scatters],
        "Learning curves": [{**STEP_AXIS, "type": "LINE", "metricKey": name} for name in CURVES],
    }
    groups = dict.fromkeys(name.partition("/")[0] for name in (*view.metrics, *CURVES, *HEADLINE))
    shown = [{"uuid": title, "name": title, "display": True, "isReordered": True, "columns": 3} for title in cards]
    closed = [{"uuid": group, "name": group, "display": False, "isReordered": True} for group in groups]
    return {
        **_runs(view),
        "compareRunCharts": [
            {**CARD, **card, "uuid": f"{title} {place}", "metricSectionId": title}
            for title, section in cards.items()
            for place, card in enumerate(section)
        ],
        "compareRunSections": [*shown, *closed],
        "isAccordionReordered": True,  # keep this order: the page sorts sections by name otherwise
    }
