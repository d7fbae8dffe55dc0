"""`rm-opt score`: rewards of a file of any size, here or on a Ray cluster."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rmcore.cli.inputs import Checkpoint, ModelReading, PairReading, report_unusable, written_as
from rmcore.cli.options import options
from rmcore.core.errors import ConfigError

REWARD_FILES = (".parquet", ".jsonl", ".csv")
PART_ROWS = 10_000
"""Some tens of MiB of text, and minutes of a GPU at most: what a kill can cost."""


@options()
def score(
    checkpoint: Checkpoint,
    data: Annotated[str, typer.Option("--data", "-d", help="Pairs, or rows with columns prompt and response.")],
    out: Annotated[
        Path, typer.Option(help="File for the rewards: .parquet, .jsonl or .csv.", callback=written_as(*REWARD_FILES))
    ],
    reading: PairReading,
    model: ModelReading,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(
            help="local: in this process. ray: by actors of the Ray cluster of RAY_ADDRESS, or of this machine."
        ),
    ] = "local",
    actors: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Models of ray, each with a GPU; default: all that are free.")
    ] = None,
    part_rows: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Rows that are scored and kept at once; a kill costs as many.")
    ] = PART_ROWS,
) -> None:
    """Write rewards of preference pairs, or of prompt/response rows, to a file.

    Each reward has the columns of its row next to it; `row` is the number of a prompt/response row in the source. The
    file may be larger than memory. After a kill the same command continues with the rows that are missing.

    Example: rm-opt score --checkpoint out/best --data rows.jsonl --out rewards.parquet
    """
    from rmcore.core.progress import progress_bar
    from rmcore.data.parts import SourceInParts
    from rmcore.ensembles.bulk import LocalScorer, score_source

    if actors is not None and engine == "local":
        raise ConfigError("--actors is of --engine ray; this process scores with one model.")
    source = SourceInParts(data, part_rows, reading.split, reading.columns(), reading.limit)
    scorer: Any
    if engine == "ray":
        scorer = _ray_scorer(checkpoint, model, actors)
    else:
        scorer = nullcontext(LocalScorer(model.load(checkpoint)))
    with scorer as ready, progress_bar("score") as report:
        num_rows = score_source(source, ready, out, _job(checkpoint, model, reading, source), report=report)
    for sentence in source.notices:
        print(sentence)
    if source.num_unusable:
        report_unusable(data, source.num_unusable, source.num_rows)
    print(f"{num_rows} rows scored: {out}")


def _ray_scorer(checkpoint: str, model: ModelReading, actors: int | None) -> Any:
    from rmcore.ensembles.ray_scoring import Loading, RayScorer

    # Actors run elsewhere, where a path that begins here would mean another file.
    place = str(Path(checkpoint).resolve()) if Path(checkpoint).exists() else checkpoint
    return RayScorer(Loading(place, model.device, model.max_seq_len, model.render_fn, model.weights), actors)


def _job(checkpoint: str, model: ModelReading, reading: PairReading, source: Any) -> dict[str, Any]:
    """Gather all that decides the rewards and the cut into parts."""
    from rmcore.data.readers.sources import source_digest
    from rmcore.models.seal import checkpoint_digest

    folder = Path(checkpoint)
    return {
        "checkpoint": checkpoint_digest(folder) if folder.is_dir() else checkpoint,
        "data": source_digest(source.source),
        "part_rows": source.size,
        "max_seq_len": model.max_seq_len,
        "render_fn": model.render_fn,
        "dtype": None
        if model.weights == "float32"
        else model.weights,  # as jobs from before there was a choice have it
        "split": reading.split,
        "limit": reading.limit,
        "columns": [reading.prompt_column, reading.chosen_column, reading.rejected_column],
    }
