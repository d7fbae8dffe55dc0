"""The results of a search: what the report shows, and the recipe that `rm-opt run` takes."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from flows.matrix import Outcome
from flows.tune_run import Tuning
from rmcore.core.cost import price_per_hour
from rmcore.core.files import write_text
from rmcore.core.store import ArtifactRef
from rmcore.data.table import count_pairs
from rmcore.reporting.schema import Metric
from rmcore.reporting.tuning_schema import ArmRow, TrialRow, TuningResults
from rmcore.stages.results import artifact_seconds
from rmcore.study.objectives import DEFINITIONS, LABELS, Objective, higher_is_better, unit
from rmcore.study.plan import folders
from rmcore.study.search_space import settings_line
from rmcore.study.tuning_result import Comparison, Confirmed, compare_arms, is_better, metric, read_confirmed, verdict

RECIPE_SECTIONS = ("study", "seed", "data", "model", "train", "evaluate", "policy", "validation", "active", "rlhf")
"""Sections of a recipe: all that decides its numbers, and what the preset beneath must not bring."""
NOTHING: Metric = {"value": 0.0, "ci_low": None, "ci_high": None, "num": 0, "reason": "the winner is the defaults"}


def gather_tuning(run: Tuning, best: Any, cells: Mapping[str, Outcome], prepared: ArtifactRef) -> TuningResults:
    """Gather everything that a search found.

    Args:
        run: the search.
        best: record of the winning trial.
        cells: of the confirmation, by label.
        prepared: the pairs of the trials.
    """
    objective, higher = run.objective, higher_is_better(run.objective)
    records = run.search.records()
    confirmed = {arm: _read(run, cells, arm) for arm in {one.cell.arm for one in cells.values()}}
    are_defaults = best.number == 0
    defaults = confirmed["defaults"]
    winner = defaults if are_defaults else confirmed["winner"]
    found = compare_arms(objective, winner, defaults)
    difference = NOTHING if are_defaults else metric(found.difference)
    search_seconds = run.search.seconds
    confirmation = sum(artifact_seconds(run.store, one.refs.values(), on_device=True) for one in cells.values())
    total = search_seconds + confirmation
    rows = [_trial_row(run, one) for one in records]
    pairs = {name: count_pairs(Path(prepared.path) / f"{name}.parquet") for name in ("train", "validation")}
    return {
        "name": run.name,
        "study": run.base.study,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "headline": verdict(objective, difference, are_defaults=are_defaults),
        "is_better": not are_defaults and found.is_better,
        "objective": objective,
        "label": LABELS[objective],
        "definition": DEFINITIONS[objective],
        "unit": unit(objective),
        "higher_is_better": higher,
        "model": run.base.model.name,
        "data": run.base.data.source,
        "num_train": pairs["train"],
        "num_validation": pairs["validation"],
        "num_test_prompts": found.winner.num_prompts or 0,
        "seed": run.base.seed,
        "seeds": [one.seed for one in defaults],
        "space": run.space.to_dict(),
        "trials": rows,
        "winner": _arm_row(rows[best.number], winner, found, 0, objective),
        "defaults": _arm_row(rows[0], defaults, found, 1, objective),
        "difference": difference,
        "method": found.difference.method,
        "importance": run.search.importance(),
        "notes": run.notes,
        "cost": {
            "search_seconds": search_seconds,
            "confirmation_seconds": confirmation,
            "device_seconds": total,
            "price_per_hour": price_per_hour(),
        },
        "recipe": "",
    }


def _read(run: Tuning, cells: Mapping[str, Outcome], arm: str) -> list[Confirmed]:
    own = [one for one in cells.values() if one.cell.arm == arm]
    return [
        read_confirmed(one.cell.seed, run.objective, folders(one.refs), beta=one.cell.config.train.beta) for one in own
    ]


def _trial_row(run: Tuning, one: Any) -> TrialRow:
    settings = run.search.settings_of(one.number)
    # Settings that do not fit together have no rungs either.
    ends: tuple[int, ...] = run.search.ends_of(one.number) if one.values else ()
    return {
        "number": one.number,
        "state": one.state,
        "settings": settings,
        "values": list(one.values),
        "shares": [end / ends[-1] for end in ends[: len(one.values)]],
        "seconds": one.seconds,
        "train_seconds": one.train_seconds,
        "why": one.why,
    }


def _arm_row(row: TrialRow, arm: list[Confirmed], found: Comparison, place: int, objective: Objective) -> ArmRow:
    selected, fresh, of = row["values"][-1], found.fresh[place], unit(objective)
    return {
        "trial": row["number"],
        "settings": row["settings"],
        "selected": selected,
        "fresh": metric(fresh, of),
        "fresh_values": [one.validation.value for one in arm],
        "test": metric(found.winner if place == 0 else found.defaults, of),
        "test_values": [one.test.value for one in arm],
        "optimism": (1 if higher_is_better(objective) else -1) * (selected - fresh.value),
        "train_seconds": sum(one.train_seconds for one in arm) / len(arm),
    }


def write_recipe(run: Tuning, best: Any, results: TuningResults, out: Path) -> Path:
    """Write the settings to keep as a file that `rm-opt run --config` takes; returns `out`.

    They are the winner's where it is shown to be better than the defaults, and else the defaults: among noisy trials
    one is always the best. Under the first fresh seed, so the run finds its training in the store. A data file is named
    by its whole path.
    """
    keeps_winner = is_better(results["difference"])
    config = run.config_of(best.number if keeps_winner else 0, results["seeds"][0])
    tree = config.model_dump(mode="json", include=set(RECIPE_SECTIONS))
    for name in ("source", "eval_source"):
        if (given := tree["data"][name]) is not None and Path(given).exists():
            tree["data"][name] = str(Path(given).resolve())
    chosen = settings_line(results["winner"]["settings"])
    winner = f"the winner of the search {run.name}, trial {best.number}: {chosen or 'the defaults'}."
    head = [
        f"This is {winner}" if keeps_winner else f"These are the defaults, and not {winner}",
        results["headline"],
        f"rm-opt run --config {out.name}",
    ]
    ordered = {name: tree[name] for name in RECIPE_SECTIONS if name in tree}
    body = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=100)
    write_text(out, "".join(f"# {line}\n" for line in head) + body)
    return out
