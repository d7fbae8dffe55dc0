"""`rm-opt card`: the model card of a trained reward model, from what training and measurements left."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmcore.cli.card_facts import Origin, find_origin, gather_facts, read_record
from rmcore.cli.inputs import Device, RenderFn, written_as
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.files import write_text

if TYPE_CHECKING:
    from rmcore.models.reward_model import BradleyTerryRM

LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")
"""Form of the hub's names of licences: apache-2.0, cc-by-nc-4.0, other."""


def card(
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", "-c", help="Folder of a trained checkpoint, such as out/best.")
    ],
    evidence: Annotated[
        list[Path] | None,
        typer.Option(
            help="What `rm-opt evaluate`, `readiness pairs` or `benchmark` wrote with --json, or a run's summary.json. "
            "May be repeated. The run that trained the checkpoint is found by itself."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; default: README.md in the checkpoint folder.", callback=written_as(".md")),
    ] = None,
    license_id: Annotated[
        str | None,
        typer.Option("--license", help="Licence of the model, as the hub names it: apache-2.0. Else not stated."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="REPOSITORY",
            help="Publish the model on the hub with the card of its folder, made where there is none: OWNER/NAME, or "
            "NAME for one of your own. Private by default; the token is that of HF_TOKEN.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Push for everyone to see.")] = False,
    although_not_ready: Annotated[
        bool,
        typer.Option("--although-not-ready", help="Push although its verdict speaks against it; the card says so."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what a push would send, and send nothing.")] = False,
    render_fn: RenderFn = None,
    device: Device = "auto",
) -> None:
    """Write the model card of a reward model: what was shown of it, and what was not; --push publishes both.

    For the Hugging Face hub and for people: what it was made of, its measurements with intervals, its verdict, what it
    must not be used for, how to load it and check one reward. What is not known is said to be not stated.

    Example: rm-opt card --checkpoint out/best --evidence benchmark.json --license apache-2.0
    """
    from rmcore.reporting.card.model_card import CARD_FILE

    origin = find_origin(checkpoint)
    place = out or origin.folder / CARD_FILE

    def make() -> str:
        return make_card(origin, evidence or [], license_id, render_fn, device)

    if push is None:
        if public or although_not_ready or dry_run:
            raise ConfigError("--public, --although-not-ready and --dry-run are about a push: give --push OWNER/NAME.")
        _check_free(place)
        write_text(place, make())
        print(f"card        {place}")
        return
    if out is not None or (place.is_file() and (evidence or license_id is not None)):
        raise ConfigError(
            f"--push sends {origin.folder / CARD_FILE}, which is made only where there is none, so --out, --evidence "
            "and --license would not change it. Write the card first, without --push."
        )
    from rmcore.cli.push import push as publish

    publish(push, origin.folder, make, is_public=public, although_not_ready=although_not_ready, dry_run=dry_run)


def make_card(
    origin: Origin, evidence: Sequence[Path], license_id: str | None, render_fn: str | None, device: str
) -> str:
    """Return the card of a checkpoint, from what is around it and from files of evidence; say what it leaves open.

    Raises:
        ConfigError: the licence is no name of one, or a file is about another checkpoint.
        DataError: a file cannot be read, or holds nothing that a card tells.
        ModelError: the checkpoint cannot be loaded, or its weights are no safetensors.
    """
    if license_id is not None and not LICENSE_ID.fullmatch(license_id):
        raise ConfigError(f"--license {license_id!r} is no name of the hub for a licence; write it as apache-2.0.")
    read = [(read_record(path), path.name) for path in evidence]  # before minutes of loading
    from rmcore.ensembles.ensemble_folder import checkpoint_digest
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.reporting.card.evidence import read_evidence
    from rmcore.reporting.card.model_card import highest, write_card
    from rmcore.serving.model_files import weight_files

    weight_files(origin.folder)
    digest = checkpoint_digest(origin.folder)
    for record, source in read:
        _check_same(record, digest, source)
    rm = BradleyTerryRM.from_pretrained(origin.folder, device=device, render_fn=render_fn)
    records = [*_own_records(origin, rm, has_metrics=any("metrics" in record for record, _ in read)), *read]
    found = [one for record, source in records for one in read_evidence(record, source)]
    facts = gather_facts(origin, digest, rm, license_id)
    text = write_card(facts, found, made=datetime.now(UTC).isoformat(timespec="seconds"))
    judged = highest(found)
    for _, source in records:
        print(f"evidence    {source}")
    print(
        f"verdict     {'nobody judged' if judged is None else f'{judged.headline} (evidence level {judged.rung} of 4)'}"
    )
    open_points = {
        "the model's licence (--license)": facts.license,
        "the base model": facts.base_model,
        "the training pairs": facts.data or None,
    }
    if missing := [name for name, value in open_points.items() if value is None]:
        print(f"not stated  {', '.join(missing)}")
    return text


def _own_records(origin: Origin, rm: "BradleyTerryRM", *, has_metrics: bool) -> list[tuple[Mapping[str, Any], str]]:
    """Gather what was measured where the checkpoint is: by its run, else by its training on the validation pairs."""
    from rmcore.stages.interface import VALIDATION_REWARDS

    if origin.run is not None:
        return [(origin.run.record, f"run {origin.run.name}")]
    rewards = origin.folder.parent / VALIDATION_REWARDS
    if origin.training is None or not origin.is_best or has_metrics or not rewards.is_file():
        return []
    import pandas as pd

    from rmcore.config.evaluate import EvaluateConfig
    from rmcore.stages.evaluate import measure

    measured = measure(pd.read_parquet(rewards), EvaluateConfig(), seed=0, beta=rm.beta)
    data = (origin.settings or {}).get("data") or {}
    record = {
        "metrics": {name: value.to_dict() for name, value in measured.items()},
        "data": data.get("eval_source") or data.get("source"),
        "chosen_on_these": True,
    }
    return [(record, "validation pairs of the training")]


def _check_same(record: Mapping[str, Any], digest: str, source: str) -> None:
    """Refuse what was measured of another model; say where a file does not tell.

    Raises:
        ConfigError: it was.
    """
    named = record.get("checkpoint_digest")
    if named is None:
        print(
            f"note: {source} does not say which checkpoint it is about; the card takes your word that it is this one."
        )
    elif named != digest:
        raise ConfigError(
            f"{source} was measured of another checkpoint ({record.get('checkpoint')}), so a card of this one must not "
            "tell it. Measure this one, or name that one's folder."
        )


def _check_free(place: Path) -> None:
    """Refuse to overwrite what was written by hand.

    Raises:
        ConfigError: there is such a file.
    """
    from rmcore.reporting.card.model_card import read_card

    if not place.is_file():
        return
    try:
        old = read_card(place.read_bytes())
    except DataError:  # metadata that are no YAML, which it never writes
        old = None
    if old is None or not old.is_as_written:
        who = "was not written by `rm-opt card`" if old is None else "was changed since `rm-opt card` wrote it"
        raise ConfigError(f"{place} {who}, and would be overwritten. Move it away, or name another file with --out.")
