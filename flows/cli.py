"""`rm-opt`: the whole command line. Commands that need no orchestrator come from rmcore.cli.

Nothing of a command is imported here: what its line says stands beside where it is (`rmcore.cli.lazy`).
"""

import os
import sys
from typing import Annotated

import typer

from rmcore.cli import COMMANDS as WITHOUT_ORCHESTRATOR
from rmcore.cli.guard import guard
from rmcore.cli.lazy import Listed, lazy_app

COMMANDS = WITHOUT_ORCHESTRATOR | {
    "run": Listed("flows.cli_run:run", "Run the whole pipeline on preference pairs, to a verdict and a report."),
    "presets": Listed(
        "flows.cli_start:presets", "List the runs that have a name: what each is for, its data and model, its time."
    ),
    "init": Listed(
        "flows.cli_start:init", "Write rm-opt.yaml here: the common settings, with their help, for `rm-opt run`."
    ),
    "runs": Listed("flows.cli_runs:runs", "List what was run here, newest first: verdict, rung, accuracy, cost."),
    "open": Listed("flows.cli_runs:open_report", "Open the newest report in the browser, or that of a run."),
    "trajectory": Listed(
        "flows.cli_trajectory:trajectory", "Train, and measure the curvature of the loss at every saved checkpoint."
    ),
    "readiness": WITHOUT_ORCHESTRATOR["readiness"]._replace(place="flows.cli_policy:readiness_app"),
    "best-of-n": Listed(
        "flows.cli_policy:best_of_n",
        "Draw a policy's samples, and show what choosing the best of n by this model gives.",
    ),
    "rlhf": Listed(
        "flows.cli_rlhf:rlhf", "Train a reward model and a policy against it: a better policy, or a clear no."
    ),
    "experiment": Listed(
        "flows.cli_experiment:experiment", "Compare recipes on pre-registered hypotheses; only missing cells run."
    ),
    "compare": Listed(
        "flows.cli_experiment:compare",
        "Compare finished runs side by side; with none named, optimizers by an experiment.",
    ),
    "tune": Listed("flows.cli_tune:tune", "Search for the best settings on your pairs within a budget."),
    "active": WITHOUT_ORCHESTRATOR["active"]._replace(place="flows.cli_active:app"),
    "up": Listed("flows.cli_services:up", "Start Prefect, its worker and MLflow here, and deploy the flows."),
    "worker": Listed("flows.cli_services:worker", "Compute cells of experiments for another machine."),
    "down": Listed("flows.cli_services:down", "End what `rm-opt up` started, and nothing else."),
    "status": Listed("flows.cli_services:status", "Show which services run, where, and whether they answer."),
    "sync": Listed("flows.cli_services:sync", "Send runs to MLflow that could not be sent when they ran."),
    "info": Listed("flows.cli_info:info", "Show versions, GPUs, CUDA, vLLM, the device, and where everything lies."),
    "store": Listed("flows.cli_store:app", "List, verify and bound the stored artifacts."),
    "why": Listed("flows.cli_store:why", "Show why a stage ran: what differs from its nearest earlier artifact."),
}
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


app = lazy_app(COMMANDS, PANELS)


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
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # no child takes a file of the current folder for a library
    # OpenMP's threads sleep when they wait for one another: spinning, they take the cores from whatever else runs, and
    # two threads of a training on a busy machine need three times as long (benchmarks/RESULTS.md, "A busy machine").
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(guard(lambda: app(standalone_mode=False)))
