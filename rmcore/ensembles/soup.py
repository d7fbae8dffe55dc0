"""The average of the weights of several reward models: one model that costs one pass, where an ensemble costs M.

The mean of weights is no mean of rewards unless rewards are linear in what differs. Nothing promises that it is any
good: models of one base that were trained apart often lie in one basin, where it is, and models of different bases do
not. So whoever makes one measures it before it is used (`rmcore.policy.earned_average`).

Sources: Wortsman et al. 2022, Model soups, arXiv:2203.05482 (uniform and greedy); Ramé et al. 2024, WARM: On the
benefits of weight averaged reward models, arXiv:2401.12187.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rmcore.core.errors import ModelError
from rmcore.ensembles.members import architecture, text_rules
from rmcore.models.reward_model import BradleyTerryRM

SHOWN_CHARS = 80
"""Characters of a differing value that a message shows."""
MEANINGS = {
    "architecture": "their weights do not stand for the same thing",
    "tokenizer": "they read text as different tokens, so what one has learned means nothing to the other",
    "rendering": "they read pairs in different forms or lengths, and a checkpoint has one",
    "beta": "a margin of one is not the same probability as that of the other, and a checkpoint has one scale",
    "base": "weights that were trained from different ones do not lie in one basin",
    "weights": "not every weight of one has its counterpart in the other",
}
"""Why a difference of two members forbids their average."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """The properties of one member that all must have in common; two are compared field by field.

    Attributes:
        name: of the member, for messages.
        base: what it was trained from; None where nothing says so, and then it is not compared.
    """

    name: str
    architecture: Mapping[str, Any]
    tokenizer: tuple[Any, ...]
    rendering: Mapping[str, Any]
    beta: float
    base: str | None
    weights: Mapping[str, Any]

    @classmethod
    def of(cls, rm: BradleyTerryRM, name: str, base: str | None) -> "Likeness":
        """Describe a plain model."""
        return cls(
            name=name,
            architecture=architecture(rm),
            tokenizer=text_rules(rm),
            rendering=asdict(rm.renderer.rendering),
            beta=rm.beta,
            base=base,
            weights={key: tuple(tensor.shape) for key, tensor in rm.model.state_dict().items()},
        )

    def require(self, other: "Likeness") -> None:
        """Refuse another member that has something else than this one.

        Raises:
            ModelError: names what differs, and what that means.
        """
        for what, meaning in MEANINGS.items():
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours == theirs or (what == "base" and None in (ours, theirs)):
                continue
            raise ModelError(
                f"{other.name} has another {what} than {self.name} ({_difference(ours, theirs)}): {meaning}. Average "
                "models that were trained alike from one base, or use them as an ensemble (rm-opt ensemble)."
            )


def _difference(ours: Any, theirs: Any) -> str:
    """Say the first thing that differs, shortened: `hidden_size 64, not 160`."""
    if isinstance(ours, Mapping):
        key = next(key for key in [*ours, *theirs] if ours.get(key) != theirs.get(key))
        return f"{key} {_shown(theirs.get(key))}, not {_shown(ours.get(key))}"
    if isinstance(ours, tuple):
        parts = zip(("vocabulary or rules", "chat template", "padding token"), ours, theirs, strict=True)
        return next(part for part, one, two in parts if one != two)
    return f"{_shown(theirs)}, not {_shown(ours)}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


class WeightMean:
    """The running mean of the weights of several models, summed on the CPU in float64.

    So the mean of equal float32 weights is that weight bit for bit, and the order of the models hardly matters. It
    takes twice the memory of a model in float32.

    Attributes:
        num: models that were added.
    """

    def __init__(self) -> None:
        self.num = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, rm: BradleyTerryRM) -> None:
        """Take one more model, plain and of the same tensors as those before (`Likeness`)."""
        for name, tensor in rm.model.state_dict().items():
            if tensor.is_floating_point():
                wide = tensor.detach().to("cpu", torch.float64)
                self._sums[name] = self._sums[name].add_(wide) if name in self._sums else wide.clone()
        self.num += 1

    def write_into(self, rm: BradleyTerryRM, *, with_its_own: bool = False) -> BradleyTerryRM:
        """Give `rm` the mean as its weights, in place, and return it.

        Args:
            rm: any of the models; what is no floating point number stays its own.
            with_its_own: count its own weights as those of one more model.
        """
        with torch.no_grad():
            state = {name: one for name, one in rm.model.state_dict().items() if one.is_floating_point()}
            # All are worked out before any is written: tied weights stand under two names.
            means = {
                name: (self._sums[name] + (one.to("cpu", torch.float64) if with_its_own else 0))
                / (self.num + with_its_own)
                for name, one in state.items()
            }
            for name, tensor in state.items():
                tensor.copy_(means[name])
        return rm


@dataclass(frozen=True, slots=True)
class Tried:
    """One step of the greedy choice: whether a member was kept, and the accuracies that say so.

    with_it and before are those of the average with this member and without it; before is None for the first.
    """

    name: str
    with_it: float
    before: float | None
    kept: bool


def choose_greedily(
    accuracies: Mapping[str, float],
    load: Callable[[str], BradleyTerryRM],
    accuracy: Callable[[BradleyTerryRM], float],
) -> list[Tried]:
    """Take members from the best one down, each kept only if the average does not get worse by it.

    The choice looks at the same pairs again and again, so what it reaches there is too good: judge it on others.

    Args:
        accuracies: of each member alone, by name; equal ones keep their order.
        load: a member by name, plain.
        accuracy: of a model on the pairs that choose.

    Source:
        Wortsman et al. 2022, Model soups, arXiv:2203.05482, recipe 1.
    """
    order: Sequence[str] = sorted(accuracies, key=lambda name: -accuracies[name])
    kept = WeightMean()
    kept.add(load(order[0]))
    tried = [Tried(order[0], accuracies[order[0]], None, True)]
    reached = accuracies[order[0]]
    for name in order[1:]:
        found = accuracy(kept.write_into(load(name), with_its_own=True))
        tried.append(Tried(name, found, reached, found >= reached))
        if found >= reached:
            kept.add(load(name))
            reached = found
    return tried


def average_weights(names: Sequence[str], load: Callable[[str], BradleyTerryRM]) -> BradleyTerryRM:
    """The model whose weights are the mean of those of the members, one of which is in memory at a time.

    Members that are adapters are loaded merged: what is averaged are the weights W + BA, never the factors. The mean of
    products is what the members do; the product of means (B1 + B2)(A1 + A2) / 4 has cross terms, which no member has.
    And factors are arbitrary: B and A of one member may become B R and R^-1 A for any invertible R without changing one
    reward, but not without changing the mean.
    """
    mean = WeightMean()
    for name in names:
        rm = load(name)
        mean.add(rm)
    return mean.write_into(rm)
