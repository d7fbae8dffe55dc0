"""Prompts that nothing was trained or decided on: of the synthetic benchmark new ones, of other data held-out ones."""

import random
from pathlib import Path

from rmcore.core.errors import DataError
from rmcore.data.gold.prompts import draw_prompt
from rmcore.data.pair import Prompt, prompt_text
from rmcore.data.table import read_pairs
from rmcore.stages.samples import one_each

FEWEST_PROMPTS = 10


def new_prompts(prepared: Path, number: int, name: str) -> list[Prompt]:
    """Prompts of the synthetic benchmark that stand in no pair.

    Args:
        prepared: the artifact of the stage prepare.
        number: that are drawn.
        name: seeds the draw.
    """
    files = [prepared / f"{part}.parquet" for part in ("train", "validation", "test", "ood")]
    seen = {prompt_text(pair.prompt) for file in files if file.is_file() for pair in read_pairs(file)}
    rng = random.Random(name)  # noqa: S311 - data, not cryptography
    fresh: dict[Prompt, None] = {}
    while len(fresh) < number:
        prompt = draw_prompt(rng, ood=False)
        if prompt not in seen:
            fresh[prompt] = None
    return list(fresh)


def seen_prompts(prepared: Path, number: int) -> list[Prompt]:
    """The first `number` held-out prompts, one a conversation: those that readiness sees."""
    return one_each(read_pairs(prepared / "test.parquet"))[:number]


def held_out_prompts(prepared: Path, *, seen: int, why: str, lower: str) -> list[Prompt]:
    """Held-out prompts after the first `seen`, one a conversation.

    Args:
        prepared: the artifact of the stage prepare.
        seen: prompts that are not fresh.
        why: who has seen them.
        lower: setting that makes them fewer, and what that costs.

    Raises:
        DataError: fewer than `FEWEST_PROMPTS` are left.
    """
    held_out = one_each(read_pairs(prepared / "test.parquet"))
    left = held_out[seen:]
    if len(left) < FEWEST_PROMPTS:
        raise DataError(
            f"{len(held_out)} prompts are held out and {why} the first {seen} of them, so {len(left)} are fresh, and a "
            f"gain over fewer than {FEWEST_PROMPTS} says little. Lower {lower}, or hold out more (data.test_fraction)."
        )
    return left
