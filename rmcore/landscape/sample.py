"""Which pairs a curvature is measured on, and how they become micro-batches.

Pairs are drawn at random, not taken from the front: a file of preferences is often sorted by prompt, and 16 pairs of
one prompt say nothing of another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rmcore.core.errors import DataError
from rmcore.core.progress import report_left_out
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.data.rendering import DroppedPair, TokenizedPair
from rmcore.landscape.settings import LandscapeConfig
from rmcore.models.batching import pack_pairs, pad_pairs
from rmcore.models.packing.layout import PaddedRows
from rmcore.models.reward_model import BradleyTerryRM

CURVATURE_TOKEN_BUDGET = 4096
"""Padded tokens of a micro-batch of the Hessian: double backward keeps about twice the activations of training."""


def random_order(num_available: int, seed: int) -> list[int]:
    """All positions in the order in which `seed` draws them."""
    return list(np.random.default_rng(seed).permutation(num_available).tolist())


def group_prompts(prompts: Sequence[str], max_groups: int) -> list[list[int]]:
    """Positions of the pairs in at most `max_groups` groups of about equal size; a prompt is never cut.

    Pairs of one prompt are right or wrong together, so whatever is resampled or left out goes by prompt. Prompts with
    most pairs first, each to the smallest group.
    """
    members: dict[str, list[int]] = {}
    for position, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(position)
    groups: list[list[int]] = [[] for _ in range(min(max_groups, len(members)))]
    for positions in sorted(members.values(), key=len, reverse=True):
        min(groups, key=len).extend(positions)
    return groups


@dataclass(frozen=True)
class CurvatureSample:
    """The pairs that a curvature is averaged over.

    pairs: as token ids.
    prompts: the prompt of each, for errors by prompt.
    pad_id: of the model.
    """

    pairs: Sequence[TokenizedPair]
    prompts: Sequence[str]
    pad_id: int

    def __post_init__(self) -> None:
        if not self.pairs:
            raise DataError("there is no pair to measure the curvature on: the loss of no pair has none. Give some.")

    @cached_property
    def order(self) -> list[list[int]]:
        """Positions of the pairs in each micro-batch: about equally long ones together, for little padding."""
        longest = max(pair.num_tokens for pair in self.pairs)
        return pack_pairs([pair.num_tokens for pair in self.pairs], max(CURVATURE_TOKEN_BUDGET, 2 * longest))

    @cached_property
    def batches(self) -> list[PaddedRows]:
        """The micro-batches."""
        return [pad_pairs([self.pairs[index] for index in group], pad_id=self.pad_id) for group in self.order]

    def prompt_groups(self, max_groups: int) -> list["CurvatureSample"]:
        """The same pairs as at most `max_groups` samples; a prompt is never cut."""
        return [
            CurvatureSample([self.pairs[i] for i in group], [self.prompts[i] for i in group], self.pad_id)
            for group in group_prompts(self.prompts, max_groups)
        ]


def draw_sample(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], config: LandscapeConfig, *, seed: int
) -> CurvatureSample:
    """`config.num_pairs` of `pairs`, drawn by `seed` among those that the model can read.

    A drawn pair that it cannot read, which an evaluation leaves out as well, makes way for the next one and is said on
    stderr.

    Raises:
        DataError: there are no pairs, or none can be read.
    """
    order = random_order(len(pairs), seed)
    read: dict[int, TokenizedPair] = {}
    dropped: list[DroppedPair] = []
    tried = 0
    while len(read) < config.num_pairs and tried < len(order):
        some = order[tried : tried + config.num_pairs - len(read)]  # tokenize no more of a large file than is measured
        tried += len(some)
        for position, found in zip(some, rm.renderer.try_pairs([pairs[place] for place in some]), strict=True):
            if isinstance(found, TokenizedPair):
                read[position] = found
            else:
                dropped.append(found)
    if dropped and not read:
        raise DataError(f"none of the {len(pairs)} pairs can be read as this model reads text: {dropped[0].reason}")
    if dropped:
        report_left_out(len(dropped), "drawn pairs", f"pair {dropped[0].pair_id}: {dropped[0].reason}")
    kept = sorted(read)
    return CurvatureSample([read[one] for one in kept], [prompt_text(pairs[one].prompt) for one in kept], rm.pad_id)
