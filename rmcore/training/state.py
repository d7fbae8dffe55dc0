"""The tensors of a resumable state: collected, written and put back, bit for bit.

Everything is stored by parameter name, as safetensors, so that a state can hold numbers and nothing else. Of several
processes each writes the slices that it holds (torch's distributed checkpoint), so that none ever has the whole; any
number of processes can resume from it.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rmcore.config.train import TrainConfig
from rmcore.core.errors import StoreError, TrainingError
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized import TokenizedPairs
from rmcore.data.tokenized_observations import TokenizedObservation, TokenizedObservations
from rmcore.training.optimizers import NamedState, OptimizerSet
from rmcore.training.ranks import Ranks
from rmcore.training.resume import is_of_a_worker

RandomState = dict[str, Tensor]
MODEL, OPTIMIZER, RANDOM, BEST_REWARDS = "model.", "optimizer.", "random.", "best_rewards"
"""Beginnings of the names in a state, and its one other name."""
FILE_BYTES = 128 * 2**20
"""Size of a file, about: several processes hold one in memory twice more while they write it, one process once where
its tensors are on a GPU."""


def random_state(device: torch.device) -> RandomState:
    """The state of torch's generators that training draws from (dropout)."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put `random_state` back."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int, ranks: Ranks) -> None:
    """Seed dropout: a different stream on every rank, because each sees other pairs."""
    torch.manual_seed(seed + 1_000_003 * ranks.rank)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """List what training changes, by name: trained parameters and saved buffers. Frozen weights are the base's."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # tied ones under every name
    others = {name: value for name, value in model.state_dict().items() if name not in parameters}
    return trained | {name: value for name, value in others.items() if isinstance(value, Tensor)}


def collect_state(
    model: nn.Module, optimizer: OptimizerSet, random_states: list[RandomState], best_rewards: np.ndarray
) -> dict[str, Tensor]:
    """Everything with tensors in it, by name: the live ones, sharded where they are. Random states are by rank."""
    return {
        **{MODEL + name: tensor.detach() for name, tensor in trained_tensors(model).items()},
        **{
            f"{OPTIMIZER}{name}.{key}": value
            for name, values in optimizer.named_state().items()
            for key, value in values.items()
        },
        **{
            f"{RANDOM}{rank}.{kind}": value for rank, state in enumerate(random_states) for kind, value in state.items()
        },
        BEST_REWARDS: torch.from_numpy(best_rewards.copy()),
    }


def write_alone(tensors: Mapping[str, Tensor], folder: Path) -> Iterator[tuple[str, str]]:
    """Write what `collect_state` gave in one process, and yield the name of each file with the sha256 of its bytes.

    The digest is that of the tensors in memory, so the file is not read for it, and is checked by it as it is resumed.

    Raises:
        OSError, SafetensorError: a file could not be written.
    """
    numbers = number_files(tensors, 1)
    for number in sorted(set(numbers.values())):
        file = folder / f"tensors-{number:05d}.safetensors"
        held = {name: tensors[name].cpu().contiguous() for name, own in numbers.items() if own == number}
        save_file(held, file)
        file.chmod(0o600)
        with file.open("rb") as stream:  # eight bytes with the header's size, the header, the tensors in its order
            size = stream.read(8)
            header = stream.read(int.from_bytes(size, "little"))
        hashed, places = hashlib.sha256(size + header), json.loads(header)
        for name in sorted(held, key=lambda name: places[name]["data_offsets"]):
            hashed.update(held[name].view(-1).view(torch.uint8).numpy().data)
        yield file.name, hashed.hexdigest()


def write_together(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write this rank's part of what `collect_state` gave into `folder`; all ranks must call it.

    Where one fails, all do.

    Raises:
        StoreError: a part could not be written.
    """
    # The library gives a plain tensor that is not contiguous to safetensors, which refuses it.
    plain = {name: value.contiguous() for name, value in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), number_files(plain, ranks.world), save_distributed=True)
    with _checkpoint_errors():
        dcp.save(plain, storage_writer=writer, process_group=ranks.patient)
    if ranks.is_main:  # it gives the folder its name afterwards, for which it does not wait for the others
        for file in folder.glob("*.safetensors"):
            file.chmod(0o600)


def number_files(tensors: Mapping[str, Tensor], world: int) -> dict[str, int]:
    """Number the file of each tensor, from 1, so that none holds much more than `FILE_BYTES` of one process."""
    numbers, written = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + written // FILE_BYTES
        written += tensor.nbytes // world
    return numbers


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    """Raise what a process tripped over in place of the library's collection of them, which is no `Exception`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        first: BaseException = next(iter(error.failures.values()))[0]
        known = isinstance(first, OSError | RuntimeError | ValueError | AssertionError | SafetensorError)
        if not known or is_of_a_worker(first):
            raise first from error
        raise StoreError(
            f"a part of a resumable state could not be written or read ({first}), most often because the disk is full; "
            "the states before it are untouched. Free space and run again."
        ) from error


def load_state(folder: Path, model: nn.Module, optimizer: OptimizerSet) -> tuple[list[RandomState], np.ndarray]:
    """Put weights and optimizer back, bit for bit: each rank reads the slices that it holds, of whatever were written.

    Returns:
        The random state of each rank that there was, and the (P, 2) rewards under the best weights.

    Raises:
        TrainingError: the state has other tensors than the model.
        StoreError: it cannot be read.
    """
    try:
        listed: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise StoreError(f"{folder} holds no state that can be read ({error}); remove it.") from error
    held: dict[str, TensorStorageMetadata] = listed  # of such files all are tensors
    weights = {MODEL + name: tensor.detach() for name, tensor in trained_tensors(model).items()}
    differing = sorted(weights.keys() ^ {name for name in held if name.startswith(MODEL)})
    differing += sorted(name for name, tensor in weights.items() if name in held and held[name].size != tensor.shape)
    if differing:
        raise TrainingError(
            f"the resumable state and the model differ in {len(differing)} tensors, first {differing[:3]}; it belongs "
            "to another model or library version. Start again in another folder."
        )
    optimizer.load_named_state(_room(held, optimizer))
    others = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in held.items()
        if name.startswith(RANDOM) or name == BEST_REWARDS
    }
    targets = collect_state(model, optimizer, [], np.zeros(0)) | others
    with _checkpoint_errors():
        dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    randoms: list[RandomState] = [{} for name in others if name.startswith(RANDOM) and name.endswith(".cpu")]
    for name, value in others.items():
        if name != BEST_REWARDS:
            rank, kind = name.removeprefix(RANDOM).split(".")
            randoms[int(rank)][kind] = value
    rewards: np.ndarray = others[BEST_REWARDS].numpy()
    return randoms, rewards


def _room(held: Mapping[str, TensorStorageMetadata], optimizer: OptimizerSet) -> NamedState:
    """Tensors for what is held of the optimizer, without content; like their parameters, where the shape is theirs."""
    room: NamedState = {name: {} for name in optimizer.parameters}
    for full, one in held.items():
        if not full.startswith(OPTIMIZER):
            continue
        name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
        like, dtype = optimizer.parameters.get(name), one.properties.dtype
        if like is None or key == "step" or one.size != like.shape:
            value = torch.empty(one.size, dtype=dtype, device=None if like is None else like.device)
        else:
            value = torch.empty_like(like, dtype=dtype, requires_grad=False)
        room.setdefault(name, {})[key] = value
    return room


def training_settings(
    config: TrainConfig,
    seed: int,
    train: Sequence[TokenizedPair] | Sequence[TokenizedObservation],
    validation: Sequence[TokenizedPair],
) -> dict[str, Any]:
    """List what a state must share with the training that resumes from it, by dotted name."""
    fields = config.model_dump(mode="json", exclude={*config.run_only()})
    return {
        **{f"train.{name}": value for name, value in fields.items()},
        "seed": seed,
        "pairs.train": _digest(train),
        "pairs.validation": _digest(validation),
    }


def _digest(pairs: Sequence[TokenizedPair] | Sequence[TokenizedObservation]) -> str:
    if isinstance(pairs, TokenizedObservations):
        hashed = hashlib.sha256()
        for line in pairs.digest_lines():
            hashed.update(line)
        return f"{len(pairs)} observations, {hashed.hexdigest()[:12]}"
    if isinstance(pairs, TokenizedPairs):
        return f"{len(pairs)} pairs, {pairs.digest()[:12]}"
    digest = hashlib.sha256()
    for pair in pairs:
        if isinstance(pair, TokenizedObservation):
            digest.update(repr(pair).encode())
            continue
        digest.update(f"{pair.pair_id} {pair.chosen.ids} {pair.rejected.ids} {pair.target_margin}\n".encode())
    return f"{len(pairs)} pairs, {digest.hexdigest()[:12]}"
