"""`rm-opt compare RUN RUN`: what differs between finished runs, their numbers side by side, their training curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from flows.cli_runs import named_runs, wide_console
from flows.settings import OPTIONAL_GROUPS
from rmcore.config.files import setting_text
from rmcore.core.errors import ConfigError
from rmcore.core.files import read_json_lines
from rmcore.core.metrics import metric_spec
from rmcore.core.store import flatten
from rmcore.core.tracking import METRICS_FILE
from rmcore.reporting.figures import numbers
from rmcore.reporting.figures.arms import COLOURS
from rmcore.reporting.figures.numbers import estimate
from rmcore.reporting.html.cards import headline_cards, metric_texts
from rmcore.reporting.runs import Run, find_run, short_names
from tasks.home import home

PARTS = {"config", "metrics", "policy", "stages"}
"""Parts of a record that can be compared: it is one of the pipeline."""
ACCURACY = "pairwise_accuracy"
BASELINE = "longer_wins_accuracy"
"""Metric of always choosing the longer side: accuracies mean little without it."""
ABSENT = "-"


def compare_runs(names: Sequence[str], out: Path | None) -> None:
    """Show the settings that differ and the headline numbers of runs, and draw their training curves.

    Args:
        names: of at least two finished runs, or how their names begin.
        out: PNG file of the curves; None: one below the home's reports.

    Raises:
        ConfigError: a name is unknown or may be several, one run is named twice, or a record is not the pipeline's.
    """
    if not 2 <= len(names) <= len(COLOURS):
        raise ConfigError(f"{len(names)} run(s) named: name 2 to {len(COLOURS)}, as `rm-opt runs` lists them.")
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
    from rmcore.reporting.figures.runs import runs_figure  # here: matplotlib, which few commands need
    from rmcore.reporting.figures.style import save

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
