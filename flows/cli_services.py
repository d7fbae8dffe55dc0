"""`rm-opt up | worker | down`: start and stop the services, and compute cells for another machine."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tasks.home import home


def up(
    prefect_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the Prefect server and UI; default 4200.")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the MLflow server and UI; default 5000.")
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
    """Start Prefect, its worker and MLflow here, and deploy the flows."""
    from flows import services

    print_services(
        services.up(prefect_port, mlflow_port, host=host, database=database, tell=partial(print, flush=True))
    )
    if stay:
        services.stay()


def worker(
    server: Annotated[
        str, typer.Option(help="Prefect of the machine where `rm-opt up --host …` runs: http://HOST:4200.")
    ],
    password_file: Annotated[
        Path | None, typer.Option(help="Copy of services/key of that machine's home; default: $RM_OPT_PASSWORD_FILE.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Take so many cells at a time; default: the slots of the device."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name on Prefect's page; default: machine and pid.")] = None,
) -> int:
    """Compute cells of experiments for another machine.

    It hands them out with `rm-opt experiment --runner pool`; cells and their saved states travel through RM_OPT_SHARED.
    Runs until Ctrl-C or SIGTERM, upon which what is running saves, is handed back, and resumes elsewhere.

    Example: rm-opt worker --server http://10.0.0.5:4200 --password-file head-key
    """
    from flows.worker import Worker, find_cluster
    from tasks.passwords import key_file, read_key

    return Worker(*find_cluster(server, read_key(password_file or key_file(home()))), name, limit).run()


def down() -> None:
    """End what `rm-opt up` started, and nothing else."""
    from flows import services

    ended = services.down()
    print(f"ended: {', '.join(ended)}" if ended else "nothing was running")


def print_services(found: list[Any]) -> None:
    """Print where each service runs, or that it does not, the form that starts a run, and where the passwords are."""
    from flows.services import run_form
    from tasks.passwords import password_file

    for service in found:
        print(service)
    if form := run_form():
        print(f"{'start a run':<15} {form}")
    for service in found:
        if service.pid and service.url:
            file = shlex.quote(str(password_file(home(), service.name)))
            print(f"{'password':<15} of the page of {service.name}, new at each start: cat {file}")
