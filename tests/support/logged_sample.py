"""Held-out pairs with several labelled answers a prompt, and what a model chooses among them."""

from copy import deepcopy
from functools import cache

import numpy as np
import pandas as pd

from rmcore.readiness.logged_answers import logged_answers


def pairs_of(strength, rewards, lengths, pairs, *, prompt="p", margins=True):
    """Rows of (winner or loser) index pairs over one prompt's answers, labelled by their strength."""
    rows = []
    for one, other in pairs:
        high, low = (one, other) if strength[one] >= strength[other] else (other, one)
        texts = [f"{answer} ".ljust(int(lengths[answer]), "x") for answer in (high, low)]
        margin = strength[high] - strength[low] if margins else None
        rows.append((prompt, prompt, *texts, margin, rewards[high], rewards[low]))
    names = ["prompt_id", "prompt", "chosen", "rejected", "target_margin", "reward_chosen", "reward_rejected"]
    return pd.DataFrame(rows, columns=names)


def connected_pairs(rng, size, extra=2):
    """A random spanning tree and some pairs more."""
    order = rng.permutation(size)
    tree = [(order[place], order[rng.integers(place)]) for place in range(1, size)]
    more = [tuple(rng.choice(size, 2, replace=False)) for _ in range(extra)]
    return tree + more


def table(quality=1.0, *, length=0.0, num_prompts=40, sizes=(4, 20), seed=0, margins=True):
    """Rewards that are quality x strength + noise; `length` is how strongly strength goes with length."""
    rng = np.random.default_rng(seed)
    parts = []
    for index in range(num_prompts):
        size = int(rng.integers(sizes[0], sizes[1] + 1))
        lengths = rng.integers(20, 900, size).astype(float)
        strength = rng.normal(size=size) + length * (lengths - lengths.mean()) / lengths.std()
        rewards = quality * strength + rng.normal(size=size)
        pairs = connected_pairs(rng, size)
        parts.append(pairs_of(strength, rewards, lengths, pairs, prompt=f"prompt {index}", margins=margins))
    return pd.concat(parts, ignore_index=True)


def record(quality=1.0, **settings):
    """Of `logged_answers`; a copy of one that is computed once."""
    return deepcopy(_record(quality, tuple(sorted(settings.items()))))


@cache
def _record(quality, settings):
    return logged_answers(table(quality, **dict(settings)), num_resamples=200)
