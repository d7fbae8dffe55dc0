"""`rm-opt store`: what is stored, why it was computed, and what MLflow has not been sent yet."""

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows import cli_runs
from rmcore.core.errors import ConfigError
from rmcore.reporting.runs import find_run
from tasks.home import configure_environment, digests_file, home, make_home

if TYPE_CHECKING:
    from rmcore.core.manifests import Entry
    from rmcore.core.store import Store

app = typer.Typer(no_args_is_help=True, help="List, verify, explain and bound artifacts; send what MLflow missed.")


@app.command("ls")
def store_ls() -> None:
    """List artifacts, the most recently used first."""
    from datetime import datetime

    entries = _store().entries()
    for entry in entries:
        used = datetime.fromtimestamp(entry.last_used).astimezone().strftime("%Y-%m-%d %H:%M")
        print(f"{entry.key[:12]}  {entry.stage:<10} {entry.num_bytes / 2**20:8.1f} MiB  used {used}  {entry.path.name}")
    print(
        f"{len(entries)} artifacts, {sum(entry.num_bytes for entry in entries) / 2**20:.1f} MiB in {home() / 'store'}"
    )


@app.command("verify")
def store_verify() -> None:
    """Digest every file of every artifact and name what is damaged; exit status 1 if anything is.

    A run looks at sizes and modification times alone, so it does not see a change that leaves both. What is found
    damaged here is made again by the next run that needs it. Models and data of yours that runs read are digested
    again by the next run.
    """
    digests_file().unlink(missing_ok=True)
    num_verified = num_damaged = 0
    for folder, damage in _store().verify():
        num_verified += 1
        if damage is not None:
            num_damaged += 1
            print(f"damaged: {folder.parent.name} {folder.name}: {damage}")
    print(f"{num_verified} artifacts verified, {num_damaged} damaged")
    if num_damaged:
        raise typer.Exit(1)


@app.command("gc")
def store_gc(
    keep: Annotated[int, typer.Option(min=0, help="Artifacts kept of each stage, the most recently used ones.")],
) -> None:
    """Remove old artifacts and what dead writers left behind. A removed artifact is computed again when needed.

    What a running pipeline reads stays, and is named. Folders whose manifest is missing or changed can be used by
    nothing: they go, too, and are named.
    """
    make_home(home())  # locks are the first files of a home that was never used
    removed, in_use, unusable = _store().collect_garbage(keep)
    for folder in unusable:
        print(f"its manifest was missing or not what was written, removed: {folder}")
    for entry in in_use:
        print(f"in use by a running pipeline, kept: {entry.stage} {entry.key[:12]}  {entry.path.name}")
    freed = sum(entry.num_bytes for entry in removed) / 2**20
    print(f"removed {len(removed)} artifacts, {freed:.1f} MiB")


@app.command("push")
def store_push() -> None:
    """Share what was computed while no store was shared, or while it was away (RM_OPT_SHARED)."""
    from tasks.sharing import named_store

    shared, number = named_store(), 0
    for entry, is_committed in shared.push_all(_store()):
        number += is_committed
        said = "" if is_committed else ": another machine committed another outcome of the same inputs; both are kept"
        print(f"{entry.stage:<10} {entry.path.name}{said}")
    print(f"pushed {number} artifacts to {shared.url}")


@app.command("sync")
def store_sync(
    to: Annotated[str | None, typer.Option(help="MLflow address; default: the one each run was meant for.")] = None,
) -> None:
    """Send runs to MLflow that could not be sent when they ran."""
    configure_environment()
    from tasks.projection import sync_pending

    sent = sync_pending(home(), to)
    print(f"sent: {', '.join(sent)}" if sent else "nothing waits to be sent")


@app.command("why")
def store_why(
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
    store = _store()
    if store.matches(name):
        _print_why(store, store.resolve(name))
        return
    run = find_run(cli_runs.named_runs(), name, also=f"; no artifact of {store.root} has that key or folder either")
    print(f"run {run.name}")
    stages = run.record.get("stages")
    if not stages:
        raise ConfigError(f"{run.name} names no stages of its own; its cells and artifacts are in `rm-opt store ls`.")
    for stage in stages:
        entry = store.entry(stage["name"], stage["key"])
        if entry is None:
            print(f"{stage['name']} {stage['key'][:12]}: no longer in the store; the run would make it again")
        else:
            _print_why(store, entry)


def _store() -> "Store":
    from rmcore.core.store import Store

    return Store(home() / "store")


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
