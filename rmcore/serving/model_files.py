"""Which files of a plain Hugging Face folder make the model, and their digest.

Weights are what both readers agree on: vLLM takes every tensor of every file that the index names, transformers takes
`model.safetensors` first and the index only where there is none. A folder that they would read differently is refused.
"""

import hashlib
import json
from pathlib import Path

from rmcore.core.errors import ModelError
from rmcore.core.files import file_digest
from rmcore.models.seal import TEXT_FILES
from rmcore.models.weight_index import INDEX_FILE, read_index

WHOLE_FILE = "model.safetensors"


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files in `folder` that make the model, sorted.

    Raises:
        ModelError: there are none, the index is damaged or names files outside the folder, or transformers and vLLM
            would read other ones.
    """
    listed, whole = read_index(folder), (folder / WHOLE_FILE).is_file()
    if listed is not None:
        files = sorted(set(listed.values()))
        if whole and files != [WHOLE_FILE]:
            raise ModelError(
                f"{folder} has both {WHOLE_FILE} and an index of other files: transformers would load the one and vLLM "
                "the other. Delete what belongs to an older model."
            )
        return files
    if whole:
        return [WHOLE_FILE]
    if any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{folder} has safetensors files but neither {WHOLE_FILE} nor {INDEX_FILE}, so it is not known which of "
            "them make the model; save it again with save_pretrained."
        )
    if any(folder.glob("*.bin")):
        raise ModelError(
            f"{folder} has its weights in .bin files, which can run code when they are read; load the model once and "
            "save it with save_pretrained, which writes safetensors."
        )
    raise ModelError(f"{folder} has no {WHOLE_FILE} and no {INDEX_FILE}; name the folder of a saved model.")


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


def folder_digest(folder: Path) -> str:
    """sha256 in 64 hex digits over the sorted (name, sha256) of the files that make the model.

    Every byte of the weights is read. Other files of the folder (logs, optimizer states, a README) do not count.

    Raises:
        ModelError: see `text_files` and `weight_files`.
    """
    weights = weight_files(folder)
    index = [] if weights == [WHOLE_FILE] else [INDEX_FILE]
    pairs = [[name, file_digest(folder / name)] for name in sorted([*text_files(folder), *weights, *index])]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
