"""Which files of a plain Hugging Face folder make the model, their digest, and their tensors, known from headers alone.

Weights are what both readers agree on: vLLM takes every tensor of every file that the index names, transformers takes
`model.safetensors` first and the index only where there is none. A folder that they would read differently is refused.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rmcore.core.errors import ModelError
from rmcore.core.files import file_digest
from rmcore.models.seal import TEXT_FILES
from rmcore.models.weight_files import INDEX_FILE, WEIGHTS_FILE, read_header, read_index

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
            held = read_header(folder / file)
            if odd := sorted({one.dtype for one in held.values()} - DTYPES.keys()):
                raise ModelError(
                    f"{folder / file} holds tensors of type {', '.join(odd)}; types that can be served: "
                    f"{', '.join(DTYPES)}."
                )
            for name, one in held.items():
                if name in tensors:
                    raise ModelError(
                        f"{folder} holds {name} twice, in {tensors[name].file} and in {file}, so which one is served "
                        "would be chance; save the model again with save_pretrained into an empty folder."
                    )
                tensors[name] = TensorSpec(one.shape, one.dtype, file)
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


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files in `folder` that make the model, sorted.

    Raises:
        ModelError: there are none, the index is damaged or names files outside the folder, or transformers and vLLM
            would read other ones.
    """
    listed, whole = read_index(folder), (folder / WEIGHTS_FILE).is_file()
    if listed is not None:
        files = sorted(set(listed.values()))
        if whole and files != [WEIGHTS_FILE]:
            raise ModelError(
                f"{folder} has both {WEIGHTS_FILE} and an index of other files: transformers would load the one and "
                "vLLM the other. Delete what belongs to an older model."
            )
        return files
    if whole:
        return [WEIGHTS_FILE]
    bins = ", only .bin files, which can run code when they are read" if any(folder.glob("*.bin")) else ""
    raise ModelError(
        f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{bins}: name the folder of a saved model, or load the "
        "model once and save it with save_pretrained, which writes safetensors."
    )


def text_files(folder: Path) -> list[str]:
    """Names of the files in `folder` that make the model, next to its weights, sorted.

    Raises:
        ModelError: config.json is not among them.
    """
    # Python files are the model's own code, of architectures that transformers does not have.
    found = sorted(
        path.name for path in folder.iterdir() if (path.name in TEXT_FILES or path.suffix == ".py") and path.is_file()
    )
    if "config.json" not in found:
        raise ModelError(f"{folder} has no config.json, so it is no Hugging Face model; name a saved model's folder.")
    return found


def model_files(folder: Path) -> list[str]:
    """Names of all files that make the model, sorted: weights, their index where there are several, and texts.

    Raises:
        ModelError: see `text_files` and `weight_files`.
    """
    weights = weight_files(folder)
    index = [] if weights == [WEIGHTS_FILE] else [INDEX_FILE]
    return sorted([*text_files(folder), *weights, *index])


def folder_digest(folder: Path) -> str:
    """sha256 in 64 hex digits over the (name, sha256) of `model_files`.

    Every byte of the weights is read. Other files of the folder (logs, optimizer states, a README) do not count.

    Raises:
        ModelError: see `model_files`.
    """
    pairs = [[name, file_digest(folder / name)] for name in model_files(folder)]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def write_index(folder: Path, files: Iterable[str]) -> None:
    """Write the index of a folder's safetensors files."""
    places = {name: file for file in files for name in read_header(folder / file)}
    index = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def some_names(names: Collection[str]) -> str:
    """Up to five names, sorted, and how many more there are: for error messages."""
    first = sorted(names)[:5]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
