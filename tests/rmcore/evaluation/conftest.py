"""Reward tables with known structure."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from reward_table import reward_table

MakeRewards = Callable[..., pd.DataFrame]


@pytest.fixture
def make_rewards() -> MakeRewards:
    """Factory of reward tables: prompts differ in size, offset and difficulty; some margins can be rounded to ties."""

    def make(
        num_pairs: int = 120, num_prompts: int = 15, *, seed: int = 0, decimals: int | None = None
    ) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        prompt = rng.integers(num_prompts, size=num_pairs)
        offset = rng.normal(0, 1, num_prompts)[prompt]
        margin = rng.normal(0.6, 1.2, num_pairs) + rng.normal(0, 0.7, num_prompts)[prompt]
        chosen, rejected = offset + margin / 2, offset - margin / 2
        if decimals is not None:
            chosen, rejected = chosen.round(decimals), rejected.round(decimals)
        chars = {f"{side}_chars": rng.integers(20, 400, num_pairs) for side in ("chosen", "rejected")}
        return reward_table(chosen, rejected, prompt, **chars, subset=np.resize(["easy", "hard", None], num_pairs))

    return make
