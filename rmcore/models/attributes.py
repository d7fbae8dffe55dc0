"""A reward head of several attributes, whose weighted sum is the reward.

While such a model is trained its last linear layer says A numbers of an answer, one an attribute, and before them the
reward, sum_a c_a o_a. Being linear, that sum is one row of weights: a checkpoint is a plain reward model with one
label, for transformers, PEFT and vLLM alike, and the attributes' rows are in a folder next to it (`attributes/`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from rmcore.core.errors import ModelError
from rmcore.core.files import write_json
from rmcore.models.lora import ADAPTER_FOLDER
from rmcore.models.precision import reward_heads
from rmcore.models.seal import check_seal, write_seal

FOLDER = "attributes"
WEIGHTS_FILE, RECORD_FILE = "heads.safetensors", "attributes.json"


class AttributeHead(nn.Module):
    """The last linear layer of a head, with a row for each of A attributes.

    Args:
        linear: the layer with one row. An attribute that alone has a weight begins as that row, so that the reward is
            what it was; the others are drawn, each its own, of the same size: copies would stay alike.
        combination: (A,) weights c of the attributes in the reward.
    """

    combination: Tensor
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, combination: Sequence[float]) -> None:
        super().__init__()
        weights = linear.weight.new_tensor(list(combination))
        row = linear.weight.detach()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(len(weights), row.shape[1], generator=generator) * float(row.std())
        first = drawn.to(row)
        if int((weights != 0).sum()) == 1:
            first[weights != 0] = row
        # With adapters the original is frozen, and its copy is not.
        self.weight = nn.Parameter(first, requires_grad=linear.weight.requires_grad)  # (A, H)
        bias = None
        if linear.bias is not None:
            bias = nn.Parameter(linear.bias.detach().repeat(len(weights)), requires_grad=linear.bias.requires_grad)
        self.register_parameter("bias", bias)
        self.register_buffer("combination", weights)

    def forward(self, features: Tensor) -> Tensor:
        """Turn (..., H) features into (..., 1 + A): the reward, then the attributes."""
        outputs = functional.linear(features, self.weight, self.bias)
        return torch.cat([(outputs @ self.combination)[..., None], outputs], dim=-1)


def add_attributes(model: nn.Module, combination: Sequence[float]) -> None:
    """Put an `AttributeHead` in the place of the last linear layer of the reward head, in place.

    With adapters on the model this changes the copy of the head that is trained with them, and the original.

    Raises:
        ModelError: the head has no linear layer with one output.
    """
    places = [
        (parent, name, child)
        for head_name, head in reward_heads(model).items()
        for parent, name, child in _linear_layers(model, head_name, head)
    ]
    if not places:
        raise ModelError(
            f"{type(model).__name__} has no linear layer with one output in its reward head, so attributes cannot be "
            "added to it; train on one attribute, or on pairs."
        )
    for parent, name, child in places:
        setattr(parent, name, AttributeHead(child, combination).to(child.weight.device))


def _linear_layers(model: nn.Module, name: str, head: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Each linear layer with one output in a head, with the module that holds it."""
    holders = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])] if name else []
    inside = [(module, child) for module in head.modules() for child, _ in module.named_children()]
    found = [(parent, child, getattr(parent, child)) for parent, child in holders + inside]
    return [
        (parent, child, one) for parent, child, one in found if isinstance(one, nn.Linear) and one.out_features == 1
    ]


def heads_of(state: Mapping[str, Tensor]) -> list[str]:
    """The names under which a state holds an `AttributeHead`, with their dots."""
    return [name.removesuffix("combination") for name in state if name.endswith(".combination")]


def folded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same state with every attribute head as the linear layer of one row that gives its reward."""
    plain = dict(state)
    for prefix in heads_of(state):
        combination = plain.pop(f"{prefix}combination").double()  # (A,)
        weight = plain[f"{prefix}weight"]  # (A, H)
        plain[f"{prefix}weight"] = (combination @ weight.double())[None].to(weight.dtype)
        bias = plain.get(f"{prefix}bias")
        if bias is not None:
            plain[f"{prefix}bias"] = (combination @ bias.double())[None].to(bias.dtype)
    return plain


def _attribute_heads(model: nn.Module) -> list[tuple[nn.Module, str, AttributeHead]]:
    """Each attribute head, with the module that holds it and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, AttributeHead)
    ]


@contextmanager
def plain_heads(model: nn.Module) -> Iterator[None]:
    """Inside the block every attribute head is a linear layer of one row, of no meaning: PEFT saves what it sees."""
    found = _attribute_heads(model)
    for parent, name, child in found:
        setattr(parent, name, nn.Linear(child.weight.shape[1], 1, bias=child.bias is not None, device="meta"))
    try:
        yield
    finally:
        for parent, name, child in found:
            setattr(parent, name, child)


def save_attributes(state: Mapping[str, Tensor], names: Sequence[str], folder: Path) -> None:
    """Write the rows of the attributes of a state, with their names and weights, into `folder/attributes`."""
    prefix = heads_of(state)[-1]  # with adapters: the original, then the copy that is trained
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    parts = ("weight", "bias", "combination")
    tensors = {part: state[prefix + part].detach().cpu().contiguous() for part in parts if prefix + part in state}
    save_file(tensors, place / WEIGHTS_FILE, metadata={"format": "pt"})
    weights = dict(zip(names, tensors["combination"].tolist(), strict=True))
    write_json(place / RECORD_FILE, {"reward_is_sum_of": weights})
    write_seal(place)


def attributes_folder(checkpoint: Path) -> Path:
    """Where the attributes of a checkpoint are; those of an adapter are next to the merged model above it."""
    own = checkpoint / FOLDER
    return own if own.is_dir() or checkpoint.name != ADAPTER_FOLDER else checkpoint.parent / FOLDER


def read_attributes(folder: Path) -> dict[str, float] | None:
    """Weights of the attributes in the reward of the checkpoint in `folder`, by name; None where it has none.

    Raises:
        ModelError: the record is damaged.
    """
    path = attributes_folder(folder) / RECORD_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())["reward_is_sum_of"]
        return {str(name): float(weight) for name, weight in record.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{path} is damaged ({error}): restore it from the folder the model was trained into."
        ) from error


def load_attributes(model: nn.Module, folder: Path) -> dict[str, float]:
    """Put the attributes of the checkpoint in `folder` on its loaded model; their weights in the reward, by name.

    Raises:
        ModelError: the checkpoint has none, or they do not fit the model.
    """
    weights = read_attributes(folder)
    if weights is None:
        raise ModelError(f"{folder} has no attributes: it was trained on pairs, rankings or one grade.")
    check_seal(attributes_folder(folder))
    add_attributes(model, list(weights.values()))
    tensors = load_file(attributes_folder(folder) / WEIGHTS_FILE)
    try:
        for _, _, head in _attribute_heads(model):
            head.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"{folder / FOLDER} does not fit the model next to it ({error}); restore both.") from error
    return weights
