"""Features: the input of the reward head's last linear layer, one row of D numbers a side.

A reward is linear in these numbers, so whatever changes only the head (another fit, members of an ensemble, an
uncertainty of its weights) needs one pass through the backbone and then a matrix product.

They are taken where `BradleyTerryRM.score_sides` computes rewards, by a hook on that layer, so distinct sides are
computed once and shared prefixes are packed there as here, and an adapter's weights count.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rmcore.core.errors import ModelError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import TokenizedSide
from rmcore.models.batching import distinct_sides
from rmcore.models.packing.layout import Packing, reading_place
from rmcore.models.precision import reward_heads
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.scoring import SCORING_TOKEN_BUDGET

TOLERANCE = 1e-3
"""Relative to the largest reward of a batch; rounding alone is a thousand times smaller."""


def head_of(rm: BradleyTerryRM) -> nn.Linear:
    """The last linear layer of the reward head, with one output: what features are multiplied with.

    That is `score` of a causal model, `classifier` or a layer of it (`classifier.out_proj`) of an encoder; next to
    adapters the copy that was trained with them.

    Raises:
        ModelError: the head has none, so rewards are not linear in anything.
    """
    layers = [
        module
        for head in reward_heads(rm.model).values()
        for module in _in_use(head).modules()
        if isinstance(module, nn.Linear) and module.out_features == 1
    ]
    if not layers:
        raise ModelError(
            f"the reward head of {type(rm.model).__name__} has no linear layer with one output, so its rewards are not "
            "linear in any features; use a Hugging Face sequence-classification class with one label."
        )
    return layers[-1]


def _in_use(head: nn.Module) -> nn.Module:
    """PEFT keeps the head as it was next to the copy that is trained and used."""
    wrapper: Any = head
    return wrapper.modules_to_save[wrapper.active_adapters[0]] if hasattr(head, "modules_to_save") else head


@torch.inference_mode()
def features(
    rm: BradleyTerryRM, sides: Sequence[TokenizedSide], *, token_budget: int | None = None, report: Report = silent
) -> np.ndarray:
    """Input of the head's last linear layer at the reading place of N sides: (N, D) float32, in their order.

    `features @ head_of(rm).weight.T + bias` are the rewards of `rm.score_sides(sides)` up to rounding, which is
    checked on every batch.

    Args:
        rm: with whole weights on one device.
        sides: as its renderer tokenizes them.
        token_budget: computed tokens of one batch; left out: `SCORING_TOKEN_BUDGET`.
        report: told of the sides done.

    Raises:
        ModelError: the head does more than this layer with them, so rewards are not linear in them.
    """
    head = head_of(rm)
    budget = token_budget or SCORING_TOKEN_BUDGET[rm.device.type]
    different, which = distinct_sides(sides)
    times = np.bincount(which, minlength=len(different))
    states_of = np.zeros((len(different), head.in_features), dtype=np.float32)
    was_training = rm.model.training
    rm.model.eval()
    done = 0
    try:
        for chunk in rm.scoring_chunks(different, token_budget=budget, precision="fp32"):
            indices = [index for group in chunk for index in group]
            with _inputs_of(head) as seen:
                rewards = rm.score_chunk(different, chunk)
            states = _at_reading_places(rm, seen[-1], [different[index].ids for index in indices]).float()
            _check(rewards, states, head)
            states_of[indices] = states.cpu().numpy()
            done += int(times[indices].sum())
            report(done, len(sides), "sides")
    finally:
        rm.model.train(was_training)
    return states_of[which]


def pair_features(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], *, report: Report = silent
) -> npt.NDArray[np.float64]:
    """Features of the chosen and the rejected sides of P pairs, (2, P, D); see `features`."""
    sides = [side for pair in rm.renderer.tokenize_pairs(pairs) for side in (pair.chosen, pair.rejected)]
    both = features(rm, sides, report=report).astype(np.float64)
    return np.stack([both[::2], both[1::2]])


@contextmanager
def _inputs_of(layer: nn.Linear) -> Iterator[list[Tensor]]:
    """Collect the inputs of `layer`, call by call, while active."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


def _at_reading_places(rm: BradleyTerryRM, seen: Tensor, ids: Sequence[Sequence[int]]) -> Tensor:
    """One row a side, (S, D), of what the layer saw.

    A packed row and an encoder give it one state a side, (S, D) or (S, 1, D); a padded causal model applies its head
    to every token, (S, L, D), and takes the reading place afterwards.
    """
    if seen.ndim == 2:
        return seen
    if seen.shape[1] == 1:
        return seen[:, 0]
    plain = rm.model.get_base_model() if rm.has_adapters else rm.model
    rule = Packing(causal=hasattr(plain, "score"), kernel="sdpa", pad_id=plain.config.get_text_config().pad_token_id)
    places = [reading_place(side, rule) for side in ids]
    return seen[torch.arange(len(places), device=seen.device), torch.tensor(places, device=seen.device)]


def _check(rewards: Tensor, states: Tensor, head: nn.Linear) -> None:
    linear = head(states)[:, 0].float()
    difference = (linear - rewards).abs().max()
    if not difference <= TOLERANCE * (1 + rewards.abs().max()) and bool(rewards.isfinite().all()):
        raise ModelError(
            f"rewards differ by {float(difference):.2g} from the output of the head's last linear layer on its "
            "input, so the head does more with it; its rewards are not linear in these features."
        )
