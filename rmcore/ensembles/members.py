"""The members of an ensemble: reward models, of which those with one and the same backbone are scored in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ModelError
from rmcore.core.progress import Report, counting_on, silent
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.features import features, head_of
from rmcore.ensembles.score import readable_pairs
from rmcore.models.reward_model import BradleyTerryRM


@dataclass(eq=False)
class SharedBackbone:
    """One backbone with the heads of its m members."""

    rm: BradleyTerryRM
    names: list[str] = field(default_factory=list)
    heads: list[FloatArray] = field(default_factory=list)
    """m times (D,)"""
    biases: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    """Scale of each member's margins: P(first preferred) = sigmoid(beta * margin)."""

    def rewards(self, sides: Sequence[TokenizedSide], report: Report) -> FloatArray:
        """Rewards of N sides by each member, from one pass: (m, N)."""
        states = features(self.rm, sides, report=report).astype(np.float64)
        return np.stack(self.heads) @ states.T + np.array(self.biases)[:, None]


class Members:
    """M reward models in order, held as few backbones as there are different ones."""

    def __init__(self) -> None:
        self.backbones: list[SharedBackbone] = []
        self._order: list[tuple[int, int]] = []

    def add(self, rm: BradleyTerryRM, name: str) -> None:
        """Take one more member. Of one whose backbone is there already only the head is kept.

        Raises:
            ModelError: see `rmcore.ensembles.features.head_of`.
        """
        head = head_of(rm)
        weight, bias = (None if each is None else each.detach().double().cpu() for each in (head.weight, head.bias))
        assert weight is not None  # noqa: S101 - a linear layer has a weight
        shared = next((one for one in self.backbones if _same_but_head(one.rm, rm)), None) or SharedBackbone(rm)
        if shared not in self.backbones:
            self.backbones.append(shared)
        shared.names.append(name)
        shared.heads.append(weight[0].numpy())
        shared.biases.append(0.0 if bias is None else float(bias[0]))
        shared.betas.append(rm.beta)
        self._order.append((self.backbones.index(shared), len(shared.names) - 1))

    def __len__(self) -> int:
        return len(self._order)

    @property
    def names(self) -> list[str]:
        """Names of the M members, for messages."""
        return [self.backbones[which].names[place] for which, place in self._order]

    def readable(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """The pairs that every member can read; the others are counted and said on stderr.

        Raises:
            DataError: there are pairs, and none can be read.
        """
        kept = list(pairs)
        for shared in self.backbones:
            kept = readable_pairs(shared.rm, kept)
        return kept

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str], *, report: Report = silent) -> FloatArray:
        """Raw rewards of N responses by each member: (M, N), in logits.

        Args:
            prompts: (N,)
            responses: (N,)
            report: told of the sides done, over all backbones.

        Raises:
            DataError: a response cannot be read; `readable` leaves such pairs out.
            ModelError: a reward is not finite; the message names the member.
            ValueError: the lists differ in length.
        """
        requests = list(zip(prompts, responses, strict=True))
        found = []
        for number, shared in enumerate(self.backbones):
            sides = shared.rm.renderer.tokenize_sides(requests)
            told = counting_on(report, number, len(self.backbones))
            found.append(shared.rewards(sides, told) if sides else np.zeros((len(shared.names), 0)))
        rewards = np.stack([found[which][place] for which, place in self._order])
        for name, row in zip(self.names, rewards, strict=True):
            bad = int((~np.isfinite(row)).sum())
            if bad:
                raise ModelError(
                    f"{bad} of {len(row)} rewards of member {name} are not finite: it diverged, or its weights are "
                    "damaged. Leave it out, or train it again."
                )
        return rewards


def _same_but_head(a: BradleyTerryRM, b: BradleyTerryRM) -> bool:
    """Whether both read text alike and all their tensors but the head's last layer are equal bit for bit."""
    if a.renderer.rendering != b.renderer.rendering or text_rules(a) != text_rules(b):
        return False
    if architecture(a) != architecture(b):
        return False
    ours, theirs = _tensors_but_head(a), _tensors_but_head(b)
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name].to(tensor.device))
        for name, tensor in ours.items()
    )


def text_rules(rm: BradleyTerryRM) -> tuple[Any, ...]:
    """Gather what makes tokens of a text, to compare two models by: the tokenizer's rules, its template, its pad."""
    tokenizer = rm.tokenizer
    # A slow tokenizer has no text form of its rules; then only the very same object counts as equal.
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else id(tokenizer)
    return (rules, tokenizer.chat_template, tokenizer.pad_token_id)


def architecture(rm: BradleyTerryRM) -> dict[str, Any]:
    """The class and the configuration, which decide what is made of the weights, without where they came from."""
    plain: Any = rm.model.get_base_model() if rm.has_adapters else rm.model
    config = plain.config.to_dict()
    known = {key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"}
    return {"class": type(plain).__name__, **known}


def _tensors_but_head(rm: BradleyTerryRM) -> dict[str, Tensor]:
    model: nn.Module = rm.model
    own = {tensor.data_ptr() for tensor in head_of(rm).parameters()}
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.data_ptr() not in own}
