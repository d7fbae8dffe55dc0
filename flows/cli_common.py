"""What the commands that start a flow with a config share: their options, the start, and the summary."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from rmcore.config import PipelineConfig
from rmcore.errors import ServiceError
from tasks.home import configure_environment

ConfigOption = Annotated[Path | None, typer.Option(help="YAML file with settings that change the preset.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change one setting: train.lr=1e-4. May be repeated.")
]
SummaryOption = Annotated[Path | None, typer.Option(help="Write everything that was found to this JSON file.")]
Flow = Callable[[PipelineConfig], dict[str, Any]]


def run_configured(
    load_flow: Callable[[], Flow], preset: str, file: Path | None, assignments: list[str], summary: Path | None
) -> dict[str, Any]:
    """Run a flow under a preset that `file` and `assignments` change, and write its outcome to `summary`.

    `load_flow` imports the flow: Prefect reads its address when it is imported, so not before that is known.

    Raises:
        ConfigError, pydantic.ValidationError: the config cannot be used.
        ServiceError: Prefect's API failed.
    """
    os.environ["RM_OPT_CONSOLE"] = "1"
    # The embedded server logs to this terminal too, and what it says while it is shut down is noise.
    os.environ.setdefault("PREFECT_LOGGING_ROOT_LEVEL", "CRITICAL")
    configure_environment()
    from flows.prefect_api import leave_dead_server
    from flows.settings import load_config

    settings = load_config(preset, file, assignments)
    if summary is not None:
        summary.parent.mkdir(parents=True, exist_ok=True)
        summary.touch()  # a path that cannot be written is refused before hours are spent
    leave_dead_server()
    from prefect.exceptions import PrefectException

    from flows.console import quiet_prefect

    started = load_flow()
    quiet_prefect()
    try:
        outcome = started(settings)
    except (httpx.HTTPError, PrefectException) as error:
        raise ServiceError(
            f"Prefect's API failed during the run ({error}). Finished stages are stored: run the same command again."
        ) from error
    if summary is not None:
        summary.write_text(json.dumps(outcome, indent=1) + "\n")
    return outcome
