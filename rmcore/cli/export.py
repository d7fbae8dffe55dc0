"""`rm-opt export`: a checkpoint or an adapter as one plain Hugging Face folder, whose rewards were compared."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.common import setting
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ConfigError, ModelError
from rmcore.core.files import atomic_folder


class Dtype(StrEnum):
    """Number format of the exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


BOUNDS = {Dtype.float32: 1e-4, Dtype.bfloat16: 2.0**-5}
"""Largest difference of a reward, as a share of the largest absolute reward, or of 1 where all are smaller.

float32: rounding of W + BA and of sums in another order, with a wide margin. bfloat16: rounding to 8 bits moves a
weight by at most 2^-9 of itself; such errors are independent, so those of n layers add up like sqrt(n), and 2^-5 has
room for 256.
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
    checkpoint: Annotated[str, typer.Option(help="A trained checkpoint, or an adapter folder (best/adapter).")],
    out: Annotated[Path, typer.Option(help="Where to write; must not exist, or be empty.")],
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; bfloat16 halves the file and rounds.")] = Dtype.float32,
    attributes: Annotated[
        bool,
        typer.Option(
            "--attributes", help="Write each graded attribute as a label of its own; config.json has their weights."
        ),
    ] = False,
    render_fn: Annotated[str | None, setting(ModelConfig, "render_fn")] = None,
) -> None:
    """Write a checkpoint as one plain Hugging Face folder, and compare its rewards.

    Adapters are merged in; tokenizer and rendering lie next to the weights. With --attributes the model has a label for
    each attribute that it was trained on, and the reward is their weighted sum (`reward_is_sum_of` in config.json).

    Example: rm-opt export --checkpoint runs/a/best/adapter --out exported --dtype bfloat16
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty, and an export never overwrites; name a new folder.")
    difference, bound = _export(checkpoint, out, dtype, render_fn, attributes=attributes)
    print(f"{out}: {dtype} weights; reload with AutoModelForSequenceClassification.from_pretrained({str(out)!r})")
    print(f"largest difference of {len(SAMPLES)} rewards: {difference:.2e} (allowed: {bound:.2e})")


def _export(
    checkpoint: str, out: Path, dtype: Dtype, render_fn: str | None, *, attributes: bool = False
) -> tuple[float, float]:
    """Write next to `out`, compare, then put in place; the largest difference of the rewards and its bound."""
    from rmcore.models.reward_model import BradleyTerryRM

    source = BradleyTerryRM.from_pretrained(checkpoint, device="cpu", render_fn=render_fn)
    expected = _rewards(source)
    with atomic_folder(out.resolve()) as part:
        if attributes:
            exported = _write_labels(source, Path(checkpoint), part, dtype)
        else:
            _write(source, part, dtype)
            exported = _rewards(BradleyTerryRM.from_pretrained(part, device="cpu", render_fn=render_fn))
        difference = float(abs(exported - expected).max())
        bound = BOUNDS[dtype] * max(1.0, float(abs(expected).max()))
        if not difference <= bound:
            raise ModelError(
                f"the exported rewards differ by up to {difference:.2e}, more than the {bound:.2e} that {dtype} "
                "explains, so nothing was written; export as float32, or train in that precision."
            )
    return difference, bound


def _rewards(rm: Any) -> Any:
    prompts, responses = zip(*SAMPLES, strict=True)
    return rm.score(prompts, responses)


def _write(rm: Any, folder: Path, dtype: Dtype) -> None:
    """Merge and round in place, which changes the weights of `rm`: it was loaded for this alone."""
    import torch

    from rmcore.core.saving import save_pretrained

    rm.merge_adapters()
    save_pretrained(rm.model.to(getattr(torch, dtype)), folder)
    rm.save_records(folder)


def _write_labels(rm: Any, checkpoint: Path, folder: Path, dtype: Dtype) -> Any:
    """Write the model with its attributes as labels; the rewards that transformers then gives, as their sum."""
    import numpy as np
    import torch
    from transformers import AutoModelForSequenceClassification

    from rmcore.models.attributes import as_labels, load_attributes

    rm.merge_adapters()
    weights = load_attributes(rm.model, checkpoint)
    as_labels(rm.model, weights)
    _write(rm, folder, dtype)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    if list(plain.config.id2label.values()) != list(weights):
        raise ModelError(f"{folder} was read back with the labels {plain.config.id2label}; nothing was written.")
    sides = rm.renderer.tokenize_sides(list(SAMPLES))
    with torch.inference_mode():
        outputs = [plain.eval()(torch.tensor([side.ids])).logits[0].numpy() for side in sides]
    return np.stack(outputs) @ np.array(list(weights.values()))
