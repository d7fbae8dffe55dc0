"""A search for the best settings: prepare, trials, choose, confirm with fresh seeds, report."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
import yaml
from prefect import runtime
from prefect.exceptions import TerminationSignal
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.console import say
from flows.form import FIELDS, Form, configured_flow, presets_for
from flows.matrix import MatrixRunner, Outcome, cell_tracker
from flows.pipeline import (
    REPORT_FILE,
    REPORT_FOLDER,
    begin_flow_run,
    leave_embedded,
    own_pages,
    places,
    run_stages,
    show_on_page,
)
from flows.planning import TRIAL_STAGES
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.cost import price_per_hour
from rmcore.core.digests import make_key
from rmcore.core.errors import ConfigError, DataError, TrainingError
from rmcore.core.files import write_json, write_text
from rmcore.core.store import ArtifactRef, Store
from rmcore.data.parquet_rows import RecordFile
from rmcore.data.table import PAIRS, read_pairs
from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.index import write_index
from rmcore.reporting.html.note import run_note
from rmcore.reporting.html.page import write_block_report
from rmcore.reporting.html.tuning import TuningResults, tuning_block
from rmcore.stages.interface import observations_of
from rmcore.stages.results import artifact_seconds
from rmcore.study.analysis import arm_metrics
from rmcore.study.cells import read_cell
from rmcore.study.estimates import Estimates
from rmcore.study.plan import Cell, Planner, folders
from rmcore.study.tuning import DEFAULTS, OBJECTIVES, WHY, WINNER, Objective, compare, trial_score, verdict
from tasks.device import device_slots
from tasks.headline import interval_tags
from tasks.stages import run_step
from tasks.tracking import RunTracker

if TYPE_CHECKING:
    from optuna.trial import Trial

    from rmcore.study.search import Search

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}")
FEWEST_PROMPTS = 10
"""Prompts below which trials, or the winner and the defaults, differ by luck alone."""
MOST_FAILURES = 8
"""Trials in a row that may fail before something else is wrong."""
STOPPED = ("was asked to stop", "stopped before stage")
"""Words of the error of a cell that did not fail of itself."""
RECIPE_SECTIONS = ("study", "seed", "data", "model", "train", "evaluate", "policy", "rlhf")
"""Sections of a recipe: all that decides its numbers, and what the preset beneath must not bring."""
FORM = Form(
    "minilm",
    {name: FIELDS[name] for name in ("data", "model", "seed", "study")},
    ("data", "model", "train", "evaluate"),
    presets_for("run"),
)
PICTURE = """
prepare ─┬─> trial 0, the defaults ─┐
         └─> trials 1 to n         ─┴─> the best ──> confirmation ──> report
confirmation: winner and defaults with fresh seeds, prepare ──> train ──> evaluate on the test pairs
"""


@configured_flow("tune", FORM, PICTURE, "-tune", task_runner=ThreadPoolTaskRunner(max_workers=device_slots()))
def tune(
    config: PipelineConfig,
    trials: Annotated[int, Field(ge=1, le=10_000)] = 20,
    objective: Objective = "accuracy",
    space: dict[str, Any] | None = None,
    name: str | None = None,
    seeds: Annotated[int, Field(ge=2, le=100)] = 3,
) -> dict[str, Any]:
    """Search for the best settings of a reward model on these pairs, and say what the best are worth.

    Trials see training and validation pairs. The winner and the defaults are then trained with fresh seeds and measured
    on test pairs that no trial saw. A search that was stopped continues where it was.

    Args:
        config: data, model, and the defaults, which are the first trial.
        trials: how many, the defaults and those that fail included.
        objective: what is compared on the validation pairs: accuracy or loss.
        space: the settings that are searched, each with choices or a range; left out, a small space around the
            defaults.
        name: of the search, in MLflow and in the folder of its report. Left out: study and objective.
        seeds: fresh seeds of the confirmation.

    Returns:
        {"results": everything the report shows, "report": path, "recipe": path, "mlflow_url": address or None,
        "computed": labels of what ran, "failed": labels of trials that failed}.

    Raises:
        ConfigError: a space or objective that cannot be used, or no trial came to its end.
    """
    from rmcore.study.search import Search, default_space, parse_space, space_record

    name = name or f"{config.study}-{objective}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"a search cannot be called {name!r}: use letters, digits, '.', '_' and '-', at most 61.")
    base = tuned_base(config)
    chosen = default_space(base) if space is None else parse_space(space, base)
    declared: dict[str, Any] = {
        "base": base.model_dump(mode="json", exclude={"study", "loggers", "device"}),
        "space": space_record(chosen),
        "objective": objective,
    }
    store = begin_flow_run()
    key = make_key({"name": name, **declared})[:12]
    with RunTracker.start(
        base.study,
        name,
        {"rm.kind": "tuning", "rm.tuning": key, "prefect.flow_run_id": str(runtime.flow_run.id)},
        base,
        uid=f"tune-{key}",
    ) as tracker:
        prepared = Path(run_stages(("prepare",), base, store, tracker)["prepare"].ref.path)
        for split in ("validation", "test"):  # told before the search is paid for
            require_prompts(prepared, split)
        for setting, shown in declared["space"].items():
            say(f"{setting:<24} {shown}")
        search = Search(base, chosen, objective, num_trained(prepared, base))
        folder = home() / "reports" / f"{name}-{key}"
        run = Tuning(name, key, store, search, trials, seeds, folder)
        try:
            run.search_all()
            cells = run.confirm()
        except (KeyboardInterrupt, TerminationSignal):
            say("stopped; all finished trainings are kept: the same command continues from there")
            leave_embedded(tracker)
            raise

        def tell() -> tuple[TuningResults, Path]:
            results = run.results(cells, prepared)
            text = run.recipe(results)
            write_text(folder / "recipe.yaml", text)
            report = write_block_report(name, tuning_block(results, text), {}, folder / REPORT_FILE)
            write_json(folder / "summary.json", results)
            write_index(folder.parent)
            for file in (report, folder / "recipe.yaml"):
                tracker.log_file(file, REPORT_FOLDER)
            difference = results["difference"]
            found = {"tune/gain": difference["value"], "cost/search_seconds": results["search_seconds"]}
            tracker.log_metrics({metric: value for metric, value in found.items() if value is not None})
            tracker.set_tags(interval_tags({"tune/gain": difference}))
            tracker.set_tags({"rm.verdict": "better" if results["is_better"] else "not shown to be better"})
            tracker.describe(run_note(results["headline"], *places(report)))
            return results, report

        results, report = run_step("report", tell, run.runner.handed).found
    show_on_page(markdown(tuning_block(results)), report, tracker.url)
    return {
        "results": results,
        "report": str(report),
        "recipe": results["recipe"],
        "mlflow_url": own_pages(tracker).get("MLflow"),
        "computed": run.computed,
        "failed": [f"trial {one['number']}" for one in results["trials"] if one["state"] == "failed"],
    }


def tuned_base(config: PipelineConfig) -> PipelineConfig:
    """Return the settings that trials change: those of the config, with one test set that no trial sees for all seeds.

    What only other flows read is left out, so that a recipe is about the reward model.
    """
    data = config.data
    if data.eval_source is None and data.eval_split is None and data.test_seed is None:
        data = data.model_copy(update={"test_seed": config.seed})
    rest = {"policy": None, "rlhf": None, "data": data}
    return PipelineConfig.model_validate(config.model_copy(update=rest).model_dump())


def require_prompts(prepared: Path, split: str) -> None:
    """Refuse prepared data in which trials, or the winner and the defaults, could be told apart by luck alone.

    Raises:
        DataError: fewer than FEWEST_PROMPTS prompts are in the split.
    """
    place = prepared / f"{split}.parquet"
    num = len({pair.prompt_id for pair in read_pairs(place)}) if place.is_file() else 0
    if num < FEWEST_PROMPTS:
        raise DataError(
            f"the {split} pairs are of {num} prompts, and fewer than {FEWEST_PROMPTS} tell settings apart by luck "
            f"alone: raise data.{split}_fraction, or give more data."
        )


def num_trained(prepared: Path, base: PipelineConfig) -> int:
    """Return the pairs that a trial is trained on; or observations, where the data say more than strict pairs."""
    said = observations_of(prepared, "train") if base.train.objective == "auto" else None
    return len(RecordFile(PAIRS, prepared / "train.parquet")) if said is None else len(said)


@dataclass
class Tuning:
    """One run of a search, whose finished trainings are taken from the store."""

    name: str
    key: str
    store: Store
    search: "Search"
    num_trials: int
    num_seeds: int
    folder: Path
    computed: list[str] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of training of each complete trial, by its number."""
    failed_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.base, self.objective = self.search.base, OBJECTIVES[self.search.objective]
        self.planner = Planner(self.store, Estimates((), {}))
        self.runner = MatrixRunner(self.name, self.store, self._start_tracker, self._finish_tracker)
        self.seeds = [(self.base.seed + 1 + place) % 2**31 for place in range(self.num_seeds)]

    def search_all(self) -> None:
        """Run trials as many side by side as the device has slots."""
        while batch := self._next():
            cells = [
                Cell(f"trial {one.number}", f"trial {one.number}", self.base.seed, config, TRIAL_STAGES)
                for one, config in batch
            ]
            outcomes = self.runner.run([self.planner.plan(cell) for cell in cells], "trials")
            for (trial, _), outcome in zip(batch, outcomes.values(), strict=True):
                self._tell(trial, outcome)

    def _next(self) -> "list[tuple[Trial, PipelineConfig]]":
        """Draw the next trials, none where the search is over."""
        from rmcore.study.search import reason, text_of

        drawn: list[tuple[Trial, PipelineConfig]] = []
        while len(drawn) < device_slots() and (number := len(self.search.trials)) < self.num_trials:
            trial = self.search.ask()
            try:
                config = self.search.config_of(number)
            except ValueError as error:
                drawn_values = ", ".join(f"{name}={text_of(value)}" for name, value in trial.params.items())
                self._fail(trial, f"its settings do not fit together ({drawn_values}): {reason(error)}")
                continue
            drawn.append((trial, config))
        return drawn

    def _tell(self, trial: "Trial", outcome: Outcome) -> None:
        """Tell the search how a trial ended."""
        if outcome.error is not None and any(words in outcome.error for words in STOPPED):
            raise TrainingError(outcome.error)
        value = None
        if outcome.error is None:
            value = trial_score(folders(outcome.refs)["train"], f"eval/{self.objective.name}")
        if value is None:
            self._fail(trial, outcome.error or f"no step of it has a finite validation {self.objective.label}")
            return
        self.failed_in_a_row = 0
        if outcome.computed:
            self.computed.append(outcome.cell.arm)
        self.seconds[trial.number] = artifact_seconds(self.store, [outcome.refs["train"]])
        self.search.study.tell(trial, value)
        say(f"{outcome.cell.arm:<24} {self.objective.label} {value:.4f}")

    def _fail(self, trial: "Trial", why: str) -> None:
        if not trial.number:
            raise TrainingError(
                f"the defaults themselves failed, with which all trials are compared: {why} Correct the preset, "
                "--set or --config, or what the machine lacks, and repeat the command."
            )
        self.search.fail(trial, why)
        say(f"failed, and the search continues: trial {trial.number}: {why}")
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= MOST_FAILURES:
            raise TrainingError(
                f"{MOST_FAILURES} trials in a row failed, the last one because: {why} Correct that (a full disk, a "
                "space whose values do not fit together) and repeat the command."
            )

    def confirm(self) -> dict[str, Outcome]:
        """Train winner and defaults with fresh seeds and measure them on the test pairs.

        Raises:
            TrainingError: a cell failed; the same command tries it again.
        """
        best = self.search.best()
        arms = {DEFAULTS: 0} | ({WINNER: best.number} if best.number else {})
        cells = [
            Cell(arm, arm, seed, self._config_of(number, seed), ("prepare", "train", "evaluate"))
            for seed in self.seeds
            for arm, number in arms.items()
        ]
        say(f"winner: trial {best.number}; confirmed with {len(self.seeds)} fresh seeds on the test pairs")
        outcomes = self.runner.run([self.planner.plan(cell) for cell in cells], "cells of the confirmation")
        if failed := {label: one.error for label, one in outcomes.items() if one.error}:
            raise TrainingError(
                f"{len(failed)} of {len(cells)} trainings of the confirmation failed: {failed}. Nothing is said on the "
                "strength of those that are left; the same command tries them again."
            )
        self.computed += [label for label, one in outcomes.items() if one.computed]
        return outcomes

    def _config_of(self, number: int, seed: int) -> PipelineConfig:
        return self.search.config_of(number).model_copy(update={"seed": seed})

    def results(self, cells: Mapping[str, Outcome], prepared: Path) -> TuningResults:
        """Gather everything that the report shows."""
        from rmcore.study.search import space_record

        best, spec, objective = self.search.best(), self.objective, self.search.objective
        metric = spec.cell_name
        measured = {
            (one.cell.arm, one.cell.seed): read_cell(one.cell.arm, one.cell.seed, folders(one.refs), [metric])
            for one in cells.values()
        }
        compared = compare(objective, measured, self.seeds) if best.number else None
        tested = {arm: arm_metrics(measured, arm, self.seeds, [metric])[metric] for arm, _ in measured}
        measure = compared or {"value": 0.0, "ci_low": None, "ci_high": None}
        file = self.folder / "summary.json"
        before = set(json.loads(file.read_text()).get("confirmed", []) if file.is_file() else []) - {best.number}
        looked = (
            f"the test pairs were looked at before, for trials {', '.join(map(str, sorted(before)))}: each look is "
            "another chance to be better by luck, which the interval does not allow for"
        )
        return {
            "name": self.name,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "headline": verdict(objective, compared),
            "is_better": compared is not None and compared["verdict"] == "supported",
            "label": spec.label,
            "unit": spec.unit,
            "model": self.base.model.name,
            "data": self.base.data.source,
            "num_pairs": {
                one: len(RecordFile(PAIRS, prepared / f"{one}.parquet")) for one in ("train", "validation", "test")
            },
            "seeds": self.seeds,
            "space": space_record(self.search.space),
            "defaults": self.search.settings_of(0),
            "winner": self.search.settings_of(best.number),
            "winner_trial": best.number,
            "confirmed": sorted({*before, best.number}),
            "trials": [
                {
                    "number": one.number,
                    "state": "failed" if one.value is None else "complete",
                    "settings": self.search.settings_of(one.number),
                    "value": one.value,
                    "seconds": self.seconds.get(one.number, 0.0),
                    "why": one.user_attrs.get(WHY, ""),
                }
                for one in self.search.trials
            ],
            "test": {"defaults": tested[DEFAULTS], "winner": tested[WINNER if best.number else DEFAULTS]},
            "difference": {name: measure[name] for name in ("value", "ci_low", "ci_high")},
            "method": compared["method"] if compared else "",
            "notes": [looked] if before else [],
            "search_seconds": sum(self.seconds.values()),
            "confirmation_seconds": artifact_seconds(
                self.store, [ref for one in cells.values() for ref in one.refs.values()], on_device=True
            ),
            "price_per_hour": price_per_hour(),
            "recipe": str(self.folder / "recipe.yaml"),
        }

    def recipe(self, results: TuningResults) -> str:
        """Return the settings to keep as a file that `rm-opt run --config` takes.

        They are the winner's where it is shown to be better than the defaults, and else the defaults: among noisy
        trials one is always the best. Under the first fresh seed, so the run finds its training in the store.
        """
        number = results["winner_trial"] if results["is_better"] else 0
        tree = self._config_of(number, self.seeds[0]).model_dump(mode="json", include=set(RECIPE_SECTIONS))
        for name in ("source", "eval_source"):
            if (given := tree["data"][name]) is not None and Path(given).exists():
                tree["data"][name] = str(Path(given).resolve())
        head = [f"Trial {number} of the search {self.name}.", results["headline"], "rm-opt run --config recipe.yaml"]
        ordered = {name: tree[name] for name in RECIPE_SECTIONS}
        body = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=100)
        return "".join(f"# {line}\n" for line in head) + body

    def _start_tracker(self, cell: Cell, refs: dict[str, ArtifactRef]) -> RunTracker:
        tags = {"rm.kind": "trial" if cell.arm.startswith("trial") else "cell", "rm.tuning": self.key}
        title = f"{self.name} {cell.label}"
        return cell_tracker(self.base.study, title, f"tune-{self.key}", cell, refs, tags, self.search.space)

    def _finish_tracker(self, tracker: RunTracker, cell: Cell, refs: dict[str, ArtifactRef]) -> None:
        tracker.describe(run_note(f"{cell.label}: a part of the search {self.name}", *places(None)))
