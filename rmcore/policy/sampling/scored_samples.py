"""The samples of a policy as a reward model sees them, with members that say how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ModelError
from rmcore.core.progress import Report, labelled
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.features import features, head_of, pair_features
from rmcore.ensembles.linear_probes import bootstrap_heads
from rmcore.models.reward_model import BradleyTerryRM


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """Rewards of N samples in logits.

    rewards: (N,) by the reward model.
    members: (M, N) by heads on its backbone, each fitted on prompts of the training pairs drawn with replacement.
    num_cut: samples longer than the reward model reads.
    """

    rewards: FloatArray
    members: FloatArray
    num_cut: int


def score_samples(
    rm: BradleyTerryRM,
    samples: pd.DataFrame,
    training_pairs: Sequence[PreferencePair],
    *,
    num_members: int,
    seed: int,
    report: Report,
) -> ScoredSamples:
    """Score samples in one pass through the backbone; whatever differs only in the head is a matrix product.

    Args:
        rm: the reward model.
        samples: columns prompt and response; an empty response is scored as such. Only text reaches the reward model,
            so the policy may have another tokenizer.
        training_pairs: what the member heads are fitted on.
        num_members: M.
        seed: of the members' draws.
        report: progress.

    Raises:
        ModelError: a reward is not finite, or rewards are not linear in anything (see `head_of`).
    """
    head = head_of(rm)
    weight = head.weight.detach().double().cpu().numpy()[0]
    bias = 0.0 if head.bias is None else float(head.bias.detach())
    sides = rm.renderer.tokenize_sides(list(zip(samples["prompt"], samples["response"], strict=True)))
    found = features(rm, sides, report=labelled(report, "samples scored")).astype(np.float64)
    rewards = found @ weight + bias
    broken = np.flatnonzero(~np.isfinite(rewards))
    if len(broken):
        row = samples.iloc[broken[0]]
        raise ModelError(
            f"{len(broken)} of {len(rewards)} samples got a reward that is not finite; the first answers "
            f"{row['prompt'][:60]!r} with {row['response'][:60]!r}. The reward model's weights are broken or overflow; "
            "evaluate it before a policy is optimised against it."
        )
    both = pair_features(rm, training_pairs, report=labelled(report, "pairs read"))
    heads = bootstrap_heads(both[0] - both[1], [pair.prompt_id for pair in training_pairs], num_members, seed)
    return ScoredSamples(rewards, heads @ found.T, sum(side.num_cut > 0 for side in sides))
