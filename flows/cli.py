"""`rm-opt`: the whole command line. Commands that need no orchestrator come from rmcore.cli.

Nothing of a command is imported here: its line is listed with its place (`rmcore.cli.help`).
"""

import atexit
import gc
import os
import sys
from typing import Annotated

import typer

from rmcore import cli as alone
from rmcore.cli.guard import guard, outlive_readers
from rmcore.cli.help import Listed, lazy_app

START = {
    "run": Listed("flows.cli_run:run", "Run the whole pipeline on preference pairs, to a verdict and a report."),
    "init": Listed(
        "flows.cli_run:init", "Write rm-opt.yaml here: the common settings, with their help, for `rm-opt run`."
    ),
    "runs": Listed("flows.cli_runs:runs", "List what was run here, newest first: verdict, evidence, accuracy, cost."),
    "open": Listed("flows.cli_runs:open_report", "Open the newest report in the browser, or that of a run."),
    "verdict": Listed("flows.cli_runs:verdict", "Print a run's verdict as JSON, with an exit status for pipelines."),
}
EXPERIMENTS = {
    "experiment": Listed(
        "flows.cli_experiment:experiment", "Compare recipes on pre-registered hypotheses; only missing cells run."
    ),
    "compare": Listed(
        "flows.cli_experiment:compare",
        "Compare finished runs side by side, or optimizers in an experiment if no run is named.",
    ),
}
SERVICES = {
    "up": Listed("flows.cli_services:up", "Start Prefect, its worker and MLflow here, and deploy the flows."),
    "worker": Listed("flows.cli_services:worker", "Compute cells of experiments for another machine."),
    "down": Listed("flows.cli_services:down", "End what `rm-opt up` started, and nothing else."),
    **alone.SERVICES,
    "info": Listed("flows.cli_services:info", "Show versions, GPUs, the device, the home, and which services run."),
    "store": Listed("flows.cli_store:app", "List, verify, explain and bound artifacts; send what MLflow missed."),
}
POLICIES = {
    **alone.POLICIES,
    "readiness": alone.POLICIES["readiness"]._replace(place="flows.cli_policy:readiness_app"),
    "rlhf": Listed(
        "flows.cli_policy:rlhf", "Train a reward model and a policy against it: a better policy, or a clear no."
    ),
}
PANELS = {
    "Start here": START,
    "Train and measure": alone.TRAINING,
    "Policies": POLICIES,
    "Experiments": EXPERIMENTS,
    "Services and the store": SERVICES,
}
"""Commands by the heading of `rm-opt --help` under which they are listed, in this order."""
COMPUTING = frozenset(("run", *alone.TRAINING, *POLICIES, *EXPERIMENTS))
"""Commands whose results are stored: they end when they are done, and not when their output is no longer read."""


app = lazy_app(PANELS)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"rm-opt {version('rm-optimizer')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Know whether a policy may be optimised against a reward model. Results: $RM_OPT_HOME (.rm-opt)."""


def main() -> None:
    """Entry point of the console script."""
    # At its end a process looks for garbage in all that it has imported: a second of a core, and nothing is found.
    atexit.register(gc.freeze)
    set_variables()
    if not COMPUTING.isdisjoint(sys.argv[1:2]):
        outlive_readers()
    sys.exit(guard(lambda: app(standalone_mode=False)))


def set_variables() -> None:
    """Set what this process and its children read from their environment, before they import libraries."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # no child takes a file of the current folder for a library
    # OpenMP's threads sleep when they wait for one another: spinning, they take the cores from whatever else runs, and
    # two threads of a training on a busy machine need three times as long (benchmarks/results/busy-machine.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # What the guard does for this process: a letter that a stream's encoding does not have ends no child, either.
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
