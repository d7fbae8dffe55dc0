"""Graphs of micro-batches that are kept between products, as far as memory allows."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rmcore.training.memory import free_bytes

KEPT_SHARE = 0.5
"""Share of the free memory that kept graphs may take."""


class Linearization(NamedTuple):
    """The kept graph of one micro-batch, from which products are made: differentiate `outputs` against the parameters.

    dual: None for the Hessian, whose `outputs` are the gradient of the loss. For the Gauss-Newton matrix `outputs` are
    the margins (P,), and `dual` is (u, J^T u as a function of u), from which J v = d <J^T u, v> / du.
    """

    outputs: tuple[Tensor, ...]
    dual: tuple[Tensor, tuple[Tensor, ...]] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors themselves, without what their graph saves."""
        tensors = self.outputs if self.dual is None else (*self.outputs, *self.dual[1])
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


class KeptGraphs:
    """The linearizations of micro-batches by number, kept until the weights change.

    Hooks that count bytes switch torch's own check for changed weights off, so it is made here.

    Args:
        module: whose weights the graphs saved.
        keep: True keeps every graph, False none, None as many as take at most KEPT_SHARE of the memory that is free
            at the first.
    """

    def __init__(self, module: nn.Module, keep: bool | None) -> None:
        self.parameters = tuple(module.parameters())
        self.keep = keep
        self._kept: dict[int, Linearization] = {}
        self._room: float | None = None
        self._weights: tuple[tuple[int, int], ...] = ()

    def __contains__(self, index: int) -> bool:
        return index in self._kept

    def release(self) -> None:
        """Free all graphs."""
        self._kept.clear()
        self._room = None

    def release_if_weights_changed(self) -> None:
        """Free all graphs if they are of other weights than the present ones."""
        weights = tuple((parameter.data_ptr(), parameter._version) for parameter in self.parameters)
        if weights != self._weights:
            self.release()
        self._weights = weights

    def get(self, index: int, build: Callable[[], Linearization]) -> Linearization:
        """The kept linearization of micro-batch `index`, or a new one, which is kept if there is room."""
        if index in self._kept:
            return self._kept[index]
        if self._room is None:
            self._room = KEPT_SHARE * free_bytes(self.parameters[0].device)
        with SavedBytes(self.parameters) as counted:
            built = build()
        taken = counted.num_bytes + built.num_bytes
        if self.keep or (self.keep is None and taken <= self._room):
            self._kept[index] = built
            self._room -= taken
        return built


class SavedBytes:
    """Bytes of the tensors that autograd saves inside the block: what keeping its graph takes.

    Each storage counts once, `others` (the parameters) not at all. Use as a context manager.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self.others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self.storages: dict[int, int] = {}
        self.hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would close a cycle that nothing frees; torch puts its graph back

    def __enter__(self) -> Self:
        self.hooks.__enter__()
        return self

    def __exit__(self, *caught: object) -> None:
        self.hooks.__exit__(*caught)

    @property
    def num_bytes(self) -> int:
        """So far."""
        return sum(size for place, size in self.storages.items() if place not in self.others)
