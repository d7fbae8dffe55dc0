"""The findings of a finished pipeline, gathered from its artifacts into one record for report, summary and registry."""

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pandas as pd
from pydantic import ValidationError

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.files import read_json_lines
from rmcore.core.hardware import device_type
from rmcore.core.manifests import make_key
from rmcore.core.printing import from_spreadsheets
from rmcore.core.store import ArtifactRef, Store
from rmcore.core.tracking import METRICS_FILE
from rmcore.evaluation.comparison import on_common_pairs, paired_comparison
from rmcore.evaluation.diagnosis import STUCK, UNDER_TRAINED, diagnose, diagnose_outcome
from rmcore.readiness.next_step import Tried, best_of, held_out_by, next_step, record_of, so_far
from rmcore.readiness.power import next_rung, reach_of
from rmcore.readiness.verdict import verdict_on_policy, with_outcome
from rmcore.reporting.runs import short_names
from rmcore.reporting.schema import NextRung, PolicyResults, Results, StageResult, Training
from rmcore.stages.stages import OPTIONAL, STAGES

NUM_MISTAKES = 50
SHOWN_VERSIONS = ("rm-optimizer", "torch", "transformers", "prefect", "mlflow", "pandas", "numpy")


def run_key(refs: Mapping[str, ArtifactRef]) -> str:
    """Digest of a whole pipeline run: the keys of all its artifacts."""
    return make_key({name: ref.key for name, ref in refs.items()})


def gather_results(
    config: PipelineConfig,
    store: Store,
    refs: Mapping[str, ArtifactRef],
    cached: Mapping[str, bool],
    *,
    run_name: str,
    folder_name: str,
    earlier: Mapping[str, Mapping[str, Any]],
) -> Results:
    """Read all artifacts of a run.

    Args:
        config: of the run.
        store: where the artifacts are.
        refs: artifact of each stage by name.
        cached: whether that stage's artifact was there already.
        run_name: readable name of the run.
        folder_name: name of the folder of its report, by which commands find it.
        earlier: records of finished runs by the names of their folders, among which are those that the next step
            starts from or must not repeat.

    Returns:
        The record that `rmcore.reporting.html` renders (its schema is documented there), JSON-ready.
    """
    folder = {name: Path(ref.path) for name, ref in refs.items()}
    evaluation = _read(folder["evaluate"] / "metrics.json")
    v1 = _read(folder["readiness"] / "readiness.json")
    policy = _policy(refs) if "readiness_v2" in refs else None
    judged = v1 if policy is None else policy["readiness"]
    trained = read_json(refs["grpo"], "rlhf.json") if "grpo" in refs else None
    history = read_json_lines(folder["train"] / METRICS_FILE)
    training = _training(folder["train"], evaluation["truncation"])
    cut = {name: training["truncation"][name] for name in ("train", "test")}
    outcome = diagnose_outcome(history, evaluation["metrics"]["test"], cut)
    # A loss that is stuck at that of guessing is the same symptom as under-training, and is told once.
    is_under = any(one.diagnosis == UNDER_TRAINED for one in outcome)
    found = outcome + [one for one in diagnose(history) if not (is_under and one.diagnosis == STUCK)]
    reached = (verdict_on_policy(trained) if trained else None) or judged["verdict"]
    verdict = with_outcome(reached, outcome)
    results: Results = {
        "study": config.study,
        "seed": config.seed,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "run_name": run_name,
        "verdict": verdict,
        "next_rung": None,
        "gate": judged["gate"],
        "label_gate": v1["gate"],
        "readiness": v1["readiness"],
        "logged": _read(folder["readiness"] / "logged_answers.json"),
        "observations": evaluation["observations"],
        "policy": policy,
        "rlhf": trained,
        "metrics": evaluation["metrics"]["test"],
        "ood_metrics": evaluation["metrics"].get("ood"),
        "context": evaluation["context"],
        "training": training,
        "audit": _read(folder["prepare"] / "audit.json"),
        "mistakes": _mistakes(folder["evaluate"]),
        "diagnoses": [{"symptom": one.symptom, "diagnosis": one.diagnosis, "advice": one.advice} for one in found],
        "stages": [_stage(store, ref, cached[name]) for name, ref in refs.items()],
        "config": config.model_dump(mode="json"),
        "environment": environment(config.device),
    }
    measured = {name: _read(folder[name] / STAGES[name].outcome[0]) if name in folder else None for name in OPTIONAL}
    return cast(Results, {**results, **measured, "next_rung": planned_step(folder_name, results, earlier)})


def planned_step(name: str, results: Results, earlier: Mapping[str, Mapping[str, Any]]) -> NextRung | None:
    """Return the next step of a run, planned over all runs on its held-out prompts.

    Args:
        name: of the run's folder.
        results: its record; its own `next_rung` is not read.
        earlier: records of other runs by the names of their folders. Those on other held-out prompts do not count.
    """
    records: dict[str, Mapping[str, Any]] = {**earlier, name: results}
    short = short_names([*records])
    verdict, config = results["verdict"], PipelineConfig.model_validate(results["config"])
    if verdict["rung"] > 2:  # it was tried on a policy, and those runs are not compared by labelled pairs
        tried = results["policy"]
        reach = None if tried is None else reach_of(tried["overoptimization"], config.readiness.planned_optimizer)
        return next_rung(verdict, config, [short[name]], reach=reach)
    runs = _chain({short[one]: record for one, record in records.items()}, held_out_by(config))
    best, told = best_of(runs), so_far(runs)
    more = next_step(runs) or next_rung(best.verdict, best.config, [best.name])
    return more if more is None or told is None else {**more, "so_far": told}


def _chain(records: Mapping[str, Mapping[str, Any]], held_out: tuple[Any, ...]) -> list[Tried]:
    """The runs on the same held-out prompts in the order in which they ended, those whose rewards are gone last."""
    runs: list[Tried] = []
    gone: list[Tried] = []
    first: pd.DataFrame | None = None
    for name, record in sorted(records.items(), key=lambda one: str(one[1].get("created"))):
        try:
            run = record_of(record, name)
        except (ValidationError, KeyError):  # of another version, or no run of the pipeline
            continue
        if held_out_by(run.config) != held_out:
            continue
        rewards = held_out_rewards(record)
        if rewards is None:
            gone.append(run)
        elif first is None:
            first, runs = rewards, [run]
        else:
            common = on_common_pairs(rewards, first)
            compared = None if common[0].empty else paired_comparison(*common)["accuracy_difference"]
            runs.append(run._replace(over_first=compared))
    return runs + gone


def held_out_rewards(record: Mapping[str, Any]) -> pd.DataFrame | None:
    """Rewards of the held-out pairs as a run stored them; None where they are gone."""
    file = next((Path(one["path"]) for one in record["stages"] if one["name"] == "evaluate"), Path("/nowhere"))
    if not (file / "rewards.parquet").is_file():
        return None
    table = pd.read_parquet(file / "rewards.parquet")
    return table[table["split"] == "test"]


def _policy(refs: Mapping[str, ArtifactRef]) -> PolicyResults:
    return {
        "sampling": read_json(refs["samples"], "sampling.json"),
        "overoptimization": read_json(refs["overoptimization"], "overoptimization.json"),
        "readiness": read_json(refs["readiness_v2"], "readiness.json"),
    }


def read_json(ref: ArtifactRef, name: str) -> dict[str, Any]:
    """A JSON file of an artifact."""
    return _read(Path(ref.path) / name)


def figures(refs: Mapping[str, ArtifactRef]) -> dict[str, Path]:
    """All figures of a run by name."""
    return {path.stem: path for ref in refs.values() for path in sorted((Path(ref.path) / "figures").glob("*.png"))}


def environment(device: str) -> dict[str, str]:
    """Versions and machine, for provenance."""
    versions: dict[str, str] = {}
    for name in SHOWN_VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions | {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "device": device_type(device),
    }


def _mistakes(evaluated: Path) -> Any:
    table = read_mistakes(evaluated / "tables" / "most_confident_mistakes.csv").head(NUM_MISTAKES)
    return table[["pair_id", "prompt", "chosen", "rejected", "margin"]].to_dict("records")


def read_mistakes(path: Path) -> pd.DataFrame:
    """Read the mistakes table, its texts as they are: "None" and "42" are answers, not missing values or numbers."""
    texts = dict.fromkeys(("pair_id", "prompt", "chosen", "rejected"), "str")
    table = pd.read_csv(path, keep_default_na=False, dtype=texts)
    return table.assign(**{name: table[name].map(from_spreadsheets) for name in texts})


def _training(folder: Path, truncation: dict[str, Any]) -> Training:
    record = _read(folder / "training.json")
    return {
        "steps": record["num_steps"],
        "best_step": record["best_step"],
        "best_metric": record["best_metric"],
        "best_value": record["best_value"],
        "num_pairs": record["num_pairs"],
        "num_distinct": record["truncation"]["train"]["num_pairs"],
        "num_parameters": record["num_parameters"],
        "max_positions": record["max_positions"],
        "stop_reason": record["stop_reason"],
        "truncation": record["truncation"] | {"test": truncation["test"]},
        "pairs_per_second": record["pairs_per_second"],
        "wall_seconds": record["train_seconds"],
    }


def _stage(store: Store, ref: ArtifactRef, cached: bool) -> StageResult:
    manifest = store.manifest(ref.stage, ref.key) or {}
    return {
        "name": ref.stage,
        "key": ref.key,
        "path": ref.path,
        "cached": cached,
        "wall_seconds": manifest.get("wall_seconds"),
        "device_seconds": manifest.get("wall_seconds") if STAGES[ref.stage].on_device() else 0.0,
    }


def artifact_seconds(store: Store, refs: Iterable[ArtifactRef], *, on_device: bool = False) -> float:
    """Wall seconds that the artifacts took when they were made; one that is there twice counts once.

    Args:
        store: where they are.
        refs: the artifacts.
        on_device: only of stages that hold a device while they run.
    """
    counted = {ref.key: ref for ref in refs if STAGES[ref.stage].on_device() or not on_device}
    manifests = [store.manifest(ref.stage, ref.key) or {} for ref in counted.values()]
    return sum(float(manifest.get("wall_seconds", 0.0)) for manifest in manifests)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
