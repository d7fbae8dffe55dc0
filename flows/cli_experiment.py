"""`rm-opt experiment` and `rm-opt compare`: plan, run and read a comparison of recipes."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.library import Chosen, load_experiment, restrict
from experiments.shipped import SHIPPED, with_control
from experiments.sizes import Size
from flows.cli_common import prefect_in_use, prepare_terminal, print_how_to_see, say_start
from flows.cli_runs import named_runs, run_names, wide_console
from flows.planning import MatrixPlan, Runner, make_plan
from flows.settings import OPTIONAL_GROUPS, require_names
from rmcore.cli.inputs import written_as
from rmcore.cli.options import options
from rmcore.config.files import setting_text
from rmcore.core.errors import ConfigError
from rmcore.core.files import read_json_lines, write_text
from rmcore.core.metrics import metric_spec
from rmcore.core.store import Store, flatten
from rmcore.core.tracking import METRICS_FILE
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.claims import claimed, measured
from rmcore.reporting.figures.numbers import estimate
from rmcore.reporting.figures.style import SERIES_COLOURS
from rmcore.reporting.html.cards import headline_cards, metric_texts
from rmcore.reporting.runs import Run, find_run, short_names
from rmcore.study.plan import Cell, CellPlan, total_seconds
from tasks.home import home, tracking_address

NameArgument = Annotated[str, typer.Argument(help=f"One of {', '.join(SHIPPED)}, or a YAML file.")]
SIZE_HELP: Any = typer.Option(
    help="smoke (default): synthetic benchmark, minutes. gold: the same at a size that decides. small: real pairs from "
    "RM_OPT_DATA and a pretrained encoder. paper: Qwen2.5-0.5B on hub data, for a GPU."
)
OPTIMIZERS = "adam,muon,sgd"
_KEY = re.compile(r"\b[0-9a-f]{12}\b")
NUM_SEEDS = 3
"""Seeds that `rm-opt compare` runs where nothing else is named."""
SeedsOption = Annotated[int | None, typer.Option(min=1, max=100, help="Replicates of every arm; default: as declared.")]
PARTS = {"config", "metrics", "policy", "stages"}
"""Parts of a record that can be compared: it is one of the pipeline."""
ACCURACY = "pairwise_accuracy"
BASELINE = "longer_wins_accuracy"
"""Metric of always choosing the longer side: accuracies mean little without it."""
ABSENT = "-"


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """Settings that all arms share in place of those of the size, and whether and how the arms are run."""

    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model of all arms: folder or name; default: that of the size.")
    ] = None
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="Pairs for all arms, some of them held out; default: those of the size."),
    ] = None
    epochs: Annotated[
        float | None,
        typer.Option("--epochs", "-e", min=0.001, help="Passes over the training pairs; default: as the size says."),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda: where other machines compute (--runner); default: what this machine has."),
    ] = None
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Only show what is cached, what would run and why, and how long it would take."),
    ] = False
    budget: Annotated[
        float | None, typer.Option("--budget", help="Refuse to start if the missing cells would take more minutes.")
    ] = None
    summary: Annotated[Path | None, typer.Option(help="Write everything that was found to this JSON file.")] = None
    runner: Annotated[
        Runner | None,
        typer.Option(help="threads (default): cells run here. pool: on the machines that run `rm-opt worker`."),
    ] = None

    def named(self) -> dict[str, Any]:
        """By their flags."""
        return {f"--{field.name}": getattr(self, field.name) for field in fields(self)}

    def chosen(self) -> Chosen:
        """Gather what they change of an experiment."""
        shared: Chosen = {"model": self.model, "data": self.data, "epochs": self.epochs, "device": self.device}
        return {**shared, "budget_minutes": self.budget}


@options()
def experiment(
    name: NameArgument,
    given: MatrixOptions,
    size: Annotated[Size | None, SIZE_HELP] = None,
    seeds: SeedsOption = None,
    arms: Annotated[str | None, typer.Option(help="Compare only these arms, separated by commas.")] = None,
) -> int:
    """Compare recipes on pre-registered hypotheses; only missing cells run.

    Verdicts follow from intervals.

    Example: rm-opt experiment ablation --plan, then the same without --plan.
    """
    chosen = None if arms is None else [arm.strip() for arm in arms.split(",") if arm.strip()]
    if size is not None and name not in SHIPPED:
        raise ConfigError(f"--size {size} is for the shipped experiments; {name} says itself what it runs on.")
    more: Chosen = {"arms": chosen, "seeds": seeds}
    return run_or_plan(name, size or "smoke", given, {**given.chosen(), **more})


@options()
def compare(
    given: MatrixOptions,
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Finished runs, see `rm-opt runs`.", autocompletion=run_names),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With runs: PNG file of their curves; default: below the home's reports.", callback=written_as(".png")
        ),
    ] = None,
    optimizers: Annotated[
        str | None, typer.Option(help=f"Optimizers to compare, separated by commas; default: {OPTIMIZERS}.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=100, help=f"Replicates of every optimizer; default: {NUM_SEEDS}.")
    ] = None,
    size: Annotated[Size | None, SIZE_HELP] = None,
) -> int:
    """Compare finished runs side by side, or optimizers in an experiment if no run is named.

    Runs: the settings that differ, the main numbers with intervals, the training curves in one picture.

    Example: rm-opt compare mine-seed0-3f2a mine-seed0-91bc

    Optimizers: same model, data order and initial weights, each at its own learning rate. AdamW, which the
    hypotheses compare with, is always among them.

    Example: rm-opt compare --optimizers adam,muon,sgd --seeds 3

    On your own: rm-opt compare --model minilm --data pairs.parquet --epochs 1 --optimizers muon,sgd
    """
    if runs:
        options = {"--optimizers": optimizers, "--seeds": seeds, "--size": size, **given.named()}
        named = [name for name, value in options.items() if value]
        if named:
            raise ConfigError(f"{', '.join(named)} choose what an experiment runs; leave them out to compare runs.")
        compare_runs(runs, out)
        return 0
    if out is not None:
        raise ConfigError("--out is for the curves of finished runs; name two runs before it.")
    optimizers, seeds, size = optimizers or OPTIMIZERS, seeds or NUM_SEEDS, size or "smoke"
    chosen = with_control([name.strip() for name in optimizers.split(",") if name.strip()])
    return run_or_plan("optimizers", size, given, {**given.chosen(), "arms": chosen, "seeds": seeds})


def run_or_plan(name: str, size: Size, given: MatrixOptions, chosen: Chosen) -> int:
    """Show the plan, or run what is missing; 1 where a cell failed, else 0."""
    summary, declared = given.summary, restrict(load_experiment(name, size), **chosen)
    require_names(*(arm.config for arm in declared.arms()))
    if given.plan:
        store = Store(home() / "store")
        found = make_plan(declared, store, home())
        print_plan(found)
        found.check_budget()
        return 0
    if summary is not None:
        summary.parent.mkdir(parents=True, exist_ok=True)
        summary.touch()  # a path that cannot be written is refused before hours are spent
    say_start(f"{declared.name}-{declared.size}", "cells")
    outcome = run_matrix(name, size, chosen, runner=given.runner or "threads", ends_with_server=True)
    print_outcome(outcome)
    if summary is not None:
        write_text(summary, json.dumps(outcome, indent=1) + "\n")
    return 1 if outcome["failed"] else 0


def run_matrix(
    name: str, size: Size, chosen: Chosen, *, runner: Runner = "threads", ends_with_server: bool = False
) -> dict[str, Any]:
    """Run what is missing of an experiment in this process; what `flows.experiment.experiment` gives.

    `ends_with_server` ends the whole process if Prefect's server goes away: for a command, not for a notebook.

    Raises:
        ServiceError: Prefect failed on the way, with `ends_with_server`.
    """
    prepare_terminal()
    from flows.prefect_api import choose_api

    choose_api()
    from flows.console import quiet_prefect
    from flows.experiment import FailedCellsError
    from flows.experiment import experiment as flow

    quiet_prefect()
    try:
        with prefect_in_use("cells") if ends_with_server else nullcontext():
            outcome: dict[str, Any] = flow(name, size, **chosen, runner=runner)
    except FailedCellsError as error:
        return error.outcome
    return outcome


def print_plan(plan: MatrixPlan) -> None:
    """Show every cell, alike ones in one row: state, why it would run, and the expected time."""
    declared = plan.experiment
    table = Table("cell", "state", "expected", "why", title=f"{declared.title}, size {declared.size}")
    for group in _alike(plan.cells):
        one, each = group[0], " each" if len(group) > 1 else ""
        seconds = total_seconds([one])
        expected = "" if one.state == "cached" else f"{_duration(seconds)}{'' if seconds is None else each}"
        table.add_row(escape(_label([plan.cell for plan in group])), one.state, expected, escape(one.why))
    console = Console()
    console.print(table)
    for arm in declared.arms():
        if arm.merged:
            console.print(escape(f"{', '.join(arm.merged)}: the same settings as {arm.name}; merged into it"))
    for problem in plan.probed.problems:
        console.print(f"[yellow]time unknown:[/] {escape(problem)}")
    total = "nothing to run" if not plan.due else f"{len(plan.due)} to run, {_about(plan.seconds)}"
    console.print(f"{total}; budget {declared.budget_minutes:g} min; shared stages run once")


def print_outcome(outcome: dict[str, Any]) -> None:
    """Show the verdicts, what failed, and where to look."""
    from flows.pipeline import LACKING, shown_path

    results = outcome["results"]
    cost = results["cost"]
    print()
    print(f"computed    {cost['num_computed']} cells; {cost['num_cached']} were cached, {cost['num_failed']} failed")
    for one in results["hypotheses"]:
        unit = results["metrics"][one["metric"]]["unit"]
        value, bounds = measured(one, unit)
        shown = f"{value} ({bounds})" if bounds else value
        print(f"{one['name']:<11} {one['verdict']:<13} {one['claim']}")
        print(f"{'':<25} {shown}, claimed {claimed(one, unit)}")
    if not results["hypotheses"]:
        print("verdicts    none: this experiment has no hypothesis")
    for cell in results["cells"]:
        if cell["error"] is not None:
            print(f"failed      {cell['arm']} seed {cell['seed']}: {cell['error']}", file=sys.stderr)
    print(f"registered  {results['registration']['hash'][:12]} at {results['registration']['frozen_at']}")
    print(f"report      {shown_path(outcome['report'])}")
    if outcome["mlflow_url"] is None:
        print(f"MLflow      {LACKING}")
    elif not tracking_address(home()).startswith("http"):
        print_how_to_see()
    else:
        print(f"MLflow      {outcome['mlflow_url']}")
        print(f"charts      {outcome['mlflow_charts_url']}")


def _alike(plans: Sequence[CellPlan]) -> list[list[CellPlan]]:
    """Cells that follow one another and are the same but for their seed, each group one row."""

    def shown(one: CellPlan) -> tuple[object, ...]:
        why = _KEY.sub("", one.why)  # of the artifact that a cell is compared with: each seed has its own
        return one.cell.arm, one.state, why, _duration(total_seconds([one]))

    return [list(group) for _, group in groupby(plans, key=shown)]


def _label(cells: Sequence[Cell]) -> str:
    """The name of a row: `A3 seed 4`, `A3 seeds 0 to 19`, `A3 seeds 0, 3, 4`."""
    if len(cells) == 1:
        return cells[0].label
    seeds = [cell.seed for cell in cells]
    in_a_row = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{cells[0].arm} seeds {f'{seeds[0]} to {seeds[-1]}' if in_a_row else ', '.join(map(str, seeds))}"


def _about(seconds: float | None) -> str:
    return "time unknown" if seconds is None else f"about {_duration(seconds)}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def compare_runs(names: Sequence[str], out: Path | None) -> None:
    """Show the settings that differ and the headline numbers of runs, and draw their training curves.

    Args:
        names: of at least two finished runs, or how their names begin.
        out: PNG file of the curves; None: one below the home's reports.

    Raises:
        ConfigError: a name is unknown or may be several, one run is named twice, or a record is not the pipeline's.
    """
    if not 2 <= len(names) <= len(SERIES_COLOURS):
        raise ConfigError(f"{len(names)} run(s) named: name 2 to {len(SERIES_COLOURS)}, as `rm-opt runs` lists them.")
    known = named_runs()
    short = short_names([run.name for run in known])
    runs: dict[str, Run] = {}
    for name in names:
        run = find_run(known, name)
        if short[run.name] in runs:
            raise ConfigError(f"{name!r} is {run.name}, which is named already; name another run.")
        if not run.record.keys() >= PARTS:
            raise ConfigError(
                f"{run.name} is not a run of the pipeline: {run.headline}. Runs of "
                "`rm-opt run` and `rm-opt rlhf` can be compared; an experiment has its arms side by side in its report."
            )
        runs[short[run.name]] = run
    _print_table("settings that differ", changed_settings(runs), list(runs))
    _print_table("what came out", _numbers(runs), list(runs))
    for line in _paired(runs):
        print(line)
    _draw(runs, out or home() / "reports" / f"compared-{'-'.join(runs)}.png")


def changed_settings(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """By dotted name the settings that are not the same in all runs, as text, one value a run.

    A group that one of them does without is one setting: what in it is not the default.
    """
    flat = [flatten(run.config) for run in runs.values()]
    for group, model in OPTIONAL_GROUPS.items():
        if any(group in one for one in flat):
            flat = [_without_fields(one, group, flatten(model().model_dump(mode="json"))) for one in flat]
    names = dict.fromkeys(name for one in flat for name in one)
    found = {name: [setting_text(one[name]) if name in one else ABSENT for one in flat] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _without_fields(flat: Mapping[str, Any], group: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings with one for a whole group in place of its fields."""
    rest = {name: value for name, value in flat.items() if not name.startswith(f"{group}.")}
    own = {name.removeprefix(f"{group}."): value for name, value in flat.items() if name not in rest}
    changed = [f"{name}={setting_text(own[name])}" for name in own if (name, own[name]) not in defaults.items()]
    return rest | ({group: ", ".join(changed) or "all defaults"} if own else {})


def _numbers(runs: Mapping[str, Run]) -> dict[str, list[str]]:
    """Verdict, evidence level, the numbers that a report begins with, and the length baseline, one value a run."""
    records: list[Any] = [run.record for run in runs.values()]
    cards = [{card.label: card for card in headline_cards(record)} for record in records]
    rows = {
        "verdict": [f"{run.style.sign} {run.headline}" for run in runs.values()],
        "evidence level": [run.rung for run in runs.values()],
    }
    for label in dict.fromkeys(label for found in cards for label in found):
        shown = [found.get(label) for found in cards]
        rows[label] = [f"{card.value}\n{card.interval.removeprefix('95 %: ')}" if card else ABSENT for card in shown]
        if label == metric_spec(ACCURACY).label:
            rows[metric_spec(BASELINE).label] = [_baseline(run) for run in runs.values()]
    rows["device time"] = [numbers.duration(run.device_seconds) for run in runs.values()]
    return rows


def _baseline(run: Run) -> str:
    value, interval, _ = metric_texts(BASELINE, run.record["metrics"].get(BASELINE))
    return f"{value}\n{interval}"


def _paired(runs: Mapping[str, Run]) -> list[str]:
    """Say what the pairs themselves tell of the difference, which intervals side by side do not."""
    from rmcore.evaluation.comparison import on_common_pairs, paired_comparison
    from rmcore.stages.results import held_out_rewards

    lines = []
    first, *others = runs.items()
    for name, run in others:
        own, base = held_out_rewards(run.record), held_out_rewards(first[1].record)
        if own is None or base is None:
            lines.append(f"{name} − {first[0]}: the stored rewards of one of them are gone; run it again")
            continue
        common = on_common_pairs(own, base)
        if common[0].empty:
            lines.append(f"{name} − {first[0]}: they hold out no pair in common, so their accuracies do not compare")
            continue
        compared = paired_comparison(*common)
        value, bounds = estimate(ACCURACY, compared["accuracy_difference"], metric_spec(ACCURACY).unit, "difference")
        p = compared["sign_flip_p"]
        interval = f"95 %: {bounds}" if bounds else "no interval"
        lines.append(f"{name} − {first[0]}: {value} ({interval}; sign-flip p = {p:.2g})")
        left_out = len(own) - len(common[0]), len(base) - len(common[1])
        if any(left_out):
            left = f"left out: {left_out[0]:,} of {name}, {left_out[1]:,} of {first[0]}"
            lines.append(f"  on the {len(common[0]):,} pairs that both hold out; {left}")
    return ["difference of accuracy on the same held-out pairs, paired by prompt", *(f"  {line}" for line in lines)]


def _artifact(run: Run, stage: str) -> Path:
    return next((Path(one["path"]) for one in run.record["stages"] if one["name"] == stage), Path("/nowhere"))


def _draw(runs: Mapping[str, Run], out: Path) -> None:
    from rmcore.reporting.figures.style import save
    from rmcore.reporting.figures.training import runs_figure  # here: matplotlib, which few commands need

    histories = {name: read_json_lines(_artifact(run, "train") / METRICS_FILE) for name, run in runs.items()}
    gone = [name for name, history in histories.items() if not history]
    if gone:
        print(f"no curves   of {', '.join(gone)}: the stored training is gone; run it again")
    if len(gone) < len(runs):
        print(f"curves      {save(runs_figure(histories), out)}")


def _print_table(title: str, rows: Mapping[str, Sequence[str]], names: Sequence[str]) -> None:
    if not rows:
        print(f"{title}: none")
        return
    table = Table("", *names, title=title, title_justify="left")
    for label, values in rows.items():
        table.add_row(escape(label), *map(escape, values))
    wide_console().print(table)
