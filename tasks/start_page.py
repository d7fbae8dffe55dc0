"""The start page of `rm-opt up`: where the UIs are, what runs, what was found, and the schedules with a switch each.

It serves the reports of the home, too, so that they open on a machine whose files the browser does not see. Behind the
same guard as the other servers (tasks/guarded_server.py). The page is asked for anew every half minute and holds no
script; Prefect is asked each time, and where it does not answer, the page says so and shows the rest.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rmcore.reporting.html.index import FILE, run_row, write_index
from rmcore.reporting.html.page import render_page
from rmcore.reporting.runs import read_runs
from tasks.database import DATABASE_VARIABLE
from tasks.local_services import CLUSTER_PATH, basic_authorization, password
from tasks.sharing import SHARED_VARIABLE

REPORTS_PATH = "/reports"
NEWEST_REPORTS, NEWEST_RUNS = 15, 10
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Prefect:
    """The questions that the page asks Prefect. Every method raises httpx.HTTPError where that cannot be had."""

    ui: str
    secret: str

    def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        answer = httpx.request(
            method, f"{self.ui}/api{path}", json=body, headers=basic_authorization(self.secret), timeout=TIMEOUT_S
        ).raise_for_status()
        return answer.json() if answer.content else None

    def runs(self) -> list[dict[str, str]]:
        """The flow runs that began last, and those that are about to."""
        states = {"state": {"type": {"not_any_": ["SCHEDULED"]}}}
        body = {"sort": "EXPECTED_START_TIME_DESC", "limit": NEWEST_RUNS, "flow_runs": states}
        return [
            {
                "name": run["name"],
                "address": f"{self.ui}/runs/flow-run/{quote(run['id'])}",
                "state": run["state_name"] or run["state_type"],
                "began": _minute(run["start_time"]),
            }
            for run in self._ask("POST", "/flow_runs/filter", body)
        ]

    def schedules(self) -> list[dict[str, Any]]:
        """Every schedule of every deployment."""
        return [
            {
                "name": deployment["name"],
                "about": (deployment["description"] or "").partition("\n\n")[0],
                "address": f"{self.ui}/deployments/deployment/{quote(deployment['id'])}",
                "when": _when(schedule["schedule"]),
                "is_active": schedule["active"],
                "switch": f"/schedules/{quote(deployment['id'])}/{quote(schedule['id'])}",
            }
            for deployment in self._ask("POST", "/deployments/filter", {"sort": "NAME_ASC"})
            for schedule in deployment["schedules"]
        ]

    def switch(self, deployment: str, schedule: str, is_active: bool) -> None:
        """Turn a schedule on or off."""
        path = f"/deployments/{quote(deployment, safe='')}/schedules/{quote(schedule, safe='')}"
        self._ask("PATCH", path, {"active": is_active})


def start_page_app(directory: Path) -> Starlette:
    """The page and the reports of the home `directory`; the servers' addresses are those that `rm-opt up` gave it."""
    prefect = Prefect(os.environ["PREFECT_API_URL"].removesuffix("/api"), password(directory))
    reports = directory / "reports"
    reports.mkdir(mode=0o700, parents=True, exist_ok=True)

    def start(request: Request) -> Response:
        runs = read_runs(reports)
        if runs and not (reports / FILE).is_file():  # of a home that an older version filled
            write_index(reports)
        values: dict[str, Any] = {
            "home": str(directory),
            "prefect": prefect.ui,
            "mlflow": os.environ["MLFLOW_TRACKING_URI"],
            "num_reports": len(runs),
            "all_reports": f"{REPORTS_PATH}/{FILE}",
            "rows": [run_row(run, REPORTS_PATH) for run in runs[:NEWEST_REPORTS]],
        }
        try:
            asked: dict[str, Any] = {"runs": prefect.runs(), "schedules": prefect.schedules(), "trouble": ""}
        except httpx.HTTPError as error:
            trouble = f"Prefect does not answer ({error}): it is down or busy. See `rm-opt status`."
            asked = {"runs": [], "schedules": [], "trouble": trouble}
        return HTMLResponse(render_page("start.html.j2", values | asked))

    def cluster(request: Request) -> Response:
        database = "sqlite" if os.environ.get(DATABASE_VARIABLE) is None else "postgresql"
        shared = os.environ.get(SHARED_VARIABLE) or None
        places = {"prefect": prefect.ui, "mlflow": os.environ["MLFLOW_TRACKING_URI"]}
        return JSONResponse({**places, "database": database, "shared": shared})

    async def switch(request: Request) -> Response:
        wanted = parse_qs((await request.body()).decode(errors="replace")).get("active")
        if wanted not in (["on"], ["off"]):
            return PlainTextResponse("active must be on or off; go back to the start page.", 400)
        place = request.path_params
        try:  # in a thread: other requests are answered meanwhile
            await run_in_threadpool(prefect.switch, place["deployment"], place["schedule"], wanted == ["on"])
        except httpx.HTTPError as error:
            return PlainTextResponse(f"Prefect did not switch the schedule: {error}. See `rm-opt status`.", 502)
        return RedirectResponse("/", 303)

    return Starlette(
        routes=[
            Route("/", start),
            Route(CLUSTER_PATH, cluster),
            Route("/health", lambda request: PlainTextResponse("ok")),
            Route("/schedules/{deployment}/{schedule}", switch, methods=["POST"]),
            Mount(REPORTS_PATH, StaticFiles(directory=reports)),
        ]
    )


def _minute(moment: str | None) -> str:
    if moment is None:
        return ""
    return datetime.fromisoformat(moment).astimezone(UTC).strftime("%Y-%m-%d %H:%M")


def _when(schedule: dict[str, Any]) -> str:
    """A schedule as people write it down: cron, an interval, or a recurrence rule."""
    zone = schedule.get("timezone") or "UTC"
    if "cron" in schedule:
        return f"{schedule['cron']} ({zone})"
    if "interval" in schedule:
        return f"every {schedule['interval'] / 60:g} min"
    return f"{schedule['rrule']} ({zone})"
