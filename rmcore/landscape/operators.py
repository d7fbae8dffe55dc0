"""Products with the Hessian of the mean Bradley-Terry loss, without ever forming it.

A matrix over N parameters has N x N entries; a product with one vector costs a few gradients. Everything in this
package (extreme eigenvalues, trace) is built from such products.

With margins m_p = reward_chosen[p] - reward_rejected[p] and a temperature T (that of the training's loss unless given:
1 / beta), over n pairs:

    loss          L = (1/n) sum_p softplus(-m_p / T)
    Hessian       H = d2 L / d theta2
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import softplus

from rmcore.core.errors import ConfigError, CurvatureError, DataError, ModelError
from rmcore.models.layers import REWARD_HEAD_PATTERNS, is_reward_head
from rmcore.models.precision import narrow_floats
from rmcore.training.losses import split_rewards

NAMED_SUBSETS = ("all", "head", "lora")
"""`all`: every parameter that is trained. `head`: those of the reward head. `lora`: those of adapters. Otherwise the
dotted name of a module or of one parameter, as `model.layers.3` or `model.layers.3.self_attn.q_proj.weight`."""


def reward_module(model: Any) -> nn.Module:
    """The torch module to differentiate: `model` itself, or the `.model` of a wrapper such as BradleyTerryRM.

    Raises:
        ModelError: there is no torch module in it.
        CurvatureError: it is compiled, or a parameter is narrower than float32 (bf16 puts about 0.7 % of error on H v).
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"got a {type(model).__name__} without a torch module in `.model`: there is nothing to differentiate. "
            "Pass a Hugging Face sequence-classification model or a BradleyTerryRM."
        )
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules()):
        raise CurvatureError(
            "the model is compiled, and torch.compile cannot be differentiated twice. Pass the module as it was before "
            "(`compiled._orig_mod`), or load the checkpoint again."
        )
    if narrow := narrow_floats(module):
        raise CurvatureError(
            f"the model has {', '.join(narrow)} parameters: second derivatives drown in their rounding. Load it in "
            "float32."
        )
    return module


def loss_temperature(model: Any) -> float:
    """T of the loss softplus(-margin / T) that a model was trained with: 1 / beta; 1 of a module, which has none."""
    return 1.0 if isinstance(model, nn.Module) else 1 / float(getattr(model, "beta", 1.0))


def select_parameters(module: nn.Module, subset: str) -> dict[str, nn.Parameter]:
    """The trained parameters of `subset` by name, in the module's own order (the order inside every flat vector).

    Raises:
        ConfigError: nothing has that name.
        ModelError: what has that name is frozen or made of integers.
    """
    named = dict(module.named_parameters())
    chosen = {name: parameter for name, parameter in named.items() if _belongs(name, subset)}
    if not chosen and subset not in NAMED_SUBSETS:
        modules = [name for name, _ in module.named_modules() if name]
        near = get_close_matches(subset, [*NAMED_SUBSETS, *modules, *named], n=3, cutoff=0.4) or modules[:3]
        raise ConfigError(
            f"parameters={subset!r} names nothing in this model. Choose {', '.join(NAMED_SUBSETS)}, or the dotted name "
            f"of a module or parameter, such as {', '.join(near)}."
        )
    trained = {name: parameter for name, parameter in chosen.items() if parameter.requires_grad}
    if not trained:
        raise ModelError(
            f"no trained parameter belongs to parameters={subset!r}: {_why_none(subset, list(chosen.values()))}. "
            "Unfreeze with requires_grad_(True), or choose other parameters."
        )
    return trained


def _belongs(name: str, subset: str) -> bool:
    named = {"all": True, "head": is_reward_head(name), "lora": ".lora_" in name}
    return named.get(subset, name == subset or name.startswith(f"{subset}."))


def _why_none(subset: str, chosen: Sequence[nn.Parameter]) -> str:
    if any(not parameter.is_floating_point() for parameter in chosen):
        return "they are integers, as in a quantised model, and have no derivative"
    if chosen:
        return f"all {len(chosen)} are frozen"
    wanted = {"head": ", ".join(REWARD_HEAD_PATTERNS), "lora": "lora_A or lora_B"}
    return f"no module is named {wanted.get(subset, subset)}"


@contextmanager
def measuring(module: nn.Module, selected: Sequence[nn.Parameter]) -> Iterator[None]:
    """Evaluation mode, twice differentiable attention, gradients to `selected` only; then as before.

    Full precision whatever autocast the caller is in. With dropout, or kernels without a second derivative, the numbers
    would mean nothing and look like others.

    Freezing the rest spares its graph: for the head alone the backbone then runs without any. The modes are kept
    module by module, because a caller may hold part of a model in evaluation mode.
    """
    modes = [(part, part.training) for part in module.modules()]
    keep = {id(parameter) for parameter in selected}
    frozen = [p for p in module.parameters() if p.requires_grad and id(p) not in keep]
    device_type = selected[0].device.type
    module.eval()
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device_type, enabled=False),
            sdpa_kernel(SDPBackend.MATH),
        ):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for part, training in modes:
            part.training = training


NO_SECOND_DERIVATIVE = ("double backward", "derivative for", "differentiate twice")  # parts of torch's messages
LOSS_REPEAT_TOLERANCE = 1e-5  # two float32 passes over reordered pairs differ by rounding only, about 1e-7


class PairRows(Protocol):
    """The rows of P whole pairs, R = 2P: the P chosen rows first, then the P rejected ones, in the same order.

    `rmcore.models.packing.layout.PaddedRows` is one; a mapping with the two names is what a notebook has at hand.
    """

    @property
    def input_ids(self) -> Tensor:
        """(R, L) long."""

    @property
    def attention_mask(self) -> Tensor:
        """(R, L) long, 1 on real tokens."""


MicroBatch = PairRows | Mapping[str, Tensor]
"""`PairRows`, or a mapping with its two names as keys."""


class Rows(NamedTuple):
    """A micro-batch after checking."""

    input_ids: Tensor
    attention_mask: Tensor

    @property
    def num_pairs(self) -> int:
        """P."""
        return len(self.input_ids) // 2


class LossHessian:
    """H, a symmetric (N, N) matrix over n pairs, known by its products with vectors.

    By reverse over reverse (Pearlmutter 1994, Fast exact multiplication by the Hessian): differentiate <grad, v>. Sums
    run over the micro-batches and are divided once by n, so that the cut into micro-batches does not matter.
    The graph of a micro-batch is built once for all vectors of a call of `products`, and freed after it.

    Args:
        model: a torch module whose `model(input_ids=..., attention_mask=...).logits` is (R, 1), or an object with such
            a module as `.model`. Its modes, gradients and `requires_grad` flags are as before after every call.
        micro_batches: what the loss is averaged over; see `MicroBatch`.
        parameters: the coordinates of theta; see `NAMED_SUBSETS`.
        temperature: T, logits; the root mean square of the margins makes models with margins of any size comparable.
            None: 1 / `model.beta` where the model has one, as BradleyTerryRM does, else 1, which a bare torch module
            always gets: the curvature is then that of the loss it was trained with.

    Attributes:
        num_pairs: n.
        num_parameters: N, the length of every flat vector.
        names: parameter names in the order of a flat vector.

    Raises:
        DataError: no micro-batch, or one that is not made of pairs.
        ModelError, ConfigError, CurvatureError: see `reward_module` and `select_parameters`.
    """

    def __init__(
        self,
        model: Any,
        micro_batches: Iterable[MicroBatch],
        *,
        parameters: str = "all",
        temperature: float | None = None,
    ) -> None:
        self.module = reward_module(model)
        self.micro_batches = tuple(_checked_rows(micro_batch) for micro_batch in micro_batches)
        if not self.micro_batches:
            raise DataError("there is no micro-batch: the loss of no pair has no curvature. Give at least one pair.")
        if temperature is None:
            temperature = loss_temperature(model)
        if not 0 < temperature < math.inf:
            raise ConfigError(f"temperature={temperature} divides the margins: give a positive number of logits.")
        self.num_pairs = sum(rows.num_pairs for rows in self.micro_batches)
        self.temperature = temperature
        self.subset = parameters
        selected = select_parameters(self.module, parameters)
        self.names = tuple(selected)
        self.parameters = tuple(selected.values())
        self.sizes = [p.numel() for p in self.parameters]
        self.num_parameters = sum(self.sizes)
        self.device = self.parameters[0].device
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32

    @classmethod
    def from_loader(cls, model: Any, loader: Iterable[MicroBatch], *, parameters: str = "all") -> Self:
        """Read `loader` into memory (token ids only) and check that the data and the loss repeat.

        A loader that can be read again is read again: one that draws other pairs at each pass would give the curvature
        of an unknown sample. Same idea as the check for determinism in curvlinops.

        Raises:
            CurvatureError: the loss is not finite, or a second pass gives other pairs or another loss.
        """
        operator = cls(model, loader, parameters=parameters)
        again: Iterable[Rows] = operator.micro_batches
        if not isinstance(loader, Iterator):
            again = map(_checked_rows, loader)
        if _pair_tokens(again) != _pair_tokens(operator.micro_batches):
            raise CurvatureError(
                f"two passes over the loader gave different pairs, {operator.num_pairs} at the first: which sample the "
                "curvature would be of is unknown. Pass a list of micro-batches, or a loader that repeats itself."
            )
        first, second = operator.loss(), operator.loss()
        if abs(first - second) > LOSS_REPEAT_TOLERANCE * max(abs(first), 1e-3):
            raise CurvatureError(
                f"two passes over {operator.num_pairs} pairs gave the mean losses {first:.8g} and {second:.8g}: the "
                "curvature of a loss that changes is not defined. Pass a model whose randomness is off in eval()."
            )
        return operator

    def margins(self) -> Tensor:
        """(n,) margins in logits, without temperature, in the order of the micro-batches."""
        with self._measuring(), torch.no_grad():
            return torch.cat([_margins(self.module, rows, self.device) for rows in self.micro_batches])

    def _loss(self, rows: Rows) -> Tensor:
        return softplus(-_margins(self.module, rows, self.device) / self.temperature).sum()

    def loss(self) -> float:
        """Mean loss in nats a pair.

        Raises:
            CurvatureError: it is not finite.
        """
        with self._measuring(), torch.no_grad():
            loss = sum(float(self._loss(rows)) for rows in self.micro_batches) / self.num_pairs
        if not torch.isfinite(torch.tensor(loss)):
            raise CurvatureError(
                f"the mean loss over {self.num_pairs} pairs is {loss}: there is no curvature at these weights. "
                "Evaluate the checkpoint first; if its rewards are not finite, go back to an earlier one."
            )
        return loss

    def product(self, vector: Tensor) -> Tensor:
        """The matrix times v.

        Args:
            vector: v, (N,), in the order of `names`.

        Returns:
            (N,), in `dtype`, on the model's device.

        Raises:
            CurvatureError: the product is not finite, or the model has an operation without a second derivative.
            ConfigError: the vector has another length.
        """
        return self.products(vector[None])[0]

    def products(self, vectors: Tensor) -> Tensor:
        """The matrix times each of K vectors, (K, N) -> (K, N): each graph is built once for all of them."""
        if vectors.ndim != 2 or vectors.shape[1] != self.num_parameters:
            raise ConfigError(
                f"got a vector {tuple(vectors.shape[1:])} for {self.num_parameters} parameters: "
                "pass a flat one of that length."
            )
        # The second backward, too, would follow the caller's autocast.
        with self._measuring(), _second_derivative_errors():
            directions = [self._split(vector) for vector in vectors.to(self.device)]
            totals = torch.zeros((len(directions), self.num_parameters), dtype=self.dtype, device=self.device)
            for rows in self.micro_batches:
                gradient = _gradient_of([self._loss(rows)], self.parameters, create_graph=True)
                # A parameter that the loss does not touch has a constant zero gradient, which has no graph.
                live = [index for index, g in enumerate(gradient) if g.requires_grad]
                for k, direction in enumerate(directions):
                    found = _gradient_of(
                        [gradient[index] for index in live],
                        self.parameters,
                        weights=[direction[index] for index in live],
                        keep=k + 1 < len(directions),
                    )
                    totals[k] += self._flat(found)
                del gradient  # its graph is as large as two backward passes: free it before the next one is built
        if not bool(torch.isfinite(totals).all()):
            raise CurvatureError(
                f"a product over {self.num_pairs} pairs has NaN or infinite entries: weights or rewards are not finite "
                "or overflow. Evaluate the checkpoint first; go back to an earlier one, or use float64."
            )
        return totals / self.num_pairs

    def _measuring(self) -> AbstractContextManager[None]:
        return measuring(self.module, self.parameters)

    def _split(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split(self.sizes)
        return [piece.view_as(p).to(p.dtype) for piece, p in zip(pieces, self.parameters, strict=True)]

    def _flat(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.detach().reshape(-1).to(self.dtype) for part in parts])


def _pair_tokens(micro_batches: Iterable[Rows]) -> list[tuple[list[int], list[int]]]:
    """The real tokens of both sides of each pair, sorted, as a loader may shuffle its pairs."""
    pairs: list[tuple[list[int], list[int]]] = []
    for ids, mask in micro_batches:
        sides = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
        pairs += zip(sides[: len(sides) // 2], sides[len(sides) // 2 :], strict=True)
    return sorted(pairs)


@contextmanager
def _second_derivative_errors() -> Iterator[None]:
    """Turn torch's messages about a missing second derivative into one that says what to do."""
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if not any(known in message for known in NO_SECOND_DERIVATIVE):
            raise
        raise CurvatureError(
            f"the model has an operation without a second derivative ({message.splitlines()[0]}): Hessian products "
            'need one. Load it with attn_implementation="eager" or "sdpa", and without torch.compile.'
        ) from error


def _gradient_of(
    outputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    weights: Sequence[Tensor] | None = None,
    create_graph: bool = False,
    keep: bool | None = None,
) -> tuple[Tensor, ...]:
    """Gradient of the (weighted) sum of `outputs`, one tensor a parameter, zeros where nothing depends on it."""
    if not any(output.requires_grad for output in outputs):
        return tuple(torch.zeros_like(parameter) for parameter in parameters)
    return torch.autograd.grad(
        list(outputs),
        list(parameters),
        grad_outputs=None if weights is None else list(weights),
        create_graph=create_graph,
        retain_graph=keep,
        allow_unused=True,
        materialize_grads=True,
    )


def _checked_rows(micro_batch: MicroBatch) -> Rows:
    """The two tensors of a micro-batch of whole pairs."""
    get = micro_batch.get if isinstance(micro_batch, Mapping) else partial(getattr, micro_batch)
    ids, mask = get("input_ids", None), get("attention_mask", None)
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        raise DataError(
            f"a micro-batch ({type(micro_batch).__name__}) lacks the tensors input_ids and attention_mask: "
            "it cannot be scored. Build them with rmcore.models.batching.pad_pairs."
        )
    if ids.ndim != 2 or len(ids) == 0 or len(ids) % 2 or mask.shape != ids.shape:
        raise DataError(
            f"a micro-batch has input_ids {tuple(ids.shape)} and attention_mask {tuple(mask.shape)}: both must be "
            "(2P, tokens), chosen rows first. rmcore.models.batching.pad_pairs builds them and never cuts a pair."
        )
    return Rows(ids, mask)


def _margins(module: nn.Module, rows: Rows, device: torch.device) -> Tensor:
    """(P,) reward_chosen - reward_rejected of one micro-batch, in logits, float32 or wider."""
    logits = module(input_ids=rows.input_ids.to(device), attention_mask=rows.attention_mask.to(device)).logits
    if logits.shape != (len(rows.input_ids), 1):
        raise ModelError(
            f"the model gives logits {tuple(logits.shape)} for {len(rows.input_ids)} rows: a reward model has exactly "
            "one label. Load it with num_labels=1."
        )
    chosen, rejected = split_rewards(logits)
    return chosen - rejected
