"""Tables of pairs with rewards, as evaluations read them."""

import numpy as np
import pandas as pd


def reward_table(chosen, rejected, prompt=None, *, chosen_chars=10, rejected_chars=10, subset=None, **more):
    """Pairs with these (P,) rewards, by the number of their prompt; each is a prompt of its own where none is given."""
    number = np.arange(len(chosen))
    return pd.DataFrame(
        {
            "pair_id": [f"pair-{at:05d}" for at in number],
            "prompt_id": [f"prompt-{at}" for at in (number if prompt is None else prompt)],
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "chosen_chars": chosen_chars,
            "rejected_chars": rejected_chars,
            "subset": subset,
            **more,
        }
    )
