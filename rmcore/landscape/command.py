"""`rm-opt analyze`: the curvature of the loss at a checkpoint, on a file of pairs."""

import inspect
from typing import Annotated, Literal

import typer

from rmcore.cli.help import common
from rmcore.cli.measurement import measuring_command

HELP = """Measure the curvature of the loss at a checkpoint: both ends of the spectrum, and the trace.

Example: rm-opt analyze --checkpoint DIR --data pairs.parquet --num-pairs 64 --out curvature

docs/landscape.md says what each number means and what it must not be read as.
"""
TYPE = Annotated[Literal["hessian"], typer.Option("--type", "-t", help="What is analysed: the Hessian of the loss.")]
SHOWN = (
    *("limit", "max_seq_len", "device", "type_", "method", "out", "json_out", "num_pairs", "parameters"),
    "lanczos_steps",
)
"""Options that --help shows."""

analyze = common(*SHOWN)(
    measuring_command(
        "landscape",
        HELP,
        inspect.Parameter("type_", inspect.Parameter.KEYWORD_ONLY, default="hessian", annotation=TYPE),
        panel="Curvature",
        whole_weights="curvature drowns in their rounding",
    )
)
