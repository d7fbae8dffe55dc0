"""`rm-opt data noise`: a ledger of doubtful labels, a sheet for their review, and a cleaned file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rmcore.cli.common import setting
from rmcore.cli.help import common
from rmcore.cli.inputs import Device, ModelReading, PairReading
from rmcore.cli.options import options
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError
from rmcore.core.printing import printable

if TYPE_CHECKING:
    from rmcore.data.pair import PreferencePair
    from rmcore.noise.ledger import How, Ledger

SHOWN, SHOWN_CHARS = 5, 100


@options()
@common("model", "out", "folds", "false_share", "review", "apply", "to", "max_seq_len")
def noise(
    data: Annotated[str, typer.Argument(help="Preference pairs: a file, a datasets folder or a hub name.")],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="Whose features heads are fitted on: minilm, or a folder or hub name of a pretrained model that was "
            "not trained on these pairs.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the ledger; it keeps the features.")],
    reading: PairReading,
    folds: Annotated[
        int, typer.Option(min=2, max=1000, help="Parts of the prompts, each scored by a model of the others.")
    ] = 5,
    false_share: Annotated[
        float, typer.Option(min=0, max=1, help="Expected share of right labels among those that are called wrong.")
    ] = 0.2,
    review: Annotated[
        int | None, typer.Option(min=1, help="Also write review.csv: so many pairs whose review pays most, blind.")
    ] = None,
    apply: Annotated[
        Literal["drop", "weight"] | None,
        typer.Option(help="Write --to without the called pairs, or with every pair weighted by its posterior."),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="The new data file: .parquet or .jsonl.")] = None,
    max_seq_len: Annotated[int, setting(ModelConfig, "max_seq_len")] = 512,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Deals the folds, and draws which answer of a reviewed pair is a.")] = 0,
) -> None:
    """Find labels that are probably wrong, say how many there are, and change nothing unless asked to.

    Each pair is scored by a model of other prompts, and where answers recur by their other labels too. Close calls
    become rarer as margins grow and mistakes do not: that tells the rate of wrong labels, and the posterior of each.
    Labels are called wrong only where the rate is shown to be above 0.

    Writes ledger.parquet (a row a pair), noise.json, and what --review and --apply ask for.

    Example: rm-opt data noise pairs.parquet --model minilm --out ledger --apply weight --to cleaned.parquet

    Reviewed: rm-opt data ingest --labels ledger/review.csv --pool pairs.parquet --out reviewed.jsonl

    Whether a cleaned file is better is for an experiment to say: docs/label-noise.md
    """
    from rmcore.active.labels import write_proposal
    from rmcore.core.files import atomic_file, write_json
    from rmcore.core.progress import progress_bar
    from rmcore.ensembles.score import readable_pairs
    from rmcore.models.device import pick_device
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.noise.crossfit import cross_fit, deal_folds, kept_differences
    from rmcore.noise.ledger import examine
    from rmcore.noise.rate import require_enough

    if (apply is None) != (to is None):
        raise ConfigError("--apply drop|weight and --to FILE go together: the file that was read is never changed.")
    sheet = out / "review.csv"
    if review is not None and sheet.exists():
        raise ConfigError(f"{sheet} is there already, and may hold labels; move it away first.")
    if to is not None:
        _require_cleanable(data, to, reading)
    config = ModelConfig(name=model, max_seq_len=max_seq_len)
    rm = BradleyTerryRM.new(config, seed=seed, device=pick_device(device))
    every = reading.read(data)
    pairs = readable_pairs(rm, every)
    require_enough(len(pairs), len({pair.prompt_id for pair in pairs}))
    dealt = deal_folds(pairs, folds, seed=seed)
    backbone = {
        **ModelReading(max_seq_len=max_seq_len, device=device, dtype="float32").named(model),
        "max_seq_len": max_seq_len,
        "seed_of_what_it_lacks": seed,
    }
    with progress_bar("noise") as report:
        differences = kept_differences(rm, pairs, backbone, out, report=report)
    ledger = examine(pairs, cross_fit(differences, dealt), dealt, false_share=false_share)
    with atomic_file(out / "ledger.parquet") as unfinished:
        ledger.table.to_parquet(unfinished, index=False)
    write_json(out / "noise.json", {"data": data, "seed": seed, "folds": folds, **backbone, **ledger.record()})
    _print(ledger, data)
    print(f"ledger      {out / 'ledger.parquet'}, {out / 'noise.json'}")
    if review is not None:
        chosen = ledger.for_review(review)
        write_proposal(chosen, sheet, seed=seed)
        print(f"review      {len(chosen)} pairs: {sheet}; fill in `preferred` with a or b, then")
        print(f"            rm-opt data ingest --labels {sheet} --pool {data} --out reviewed.jsonl")
    if apply is not None and to is not None:
        _clean(ledger, apply, to, every)


def _clean(ledger: "Ledger", apply: "How", to: Path, every: "list[PreferencePair]") -> None:
    """Write the new file; pairs that the model cannot read are in it as they were."""
    from rmcore.noise.ledger import manifest_of, write_cleaned

    known = {id(pair) for pair in ledger.pairs}
    unread = [pair for pair in every if id(pair) not in known]
    changed, written = write_cleaned(ledger, apply, to, unread=unread)
    print(f"{apply:<11} {changed:,} of {len(every):,} pairs changed, {written:,} written: {to}")
    if unread:
        print(f"{'':<11} {len(unread):,} that the model cannot read are in it as they were")
    print(f"{'':<11} each changed one as it was: {manifest_of(to)}")


def _require_cleanable(data: str, to: Path, reading: PairReading) -> None:
    """Refuse to clean a file that says more than pairs, or a part of one: the rest would be lost."""
    from rmcore.data.readers.sources import load_pairs
    from rmcore.data.table import check_target
    from rmcore.noise.ledger import manifest_of

    check_target(to, data, force=False)
    if manifest_of(to).exists():
        raise ConfigError(f"{manifest_of(to)} is there already, and says what was changed: name another --to.")
    if reading.limit is not None:
        raise ConfigError("--apply writes a whole file, and --limit reads a part of it: leave one of them out.")
    loaded = load_pairs(data, split=reading.split, columns=reading.columns())
    if loaded.num_ties or any(one.kind != "pair" for one in loaded.observations):
        raise ConfigError(
            f"{data} says more than pairs (ties, rankings or grades), which a cleaned file of pairs would lose: look "
            "at its ledger, and clean the source; or convert it to pairs first with `rm-opt data convert`."
        )


def _print(ledger: "Ledger", data: str) -> None:
    import numpy as np

    from rmcore.data.pair import prompt_text

    record, rate = ledger.record(), ledger.model.rate
    flags = record["flags"]
    print(
        f"{data}: {rate.num_pairs:,} pairs of {rate.num_prompts:,} prompts; models of other prompts agree with ", end=""
    )
    print(f"{record['model_agrees']:.1%} of the labels")
    print(f"{'':<32}{record['others_agree']:>6.1%} with the other labels of the same answers")
    print(f"{'wrong labels':<32}{rate.value:>6.1%} [{rate.low:.1%}, {rate.high:.1%}]")
    if ledger.model.says_nothing:
        print("    no rate can be told: the other labels tell too little of these, or pairs are too few")
    elif not ledger.model.is_shown:
        print(
            "    not shown to be above 0, so no label is called wrong; the ledger has the order of doubt all the same"
        )
    expected = f"  of which at most {ledger.false_share:.0%} are expected to be right" if flags["called"] else ""
    print(f"{'called wrong':<32}{flags['called']:>6,}{expected}")
    print(f"{'close calls':<32}{flags['close_call']:>6,}  no order is learned from the other labels")
    print(f"{'contradicted':<32}{flags['contradicted']:>6,}  the same two answers, preferred both ways")
    print("most doubtful:")
    for place in ledger.doubtful()[:SHOWN]:
        pair, row = ledger.pairs[place], ledger.table.iloc[place]
        is_known = ledger.model.is_shown and not np.isnan(row["posterior"])
        posterior = f"{row['posterior']:.2f}" if is_known else "unknown"
        margins = f"margin {row['margin']:+.2f}, with other labels {row['with_others']:+.2f}"
        print(f"  {printable(pair.pair_id)}  posterior {posterior}, {margins}")
        for name, text in (("prompt", prompt_text(pair.prompt)), ("chosen", pair.chosen), ("rejected", pair.rejected)):
            print(f"    {name:<9}{_short(text)}")


def _short(text: str) -> str:
    """One line of printable characters: a data file must not drive the terminal."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]}…"
