"""`rm-opt up | worker | down | info`: the services, cells for another machine, and what this machine has."""

import importlib.metadata
import shlex
import sys
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
            "password. Default: $RM_OPT_DATABASE, else files of this home.",
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
        Path | None,
        typer.Option(help="Copy of services/password of that machine's home; default: $RM_OPT_PASSWORD_FILE."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Take so many cells at a time; default: the slots of the device."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name on Prefect's page; default: machine and pid.")] = None,
) -> int:
    """Compute cells of experiments for another machine.

    It hands them out with `rm-opt experiment --runner pool`; cells and their saved states travel through RM_OPT_SHARED.
    Runs until Ctrl-C or SIGTERM, upon which what is running saves, and resumes elsewhere.

    Example: rm-opt worker --server http://10.0.0.5:4200 --password-file head-password
    """
    from flows import worker as own
    from tasks import passwords

    secret = passwords.read_password(password_file or passwords.password_file(home()))
    return own.work(server, secret, name, limit)


def down() -> None:
    """End what `rm-opt up` started, and nothing else."""
    from flows import services

    ended = services.down()
    print(f"ended: {', '.join(ended)}" if ended else "nothing was running")


def print_services(found: list[Any]) -> None:
    """Print where each service runs, or that it does not, the form that starts a run, and where the password is."""
    from flows.services import run_form
    from tasks.passwords import password_file

    for service in found:
        print(service)
    if form := run_form():
        print(f"{'start a run':<15} {form}")
    if any(service.pid and service.url for service in found):
        print(f"{'password':<15} of both pages: cat {shlex.quote(str(password_file(home())))}")


def info() -> None:
    """Show versions, GPUs, the device, the home, and which services run."""
    import torch

    from flows import services
    from rmcore.models.device import free_bytes, pick_device

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
        print(f"{name:<15} {fact}")
    print_services(services.status())


def _vllm() -> str:
    """The vLLM that would serve; nothing of it is run."""
    from rmcore.core.errors import ConfigError
    from rmcore.serving.vllm_process import find_vllm

    try:
        return str(find_vllm())
    except ConfigError:
        return "none (`make vllm` in a clone makes an environment for it; RM_OPT_VLLM names the Python of another one)"
