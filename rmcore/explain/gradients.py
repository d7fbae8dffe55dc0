"""Integrated gradients of a reward over the tokens of an answer, as a second opinion beside leaving parts out.

The reward's gradient at the token embeddings, averaged along the straight line from a baseline to the answer, times
their difference (Sundararajan, Taly and Yan 2017, arXiv:1703.01365), by `captum`. The baseline has the embedding of the
pad token in place of each token of the answer; prompt and special tokens stay, and so do all positions: position and
type embeddings of BERT and GPT-2 are added behind the point where the line is drawn. The attributions of the tokens add
up to reward(answer) - reward(baseline); what the sum misses by is the error of the integration, which is reported.

It costs a few dozen forward and backward passes of one answer. It cannot say anything of a reward model that is served
(it needs gradients), of one without a layer of token embeddings, or where the tokenizer is a slow one, which does not
say which characters its tokens stand for. The embeddings of a row of pad tokens are no text that a model has read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from captum.attr import LayerIntegratedGradients
from torch import Tensor, nn

from rmcore.core.errors import ModelError
from rmcore.data.pair import Prompt
from rmcore.explain.spans import Span
from rmcore.models.reward_model import BradleyTerryRM

FIRST_STEPS, MOST_STEPS = 32, 256
"""Points of Gauss-Legendre's rule on the line: doubled from the first number up to the second one while the error is
above `TOLERANCE`."""
TOLERANCE = 0.01
"""Error that is small enough, as a part of reward(answer) - reward(baseline), or of one logit where that is larger."""
TOKENS_AT_ONCE = 4096
"""Tokens of one forward and backward pass."""


@dataclass(frozen=True, slots=True)
class TokenGradient:
    """The part of one token of an answer, its characters `start` to before `end`, in logits."""

    start: int
    end: int
    value: float


@dataclass(frozen=True, slots=True)
class Gradients:
    """The integrated gradients of one answer."""

    tokens: tuple[TokenGradient, ...]
    """Those of the answer that the model reads, in order."""
    total: float
    """Reward of the answer, in logits."""
    base: float
    """Reward with pad tokens in the answer's place."""
    error: float
    """Sum of the tokens' values - (total - base): what the integration misses."""
    num_steps: int

    def by_span(self, spans: Sequence[Span]) -> list[float]:
        """Sum the tokens over each of the spans of the answer; a token belongs where its last character is."""
        return [sum(one.value for one in self.tokens if start < one.end <= end) for start, end in spans]


def integrated_gradients(rm: BradleyTerryRM, prompt: Prompt, answer: str) -> Gradients:
    """Attribute the reward of one answer to its tokens; the model's weights and gradients stay as they are.

    Raises:
        DataError: the model cannot read the side, or its tokenizer is a slow one.
        ModelError: the model has no layer of token embeddings of its own, or no pad token among them.
    """
    placed = rm.renderer.place_side(prompt, answer)
    own = [number for number, place in enumerate(placed.places) if place is not None]
    layer = _embeddings(rm)
    ids = torch.tensor([placed.side.ids], device=rm.device)  # (1, L)
    baseline = ids.clone()
    baseline[0, own] = rm.pad_id
    with _evaluated(rm.model):
        rewards = _rewards_of(rm)
        with torch.no_grad():
            # Where a reward is read follows from the ids, so the baseline's is computed with those of the answer.
            replaced = layer(baseline)
            total = float(rewards(ids))
            handle = layer.register_forward_hook(lambda *_: replaced)
            base = float(rewards(ids))
            handle.remove()
        for steps in _steps():
            values = _attributions(rewards, layer, ids, baseline, steps)
            error = float(values.sum()) - (total - base)
            if abs(error) <= TOLERANCE * max(1.0, abs(total - base)):
                break
    tokens = tuple(
        TokenGradient(*place, float(values[number])) for number, place in enumerate(placed.places) if place is not None
    )
    return Gradients(tokens, total, base, sum(one.value for one in tokens) - (total - base), steps)


def _attributions(
    rewards: Callable[[Tensor], Tensor], layer: nn.Module, ids: Tensor, baseline: Tensor, steps: int
) -> Tensor:
    """Integrated gradients of each token: (L,) float64."""
    found = LayerIntegratedGradients(rewards, layer).attribute(
        ids,
        baselines=baseline,
        n_steps=steps,
        internal_batch_size=max(1, TOKENS_AT_ONCE // ids.shape[1]),
    )
    return found[0].detach().double().sum(-1)  # (1, L, H) -> (L,)


def _rewards_of(rm: BradleyTerryRM) -> Callable[[Tensor], Tensor]:
    def rewards(ids: Tensor) -> Tensor:
        """Rewards of R rows without padding, (R, L) -> (R,); a pad token in them is one of the text."""
        return rm.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 0].float()

    return rewards


def _steps() -> Iterator[int]:
    steps = FIRST_STEPS
    while steps <= MOST_STEPS:
        yield steps
        steps *= 2


def _embeddings(rm: BradleyTerryRM) -> nn.Module:
    try:
        layer = rm.model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        layer = None
    if not isinstance(layer, nn.Module):
        raise ModelError(
            f"{type(rm.model).__name__} has no layer of token embeddings, at which integrated gradients are taken; "
            "leave its parts out instead (rmcore.explain.effects)."
        )
    rows = getattr(layer, "num_embeddings", None)
    if rows is not None and rm.pad_id >= rows:
        raise ModelError(
            f"the pad token's id {rm.pad_id} is beyond the {rows} token embeddings, so it cannot be the baseline of "
            "integrated gradients; leave parts out instead (rmcore.explain.effects)."
        )
    return layer


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """Without dropout, and with no weight wanting a gradient, as those at the embeddings are all that is needed."""
    training = model.training
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(training)
