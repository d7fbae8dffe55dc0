"""`rm-opt runs | open | verdict`, and the plan of a run: what was run here, its report, what would run."""

import json
import math
import os
import shlex
import sys
import webbrowser
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from flows.settings import named_changes
from flows.unfinished import judged_run, read_unfinished
from rmcore.cli.common import wide_console
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.store import Store
from rmcore.reporting.figures import numbers
from rmcore.reporting.runs import INDEX, RECORD, Run, find_run, list_runs, read_runs, short_names
from tasks.home import configure_environment, home

if TYPE_CHECKING:
    from rmcore.core.store import ArtifactRef
    from rmcore.study.plan import StagePlan

VERDICT_STATUS = {"met": 0, "refuted": 10, "unclear": 11, "lower_evidence": 12}
"""Exit statuses of `rm-opt verdict`; 2 and 3 are those of every command."""
CHANGES = "what it changes"
NARROW = 125
"""Columns of a terminal below which the list of runs has several facts in one column, one below the other."""
_STACKS = (("run", "finished"), (CHANGES,), ("verdict", "level"), ("accuracy", "device time"))
UNKNOWN = "unknown"
"""Expected time of a stage of which nothing like it has run."""
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables, one of which is set where a browser can be shown on Linux."""


def run_names(incomplete: str) -> list[str]:
    """List the runs' names that the shell completes to."""
    names = [*(run.resume for run in read_unfinished()), *(run.name for run in named_runs())]
    return [name for name in names if name.startswith(incomplete)]


RunName = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Its name or how that begins, see `rm-opt runs`.", autocompletion=run_names),
]


def found_runs() -> list[Run]:
    """All finished runs of this home, the newest first."""
    return read_runs(home() / "reports")


def named_runs() -> list[Run]:
    """The same in no order, of which the one that is named is read."""
    return list_runs(home() / "reports")


def named_run(name: str, has: Mapping[str, object]) -> tuple[PipelineConfig, str]:
    """Find the run that a command continues from, and say so: its settings, and its reward model's checkpoint.

    Args:
        name: of the run, or how that begins.
        has: other options that would name what the run has, with what was given for them.

    Raises:
        ConfigError: one of these was given, or see `judged_run`.
    """
    if twice := [option for option, value in has.items() if value is not None]:
        raise ConfigError(
            f"{name} has settings, pairs and a reward model of its own; leave out {' and '.join(twice)}. --set changes "
            "a setting."
        )
    run, config, checkpoint = judged_run(name, named_runs())
    print(f"settings    of the run {run.name}, and its reward model")
    return config, checkpoint


def runs(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Only runs whose name, verdict or headline holds it.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show so many, the newest ones.")] = 20,
) -> None:
    """List what was run here, newest first: verdict, evidence, accuracy, cost.

    Read from the reports under $RM_OPT_HOME; no server is asked.

    Example: rm-opt runs "not ready"
    """
    for begun in read_unfinished():
        if begun.problem is not None:
            print(f"unreadable  {begun.file}: {begun.problem}; restore it, or delete it")
            continue
        state = "running" if begun.is_running else f"unfinished: rm-opt run --from {begun.resume}"
        print(f"{begun.name}  begun {_moment(begun.started)}, {state}")
    found = found_runs()
    if not found:
        print(f"nothing was run to its end yet in {home()}; start with `rm-opt run`")
        return
    short = short_names([run.name for run in found])
    if text is not None:
        said = text.casefold()
        found = [run for run in found if any(said in part.casefold() for part in (run.name, run.status, run.headline))]
    if not found:
        print(f"none of {len(short)} runs holds {text!r} in its name, verdict or headline")
        return
    shown = found[:limit]
    rows = [_row(run, short[run.name]) for run in shown]
    console = wide_console()
    is_narrow = console.width < NARROW
    columns = _STACKS if is_narrow else [(name,) for names in _STACKS for name in names]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, leading=int(is_narrow))
    for names in columns:
        heading = "\n".join(name for name in names if name in rows[0])
        table.add_column(heading, no_wrap=CHANGES not in names, overflow="fold")
    for row in rows:
        table.add_row(*("\n".join(escape(row[name]) for name in names if name in row) for names in columns))
    console.print(table)
    for run in shown:
        if run.problem is not None:
            print(f"unreadable  {run.folder / RECORD}: {run.problem}; restore that file, or move its folder away")
    if len(found) > limit:
        asked = "" if text is None else f" {shlex.quote(text)}"
        print(f"{len(found) - limit} older ones: rm-opt runs{asked} --limit {len(found)}")
    print("report      rm-opt open RUN; accuracy is held out, with its 95 % interval; level: of the evidence")
    print(f"all reports {home() / 'reports' / INDEX}")


def _row(run: Run, name: str) -> dict[str, str]:
    """The facts of a run in the list, by heading."""
    return {
        "run": name,
        "finished": _moment(run.finished),
        CHANGES: named_changes(run.config) if run.config else "-",
        "verdict": "unreadable" if run.problem else f"{run.style.sign} {run.status}" if run.status else "-",
        "level": run.rung[:1],
        "accuracy": _accuracy(run),
        "device time": _device_time(run),
    }


def _moment(time: datetime) -> str:
    """The local time, of earlier years the day."""
    local = time.astimezone()
    return local.strftime("%m-%d %H:%M" if local.year == datetime.now().astimezone().year else "%Y-%m-%d")


def _accuracy(run: Run) -> str:
    found = run.accuracy
    if found is None or found["value"] is None:
        return "-"
    return f"{found['value']:.3f}" + (
        "" if found["ci_low"] is None else f" [{found['ci_low']:.3f}, {found['ci_high']:.3f}]"
    )


def _device_time(run: Run) -> str:
    return "-" if run.device_seconds is None else numbers.duration(run.device_seconds)


def print_plan(config: PipelineConfig) -> None:
    """Say which stages of a run are there and which would run, why, and about how long that takes; nothing is run."""
    configure_environment()
    if not any((home() / "throughput").glob("*.json")):  # two steps are about to be timed: torch is imported meanwhile
        from rmcore.core.child_process import import_ahead

        import_ahead(os.environ)
    from flows.planning import plan_run, require_start  # here: pandas and scipy, which the list of runs needs not
    from rmcore.readiness.power import plan_power

    require_start(config)
    plan, probed = plan_run(config, Store(home() / "store"), home())
    due = [stage for stage in plan.stages if stage.ref is None]
    table = Table("stage", "state", "expected", "why", box=SIMPLE_HEAD, pad_edge=False)
    for stage in plan.stages:
        state = "cached" if stage.ref is not None else "to run"
        table.add_row(stage.name, state, _expected(stage) if stage in due else "", escape(stage.why))
    table.add_row("report", "each time", "seconds", "written again, with this run's name and date")
    table.add_row(
        "register", "each time", "seconds", f"a model that was not registered yet: rm-{config.study} in MLflow"
    )
    wide_console().print(table)
    for problem in probed.problems:
        print(f"time unknown: {problem}")
    for line in _judge_calls(config, {stage.name for stage in due}, plan.refs):
        print(f"judge       {line}")
    if (power := plan_power(config)) is not None:
        print(f"judged      {power}")
    known = [stage.seconds for stage in due if stage.seconds is not None]
    num_unknown = sum(_expected(stage) == UNKNOWN for stage in due)
    if not due:
        print("nothing to run: every stage is cached")
    else:
        more = f", and {num_unknown} of unknown length" if num_unknown else ""
        print(f"{len(due)} to run, about {numbers.duration(sum(known))}{more}. Nothing was run.")


def _judge_calls(config: PipelineConfig, due: set[str], refs: Mapping[str, "ArtifactRef"]) -> list[str]:
    """The calls, and their cost, of a judge behind an endpoint in the stages that would run."""
    policy = config.policy
    if policy is None or policy.asked_judge is None or policy.asked_judging is None:
        return []
    from rmcore.data.pair import prompt_text
    from rmcore.data.table import read_pairs
    from rmcore.judging.budget import CHARACTERS, planned
    from rmcore.judging.endpoint import Address
    from rmcore.judging.language_model import calls_for_rewards
    from rmcore.policy.stopping.pair_judges import CALIBRATED
    from rmcore.stages.grpo import START_SAMPLES
    from rmcore.stages.prepared import one_each

    prompts = None
    if "prepare" in refs:
        prompts = one_each(read_pairs(Path(refs["prepare"].path) / "test.parquet"))[: policy.num_prompts]
    num_prompts = policy.num_prompts if prompts is None else len(prompts)
    each = 0.0 if not prompts else sum(len(prompt_text(prompt)) for prompt in prompts) / num_prompts / CHARACTERS
    name, lines = Address.parse(policy.asked_judge).model, []
    unknown = "" if prompts else ", with no count of the prompts' tokens before the data are prepared"
    asked = {"samples": calls_for_rewards(policy.asked_judging, num_prompts, policy.samples_per_prompt)}
    if (rlhf := config.rlhf) is not None and rlhf.watch is not None:
        labels = 0 if rlhf.watch.people else rlhf.watch.labels + 2 * CALIBRATED + rlhf.watch.final_labels
        asked["grpo"] = (rlhf.num_seeds * labels, 1 if policy.asked_judging.mode == "pointwise" else 2)
    elif rlhf is not None:
        count = rlhf.num_seeds * math.ceil(rlhf.steps / rlhf.measure_every) * rlhf.samples_per_prompt + START_SAMPLES
        asked["grpo"] = calls_for_rewards(policy.asked_judging, rlhf.num_prompts, count)
    for stage, (calls, shown) in asked.items():
        if stage in due:  # a response has at most `max_new_tokens`
            cost = planned(policy.asked_judging, calls, each + shown * policy.max_new_tokens)
            lines.append(f"{name} in {stage}: at most {cost}{unknown}")
    return lines


def _expected(stage: "StagePlan") -> str:
    if stage.seconds is not None:
        return f"about {numbers.duration(stage.seconds)}"
    from rmcore.stages.stages import STAGES  # here: it imports readers of data, which `--help` does without

    # Without torch a stage only reads what others computed; prepare reads the data.
    return UNKNOWN if STAGES[stage.name].libraries or stage.name == "prepare" else "seconds"


def open_report(
    run: RunName = None,
    only_print: Annotated[bool, typer.Option("--print", help="Only print where the report is.")] = False,
) -> None:
    """Open the newest report in the browser, or that of a run.

    Where there is no display, its path is printed. Example: rm-opt open demo-seed0
    """
    page = _report(run)
    print(f"report      {page}")
    if not only_print and can_show() and not webbrowser.open(page.as_uri()):
        print("no browser could be started; open that file in one")


def _report(name: str | None) -> Path:
    if name is None:
        newest = next((run.report for run in found_runs() if run.report is not None), None)
        if newest is None:
            raise ConfigError(f"there is no report in {home() / 'reports'} yet; start with `rm-opt run`.")
        return newest
    run = find_run(named_runs(), name)
    if run.report is None:
        raise ConfigError(f"{run.name} has no report of its own; what it found is in {run.folder}.")
    return run.report


def verdict(
    run: RunName = None,
    require: Annotated[
        Literal["passes", "ready", "gained"],
        typer.Option(help="What it has to be: passes its checks, ready for its policy, or gained with a policy."),
    ] = "ready",
) -> None:
    """Print a run's verdict as JSON, with an exit status for pipelines.

    The run is the newest one, or RUN. Status 0: the verdict is what is required. 10: fails, not ready, or lost.
    11: unclear. 12: nothing speaks against it, on a lower level of evidence than required. 2: there is no such run, it
    has no verdict, or RUN is left out and a run that began later has not ended well.

    Example: rm-opt verdict my-run --require ready && ./deploy.sh
    """
    from rmcore.readiness.verdict import meets  # here: scipy, which the list of runs needs not

    one = _newest() if run is None else find_run(named_runs(), run)
    judged = one.record.get("verdict")
    if not isinstance(judged, dict) or "status" not in judged or judged.get("rung") is None:
        raise ConfigError(f"{one.name} has no verdict on a reward model: {one.headline}. `rm-opt runs` lists others.")
    outcome = meets(judged, require)
    said = {"run": one.name, "folder": str(one.folder), "finished": one.finished.isoformat(), "required": require}
    print(json.dumps(said | {"outcome": outcome, "exit_status": VERDICT_STATUS[outcome], "verdict": judged}, indent=2))
    raise typer.Exit(VERDICT_STATUS[outcome])


def _newest() -> Run:
    """The newest of the finished runs.

    Raises:
        ConfigError: there is none, or one that began after its end is running or has failed, so that its verdict is
            an older one's.
    """
    found = found_runs()
    if not found:
        raise ConfigError(f"nothing was run to its end yet in {home()}; start with `rm-opt run`.")
    later = next((run for run in read_unfinished() if run.started > found[0].finished), None)
    if later is not None:
        state = "is still running" if later.is_running else "has not ended well"
        raise ConfigError(
            f"{later.name}, begun {_moment(later.started)}, {state}, and the newest verdict is that of "
            f"{found[0].name}, which finished before. Name the run that is meant: rm-opt verdict RUN."
        )
    return found[0]


def can_show() -> bool:
    """Whether this machine has a display that a browser could open on."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in DISPLAYS)
