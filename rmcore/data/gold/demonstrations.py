"""What a policy of the gold world is fine-tuned on: prompts of its training distribution answered at any quality."""

import random
from collections.abc import Set

from rmcore.data.gold.prompts import draw_prompt
from rmcore.data.gold.world import Shortcut, sample_response

TAIL_SHARE = 0.2
"""One answer in five comes from out of distribution: the shortcut goes against correctness, and a quarter of them carry
it to the extreme. So the policy has a tail in which the shortcut costs gold, and a search by a flawed reward finds it,
as it does in the tails of a pretrained policy."""


def demonstrations(shortcut: Shortcut, count: int, *, seed: int, without: Set[str]) -> list[tuple[str, str]]:
    """(prompt, response) rows, each prompt drawn anew; none of the prompts in `without`, which are held out."""
    rng = random.Random(f"gold demonstrations {seed}")  # noqa: S311 - data, not cryptography
    rows: list[tuple[str, str]] = []
    while len(rows) < count:
        prompt = draw_prompt(rng, ood=False)
        in_tail = rng.random() < TAIL_SHARE
        response = sample_response(prompt, rng, shortcut=shortcut, ood=in_tail)
        if prompt not in without:
            rows.append((prompt, response))
    return rows
