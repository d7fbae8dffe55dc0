"""Contents of a model's safetensors files, known from their headers alone: 100 GB are described in milliseconds."""

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rmcore.core.errors import ModelError
from rmcore.models.weight_index import INDEX_FILE, read_index
from rmcore.serving.model_files import weight_files

CHUNK_BYTES = 16 << 20
"""Held in memory while tensors are copied from file to file."""
CHUNK_VALUES = 4 << 20
"""Looked at together when values are checked, so that no mask of a whole embedding is made."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Safetensors' words for types; a header with another one is refused."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a folder."""

    shape: tuple[int, ...]
    dtype: str
    """Safetensors' word, a key of `DTYPES`."""
    file: str
    """Name of its file inside the folder."""

    @property
    def num_bytes(self) -> int:
        """Bytes that its values take on disk."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class WeightHeader:
    """The header of one safetensors file."""

    tensors: Mapping[str, TensorSpec]
    """By name, in the order of their bytes."""
    ranges: Mapping[str, tuple[int, int]]
    """Where each begins and ends in the file, in bytes."""
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Every tensor of a served folder: name, shape, type and file. An update must fit it exactly."""

    tensors: Mapping[str, TensorSpec]

    @classmethod
    def read(cls, folder: Path) -> "WeightLayout":
        """Read the headers of a plain Hugging Face folder.

        Raises:
            ModelError: there are no safetensors, a file is cut short or damaged, a name is in two files, the index
                names what is not there or is outside the folder, or transformers and vLLM would read other files.
        """
        listed = read_index(folder)
        tensors: dict[str, TensorSpec] = {}
        for file in weight_files(folder):
            for name, spec in read_header(folder / file).tensors.items():
                if name in tensors:
                    raise ModelError(
                        f"{folder} holds {name} twice, in {tensors[name].file} and in {file}, so which one is served "
                        "would be chance; save the model again with save_pretrained into an empty folder."
                    )
                tensors[name] = spec
        astray = [name for name, file in (listed or {}).items() if name not in tensors or tensors[name].file != file]
        if astray:
            raise ModelError(
                f"{folder / INDEX_FILE} names {some_names(astray)}, which its files do not hold there: the folder is "
                "not whole; save or download the model again."
            )
        if not tensors:
            raise ModelError(f"{folder} holds no tensors at all; save the model again.")
        return cls(tensors)

    @property
    def files(self) -> list[str]:
        """Names of the safetensors files, sorted."""
        return sorted({spec.file for spec in self.tensors.values()})

    def names(self, file: str) -> set[str]:
        """Names of the tensors in one of the files."""
        return {name for name, spec in self.tensors.items() if spec.file == file}


def read_header(path: Path) -> WeightHeader:
    """Read what a safetensors file holds, without its values.

    Raises:
        ModelError: it is absent, cut short or damaged, or has a type that is not in `DTYPES`.
    """
    try:
        # The library is the judge: ranges that fit the shapes, and a file exactly as long as its header says. Not as
        # "pt": torch would map the file so that the kernel sets memory aside for all of it.
        with safe_open(path, framework="np"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} cannot be read as safetensors ({error}): it is absent, cut short or damaged; copy or save it "
            "again."
        ) from error
    metadata = header.pop("__metadata__", {})
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    odd = sorted({entry["dtype"] for entry in header.values()} - DTYPES.keys())
    if odd:
        raise ModelError(
            f"{path} holds tensors of type {', '.join(odd)}; types that can be served: {', '.join(DTYPES)}."
        )
    return WeightHeader(
        {name: TensorSpec(tuple(entry["shape"]), entry["dtype"], path.name) for name, entry in entries},
        {
            name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
            for name, entry in entries
        },
        metadata,
    )


def copy_without(source: Path, target: Path, names: Collection[str]) -> None:
    """Write `source` to `target` without some tensors, holding `CHUNK_BYTES` at a time.

    Raises:
        ModelError: `source` cannot be read.
        OSError: `target` cannot be written.
    """
    header = read_header(source)
    kept = [name for name in header.tensors if name not in names]
    entries: dict[str, Any] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
    position = 0
    for name in kept:
        spec, (start, end) = header.tensors[name], header.ranges[name]
        offsets = [position, position + end - start]
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of eight bytes
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(struct.pack("<Q", len(text)) + text)
        for name in kept:
            _copy_range(reader, writer, *header.ranges[name])


def _copy_range(reader: BinaryIO, writer: BinaryIO, start: int, end: int) -> None:
    reader.seek(start)
    while start < end:
        chunk = reader.read(min(CHUNK_BYTES, end - start))
        if not chunk:
            raise ModelError(
                f"{reader.name} became shorter while it was read; nobody may write to it. Restore the file."
            )
        start += writer.write(chunk)


def write_index(folder: Path, files: Iterable[str]) -> None:
    """Write the index of a folder's safetensors files, as save_pretrained does."""
    specs = {name: spec for file in files for name, spec in read_header(folder / file).tensors.items()}
    index = {
        "metadata": {"total_size": sum(spec.num_bytes for spec in specs.values())},
        "weight_map": {name: specs[name].file for name in sorted(specs)},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; true of whole numbers."""
    if not tensor.is_floating_point():
        return True
    # There is no isfinite for 8-bit types.
    chunks = (chunk.float() if chunk.element_size() == 1 else chunk for chunk in tensor.reshape(-1).split(CHUNK_VALUES))
    return all(bool(torch.isfinite(chunk).all()) for chunk in chunks)


def some_names(names: Collection[str]) -> str:
    """Up to five names, sorted, and how many more there are: for error messages."""
    first = sorted(names)[:5]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
