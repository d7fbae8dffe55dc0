"""`rm-opt up | worker | down | status | sync`: the services beside the runs."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tasks.home import configure_environment, home


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


def down() -> None:
    """End what `rm-opt up` started, and nothing else."""
    from flows import services

    ended = services.down()
    print(f"ended: {', '.join(ended)}" if ended else "nothing was running")


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


def sync(
    to: Annotated[str | None, typer.Option(help="MLflow address; default: the one each run was meant for.")] = None,
) -> None:
    """Send runs to MLflow that could not be sent when they ran."""
    configure_environment()
    from tasks.sync import sync_pending

    sent = sync_pending(home(), to)
    print(f"sent: {', '.join(sent)}" if sent else "nothing waits to be sent")
