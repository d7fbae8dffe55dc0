"""Measure one model's curvature as one record: what the stage and the command share.

Every count (pairs, products, probes) is a setting and nothing looks at a clock or at free memory, so that equal
settings give equal records on a busy machine, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from rmcore.core.errors import DataError
from rmcore.core.progress import Report, labelled, report_left_out
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.data.rendering import DroppedPair, TokenizedPair
from rmcore.landscape.analyzer import hessian_spectrum
from rmcore.landscape.eigensolvers import dot
from rmcore.landscape.operators import LossHessian
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

    They are not taken from the front: a file of preferences is often sorted by prompt, and 16 pairs of one prompt say
    nothing of another one.

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


MAX_GROUPS = 16
"""Groups of prompts: the standard error of a number from G groups is itself known to 1 / sqrt(2 (G - 1)), here 18 %."""
ONE_PROMPT = "all pairs have one prompt, from which no error over prompts can be told; give pairs of more prompts."
NO_MARGIN = "every margin is 0, so they have no size to divide by."


def measure_curvature(
    model: Any, sample: CurvatureSample, config: LandscapeConfig, *, seed: int, report: Report
) -> dict[str, Any]:
    """Measure the ends of the spectrum and the trace, and how far the largest eigenvalue would move with other prompts.

    Args:
        model: see `operators.LossHessian`.
        sample: the pairs.
        config: by which method, and by how many products.
        seed: of every random vector.
        report: called as report(done, total, what) within each part.

    Returns:
        The record of `HessianSpectrum`, JSON-ready, with `over_prompts`: {"standard_error" of lambda_max or None,
        "num_prompts", "num_groups", "reasons"}. With `config.normalized` also `normalized`: {"temperature",
        "lambda_max", "residual", "reasons"} of the Hessian of softplus(-m / T), T the root mean square of the margins.
        Margins that grow by a factor leave it as it was (up to the head's own weights), while the raw Hessian falls, so
        models whose margins differ in size can be compared by it.

    Raises:
        CurvatureError, DataError, ModelError, ConfigError: see `analyzer.HessianAnalyzer.compute_spectrum`.
    """
    hessian = LossHessian.from_loader(model, sample.batches, parameters=config.parameters)
    counts = {"num_steps": config.lanczos_steps, "trace_probes": config.trace_probes, "seed": seed}
    spectrum, top = hessian_spectrum(
        hessian, config.method, config.top_k, **counts, report=labelled(report, "Hessian products")
    )
    record = spectrum.to_dict()
    record["over_prompts"] = error_over_prompts(model, sample, top, config, labelled(report, "errors over prompts"))
    if spectrum.lambda_max is None:  # the vector is that of a negative eigenvalue
        record["over_prompts"] |= {
            "standard_error": None,
            "reasons": {"standard_error": spectrum.reasons["lambda_max"]},
        }
    if config.normalized:
        scale = float(hessian.margins().square().mean().sqrt())
        found = {"temperature": scale, "lambda_max": None, "residual": None, "reasons": {"lambda_max": NO_MARGIN}}
        if scale > 0:
            scaled = LossHessian(model, sample.batches, parameters=config.parameters, temperature=scale)
            told = labelled(report, "margins of size 1")
            ends, _ = hessian_spectrum(scaled, config.method, config.top_k, **counts, report=told)
            found |= {"lambda_max": ends.lambda_max, "residual": ends.residuals[0], "reasons": ends.reasons}
        record["normalized"] = found
    return record


def error_over_prompts(
    model: Any, sample: CurvatureSample, top: Tensor, config: LandscapeConfig, report: Report
) -> dict[str, Any]:
    """Standard error of lambda_max over prompts: a residual says nothing of how it would move with other pairs.

    The pairs are cut into G groups of whole prompts. For the unit eigenvector v the form v . H_g v of a group is exact,
    and the eigenvalue is the mean of these forms over pairs; so to first order (perturbation of a simple eigenvalue:
    the vector's own change is of second order) its error over prompts is that of a ratio of means (Cochran 1977,
    Sampling Techniques, 6.4). It leaves out that the largest eigenvalue of a sample is too high on average, because its
    vector was chosen on the same pairs.

    Args:
        model: see `operators.LossHessian`.
        sample: the pairs that the vector was found on.
        top: (N,) unit eigenvector of lambda_max.
        config: the parameters.
        report: called after each group.
    """
    groups = sample.prompt_groups(MAX_GROUPS)
    counts = {"num_prompts": len(set(sample.prompts)), "num_groups": len(groups)}
    if len(groups) < 2:
        return {"standard_error": None, **counts, "reasons": {"standard_error": ONE_PROMPT}}
    forms = np.zeros(len(groups))  # (G,)
    for number, group in enumerate(groups):
        product = LossHessian(model, group.batches, parameters=config.parameters).product(top)
        forms[number] = dot(top.to(product), product)
        report(number + 1, len(groups), "groups")
    sizes = np.array([len(group.pairs) for group in groups], dtype=np.float64)
    mean = float((forms * sizes).sum() / sizes.sum())
    spread = float(((sizes * (forms - mean)) ** 2).sum()) * len(groups) / (len(groups) - 1)
    return {"standard_error": math.sqrt(spread) / float(sizes.sum()), **counts, "reasons": {}}
