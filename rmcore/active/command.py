"""`rm-opt data propose | ingest`: which pairs to label next, and their labels back."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rmcore.cli.help import common
from rmcore.cli.inputs import Device, PairLayout, RenderFn, Seed, read_pairs, written_as
from rmcore.cli.options import field_options, options
from rmcore.config.judging import JudgingConfig
from rmcore.judging.command import LABELLING, labelling_judge

Pool = Annotated[
    str, typer.Option(help="Unlabelled pairs: a file, a folder or a hub name; which side is which is ignored.")
]
Acquisition = Literal["random", "entropy", "variance"]


@options()
def propose(
    pool: Pool,
    checkpoint: Annotated[list[str], typer.Option(help="A trained checkpoint; repeat it for one member each.")],
    out: Annotated[Path, typer.Option(help="CSV file to be labelled.", callback=written_as(".csv"))],
    layout: PairLayout,
    k: Annotated[int, typer.Option(min=1, help="How many pairs.")] = 100,
    acquisition: Annotated[
        Acquisition,
        typer.Option(help="entropy: least sure; variance: members disagree; random: what those have to beat."),
    ] = "entropy",
    labelled: Annotated[str | None, typer.Option(help="Pairs that are labelled already: left out.")] = None,
    max_per_prompt: Annotated[int | None, typer.Option(min=1, help="At most so many pairs of one prompt.")] = None,
    render_fn: RenderFn = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Write the pairs whose labels would tell most, in blind order, as a CSV to fill in.

    Write a or b into the column `preferred`, then `rm-opt data ingest`. Example:
    rm-opt data propose --pool pool.parquet --checkpoint out/best --k 100 --out to_label.csv
    """
    from rmcore.active.acquisition import ACQUISITIONS, look, select
    from rmcore.active.labels import write_proposal
    from rmcore.core.progress import progress_bar
    from rmcore.ensembles.ensemble import RewardModelEnsemble

    done = set() if labelled is None else {pair.pair_id for pair in read_pairs(labelled, PairLayout())}
    model = RewardModelEnsemble.from_checkpoints(checkpoint, device=device, render_fn=render_fn)
    print(f"{len(model)} members on {len(model.members.backbones)} backbones, each computed once")
    rest = model.members.readable([pair for pair in read_pairs(pool, layout) if pair.pair_id not in done])
    with progress_bar("pool") as report:
        view = look(rest, model, report=report)
    chosen = select(view, k, ACQUISITIONS[acquisition](seed), max_per_prompt=max_per_prompt)
    write_proposal([rest[index] for index in chosen], out, seed=seed)
    print(f"{len(chosen)} of {len(rest)} unlabelled pairs by {acquisition}: {out}")
    print("fill in the column `preferred` with a or b, then: rm-opt data ingest")


@options(*field_options(JudgingConfig, LABELLING))
@common("judge", "mode", "rubric", "max_calls", "audit")
def ingest(
    labels: Annotated[Path, typer.Option(help="The CSV, filled in.")],
    pool: Pool,
    out: Annotated[
        Path,
        typer.Option(help="JSONL file of labelled pairs that the labels are added to.", callback=written_as(".jsonl")),
    ],
    layout: PairLayout,
    judge: Annotated[
        str | None,
        typer.Option(
            help="Who labels the rows left empty: openai:MODEL@URL, module:function, or a reward model's folder."
        ),
    ] = None,
    **settings: Any,
) -> None:
    """Check a filled-in CSV against the pool and add its labels to a file of pairs, whole or not at all.

    With --judge the rows that are left empty are judged; ties, and what the judge cannot read, become no pairs.

    Example: rm-opt data ingest --labels to_label.csv --pool pool.parquet --out labelled.jsonl
    """
    from rmcore.active.labels import ingest as take

    asked = None if judge is None else labelling_judge(judge, settings)
    added = take(labels, read_pairs(pool, layout), out, asked)
    print(f"{added.num_new} new labels, {added.num_empty} rows left empty, {added.num_labelled} labelled pairs: {out}")
    if asked is not None:
        print(f"left out of what the judge was asked: {added.num_ties} ties and {added.num_unread} unread")
