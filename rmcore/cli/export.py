"""`rm-opt export`: a checkpoint as one plain Hugging Face folder with its model card."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmcore.cli.common import setting
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.core.files import atomic_folder

if TYPE_CHECKING:
    from rmcore.core.arrays import FloatArray
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.reporting.card import Evidence


class Dtype(StrEnum):
    """Number format of the exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


BOUNDS = {Dtype.float32: 1e-4, Dtype.bfloat16: 2.0**-5}
"""Largest difference of a reward, as a share of the largest absolute reward, or of 1 where all are smaller.

float32: W + BA and sums in another order. bfloat16: at most 2^-9 a weight, growing as the root of the number of layers,
of which 2^-5 has room for 256.
"""
SAMPLES = (
    ("What is 2 + 2?", "4"),
    ("What is 2 + 2?", "It is 5, as everybody knows."),
    ("Name a fruit and say why it is good.", "A pear: sweet, juicy, and it keeps for weeks in a cool place."),
    ("Sort these words: pear, fig, apple", "apple, fig, pear"),
    ("Write a polite refusal.", "No."),
    ("Explain in one sentence what a reward model does. " * 8, "It gives a number to an answer. " * 8),
)
"""Prompts and responses of different lengths, so that padding is compared too."""


def export(
    checkpoint: Annotated[str, typer.Option("--checkpoint", "-c", help="A trained checkpoint, or an adapter folder.")],
    out: Annotated[Path, typer.Option(help="Where to write; must not exist, or be empty.")],
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; bfloat16 halves the file and rounds.")] = Dtype.float32,
    evidence: Annotated[
        list[Path] | None,
        typer.Option(
            help="For the card: what `evaluate`, `readiness` or another command that measures wrote with --json, or a "
            "run's summary.json. May be repeated. The run that trained the checkpoint is found by itself."
        ),
    ] = None,
    license_id: Annotated[
        str | None,
        typer.Option("--license", help="Licence of the model, as the hub names it: apache-2.0. Else not stated."),
    ] = None,
    render_fn: Annotated[str | None, setting(ModelConfig, "render_fn")] = None,
) -> None:
    """Write a checkpoint as one plain Hugging Face folder with its model card.

    Adapters are merged in; tokenizer, rendering and a seal are next to the weights, which are safetensors, and rewards
    are compared. The card says what was shown of the model with intervals, its verdict, what it must not be used for,
    and one reward to check. `hf upload OWNER/NAME FOLDER --private` uploads both.

    Example: rm-opt export --checkpoint out/best --out shared --evidence metrics.json --license apache-2.0
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty, and an export never overwrites; name a new folder.")
    from rmcore.cli.card import find_origin, make_card
    from rmcore.models.lora import ADAPTER_FOLDER
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.models.seal import checkpoint_digest
    from rmcore.reporting.card import highest

    folder = Path(checkpoint).expanduser().resolve()
    folder = folder.parent if folder.name == ADAPTER_FOLDER else folder
    origin = find_origin(folder)
    own = [] if origin.run is None else [(origin.run.record, f"run {origin.run.name}")]
    found = _read(evidence or [], own, checkpoint_digest(folder) if folder.is_dir() else None)
    judged = highest(found)
    source = BradleyTerryRM.from_pretrained(checkpoint, device="cpu", render_fn=render_fn)
    expected = _rewards(source)
    with atomic_folder(out.resolve()) as part:
        _write(source, part, dtype)
        rm = BradleyTerryRM.from_pretrained(part, device="cpu", render_fn=render_fn)
        difference, bound = _compare(_rewards(rm), expected, dtype)
        card = make_card(origin, rm, checkpoint_digest(part), found, license_id)
        card.save(part / "README.md")
    print(f"{out}: {dtype} weights; reload with AutoModelForSequenceClassification.from_pretrained({str(out)!r})")
    print(f"largest difference of {len(SAMPLES)} rewards: {difference:.2e} (allowed: {bound:.2e})")
    verdict = "nobody judged" if judged is None else f"{judged.headline} (evidence level {judged.rung} of 4)"
    print(f"card        {out / 'README.md'}: {verdict}")


def _read(
    evidence: Sequence[Path], own: Sequence[tuple[Mapping[str, Any], str]], digest: str | None
) -> "list[Evidence]":
    """Read what measurements tell of this checkpoint; say where a file does not tell which one it is about.

    Raises:
        ConfigError: a file is about another checkpoint.
        DataError: a file cannot be read, or holds nothing that a card tells.
    """
    from rmcore.core.files import read_object
    from rmcore.reporting.card import read_evidence

    records = []
    for path in evidence:
        record = read_object(path)
        if record is None:
            raise DataError(f"{path} cannot be read as a JSON object; name what a command wrote with --json.")
        records.append((record, path.name))
    for record, source in records:
        named = record.get("checkpoint_digest")
        if named is None or digest is None:
            print(f"note: whether {source} is about this checkpoint is not known; the card takes your word for it.")
        elif named != digest:
            raise ConfigError(
                f"{source} was measured of another checkpoint ({record.get('checkpoint')}), so a card of this one must "
                "not tell it. Measure this one, or name that one's folder."
            )
    return [one for record, source in [*own, *records] for one in read_evidence(record, source)]


def _rewards(rm: "BradleyTerryRM") -> "FloatArray":
    prompts, responses = zip(*SAMPLES, strict=True)
    return rm.score(prompts, responses)


def _write(rm: "BradleyTerryRM", folder: Path, dtype: Dtype) -> None:
    """Merge and round in place, which changes the weights of `rm`: it was loaded for this alone."""
    import torch

    from rmcore.core.saving import save_pretrained

    rm.merge_adapters()
    save_pretrained(rm.model.to(getattr(torch, dtype)), folder)
    rm.save_records(folder)


def _compare(exported: "FloatArray", expected: "FloatArray", dtype: Dtype) -> tuple[float, float]:
    """Give the largest difference of the rewards and its bound.

    Raises:
        ModelError: they differ by more.
    """
    difference = float(abs(exported - expected).max())
    bound = BOUNDS[dtype] * max(1.0, float(abs(expected).max()))
    if not difference <= bound:
        raise ModelError(
            f"the exported rewards differ by up to {difference:.2e}, more than the {bound:.2e} that {dtype} explains, "
            "so nothing was written; export as float32, or train in that precision."
        )
    return difference, bound
