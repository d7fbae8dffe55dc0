"""Orchestration by itself: seconds for flow runs that do nothing, side by side, on SQLite and on PostgreSQL.

A lifecycle is what the cell of a matrix asks of Prefect: a flow run with four tasks, one after the other, each of which
goes from pending over running to completed. Computing costs nothing here, so what is measured is the server, its
database and the client; all of it shares this machine.

    PGPASSWORD=… python benchmarks/orchestration.py --database postgresql://rm@127.0.0.1/runs --lifecycles 1 8 32
    python benchmarks/orchestration.py --lifecycles 1 8 32
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tasks.database import DATABASE_VARIABLE, SQLITE, checked_address, make_schemas, prefect_environment
from tasks.local_services import GUARDED_SERVER, HOST, PREFECT_SERVER

TASKS = 4
PORT = 4399
CLIENT = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

@task(cache_policy=NO_CACHE, persist_result=False)
def nothing(number): return number

@flow
def lifecycle():
    for number in range(int(sys.argv[2])): nothing(number)

def one(_):
    began = time.perf_counter()
    try:
        lifecycle()
        return time.perf_counter() - began, ""
    except Exception as error:
        return time.perf_counter() - began, f"{type(error).__name__}: {error}"[:200]

one(None)  # imports, the first connection
began = time.perf_counter()
with ThreadPoolExecutor(int(sys.argv[1])) as pool:
    found = list(pool.map(one, range(int(sys.argv[1]))))
print(json.dumps({"seconds": time.perf_counter() - began, "each": [a for a, _ in found],
                  "errors": [b for _, b in found if b]}))
"""
"""Run by a process of its own, in which nothing has read Prefect's settings yet."""


def measure(numbers: list[int], address: str | None) -> list[dict[str, object]]:
    """Start a server on the database and run so many lifecycles at once, once for each number."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
            "RM_OPT_HOME": folder,
            "PREFECT_HOME": f"{folder}/prefect",
            "PREFECT_API_URL": f"http://{HOST}:{PORT}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_LOGGING_LEVEL": "ERROR",
            "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        }
        if address is not None:
            make_schemas(address)
            environment |= {DATABASE_VARIABLE: address, **prefect_environment(address)}
        Path(folder, "prefect").mkdir()
        command = [sys.executable, *GUARDED_SERVER, PREFECT_SERVER, f"{HOST}:{PORT}"]
        server = subprocess.Popen(command, env=environment)
        try:
            _wait(server)
            rows: list[dict[str, object]] = []
            for number in numbers:
                done = subprocess.run(
                    [sys.executable, "-c", CLIENT, str(number), str(TASKS)],
                    env=environment, check=True, capture_output=True, text=True,
                )  # fmt: skip
                found = json.loads(done.stdout.splitlines()[-1])
                rows.append({"database": SQLITE if address is None else "postgresql", "lifecycles": number, **found})
            return rows
        finally:
            server.terminate()
            server.wait()


def _wait(server: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            if httpx.get(f"http://{HOST}:{PORT}/api/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            if server.poll() is not None:
                raise SystemExit("Prefect's server ended while starting") from None
            time.sleep(0.2)


def main() -> None:
    """Print a row for each number of lifecycles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", default=SQLITE, help="postgresql://USER@HOST/DATABASE, or sqlite")
    parser.add_argument("--lifecycles", nargs="+", type=int, default=[1, 8, 32])
    given = parser.parse_args()
    print("| database | lifecycles at once | seconds | median of one | slowest | errors |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in measure(given.lifecycles, checked_address(given.database)):
        each = sorted(row["each"])
        print(
            f"| {row['database']} | {row['lifecycles']} | {row['seconds']:.1f} | {each[len(each) // 2]:.1f} | "
            f"{each[-1]:.1f} | {len(row['errors'])} |"
        )


if __name__ == "__main__":
    main()
