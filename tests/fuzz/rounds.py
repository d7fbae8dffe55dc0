"""Equal and unequal runs in rounds of four, started together in one home: nothing is lost and nothing stays RUNNING.

A run does what a pipeline's does around its stages: it records its settings, computes a stage into the store or finds
it there, sends curves, tables, a data set and files to MLflow on SQLite, and writes its report and the list of reports.
"""

import importlib
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from pathlib import Path

KINDS = ((0, 0, 0, 0), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 3))
"""Which runs of a round have one study and seed."""
STEPS = 6
LIMIT_S = 60.0
IMPORTED = (
    *("experiments.presets", "flows.unfinished", "rmcore.reporting.html.index", "tasks.tracking"),
    *("mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store", "mlflow.data"),
)
"""Imported once, before a run is forked. No connection is open yet, which could not be shared."""


def check_runs(count: int, seed: int, folder: Path) -> list[str]:
    """Run `count` runs in rounds of four in the home `folder`; return what was lost, in sentences."""
    os.environ |= {"RM_OPT_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    from tasks.home import configure_environment

    configure_environment()
    for name in IMPORTED:
        importlib.import_module(name)
    draw, findings, expected = random.Random(seed), list[str](), Counter[str]()  # noqa: S311 - a seed to repeat
    context = multiprocessing.get_context("fork")
    for number in range(-(-count // 4)):
        barrier = context.Barrier(4)
        numbers = [number * 10 + one for one in draw.choice(KINDS)]
        runs = [context.Process(target=one_run, args=(barrier, one, slot)) for slot, one in enumerate(numbers)]
        for run in runs:
            run.start()
        deadline = time.monotonic() + LIMIT_S
        for slot, run in enumerate(runs):
            run.join(max(deadline - time.monotonic(), 0))
            if run.is_alive():
                run.kill()
                run.join()
                findings.append(f"round {number}: run {slot} was not over after {LIMIT_S:.0f} s")
            elif run.exitcode:
                findings.append(f"round {number}: run {slot} failed with {run.exitcode}, see its traceback")
        expected.update(name_of(one) for one in numbers)
    reader = context.Process(target=_write_checked, args=(expected, folder / "findings.json"))
    reader.start()  # a process of its own: this one has never connected, and may be followed by more rounds
    reader.join()
    return findings + json.loads((folder / "findings.json").read_text())


def name_of(number: int) -> str:
    """The name that all equal runs have."""
    return f"study{number % 3}-seed{number}"


def one_run(barrier, number: int, slot: int) -> None:
    """One run from its start to its end."""
    from experiments.presets import PRESETS
    from flows.unfinished import read_unfinished, unfinished
    from rmcore.core.digests import make_key
    from rmcore.core.files import write_json, write_text
    from rmcore.core.store import Store, flatten
    from rmcore.core.tracking import METRICS_FILE, JsonlTracker
    from rmcore.reporting.html.index import write_index
    from tasks.home import home
    from tasks.tracking import RunTracker

    name, study = name_of(number), f"study{number % 3}"
    config = PRESETS["smoke"].model_copy(update={"study": study, "seed": number})
    params, tags = flatten(config.model_dump(mode="json")), {"rm.kind": "pipeline", "rm.seed": str(number)}
    barrier.wait()
    with unfinished(name, config), RunTracker.start(study, name, tags, params) as tracker:
        store, inputs = Store(home() / "store"), {"seed": number}
        key = make_key(inputs)
        with store.lock(key):
            if store.status("toy", key).state != "valid":
                with store.publish("toy", name, inputs, outcome=("summary.json",)) as out:
                    with tracker.follow(out / METRICS_FILE):
                        lines = JsonlTracker(out / METRICS_FILE)
                        for step in range(STEPS):
                            lines.metrics(step, {"train/loss": 1 / (step + 1)})
                        lines.close()
                    write_json(out / "summary.json", {"metrics": {"eval/test_loss": number / 1000}})
        artifact = store.find("toy", key)
        tracker.log_dataset("train", f"{number % 2}" * 64, "gold", 9)  # one set is common to runs of different seeds
        tracker.log_artifact_folder(artifact, "evaluate")
        tracker.log_table([{"slot": slot, "seed": number}], "arms")
        folder = home() / "reports" / f"{name}-{key[:12]}"
        write_text(folder / "report.html", f"<p>{name}</p>" * 2000, durable=False)
        write_json(folder / "summary.json", {"name": name, "config": config.model_dump(mode="json")})
        write_index(folder.parent)
        tracker.log_file(folder / "report.html", "report")
        assert any(run.is_running and run.name == name for run in read_unfinished()), "its record is gone"


def _write_checked(expected: Counter, place: Path) -> None:
    place.write_text(json.dumps(list(_findings(expected))))


def _findings(expected: Counter):
    """What is not there of all runs, after the last one."""
    from flows.unfinished import read_unfinished
    from rmcore.core.store import Store
    from tasks.home import home
    from tasks.mlflow_client import connect
    from tasks.run_record import unsynced_folder

    client = connect(os.environ["MLFLOW_TRACKING_URI"])
    ids = [one.experiment_id for one in client.search_experiments(filter_string="name LIKE 'rm/%'")]
    runs = client.search_runs(ids, max_results=10_000)
    statuses = Counter(run.info.status for run in runs)
    if statuses != {"FINISHED": expected.total()}:
        yield f"MLflow has {dict(statuses)} instead of {expected.total()} FINISHED"
    if (found := Counter(run.info.run_name for run in runs)) != expected:
        yield f"MLflow lacks {expected - found} and has {found - expected} too many"
    curve = [(step, 1 / (step + 1)) for step in range(STEPS)]
    for run in runs:
        said, run_id = f"{run.info.run_name} ({run.info.run_id})", run.info.run_id
        history = client.get_metric_history(run_id, "train/loss")
        if sorted((point.step, point.value) for point in history) != curve:
            yield f"{said} has another curve: {[(point.step, point.value) for point in history]}"
        if "eval/test_loss" not in run.data.metrics or len(run.inputs.dataset_inputs) != 1:
            yield f"{said} lacks its accuracy or its data set"
        if {file.path for file in client.list_artifacts(run_id)} != {"arms.json", "numbers.json", "report"}:
            yield f"{said} lacks files"
    reports = home() / "reports"
    index = (reports / "index.html").read_text()
    for name in expected:
        [folder] = reports.glob(f"{name}-*")
        if (folder / "report.html").read_text() != f"<p>{name}</p>" * 2000 or folder.name not in index:
            yield f"the report of {name} is not whole, or not in the list"
    if waiting := [*unsynced_folder(home()).iterdir(), *(run.file for run in read_unfinished())]:
        yield f"{len(waiting)} records are left, such as {waiting[0].name}"
    if left := [path.name for path in home().rglob(".*.tmp")]:
        yield f"{len(left)} temporary files are left, such as {left[0]}"
    store = Store(home() / "store")
    damaged = [entry.key for entry in store.entries() if store.status(entry.stage, entry.key).state != "valid"]
    if damaged or len(store.entries()) != len(expected):
        yield f"the store has {len(store.entries())} artifacts of {len(expected)}, damaged: {damaged}"
