"""The index of a model that is saved in several files: it says which of them has which tensor, and is not trusted."""

import json
from pathlib import Path

from rmcore.core.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"


def read_index(folder: Path) -> dict[str, str] | None:
    """{tensor: file} of the index; None where there is none.

    Raises:
        ModelError: it is damaged, or names a file that does not lie directly in `folder`: a path, or a link out of it.
            Links of the hub's cache, from a snapshot to the blobs beside it, are its way of storing files and stay.
    """
    path = folder / INDEX_FILE
    if not path.exists():
        return None
    try:
        listed = json.loads(path.read_bytes())["weight_map"]
        if not all(isinstance(file, str) for file in listed.values()) or not listed:
            raise TypeError("weight_map does not map names to files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({error!r}); save or download the model again.") from error
    for file in set(listed.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{path} names {file!r}, which is no safetensors file directly in its folder; such an index cannot be "
                "trusted. Save the model again with save_pretrained."
            )
        if not _lies_in(folder.resolve(), (folder / file).resolve()):
            raise ModelError(
                f"{folder / file}, which the index names, is a link to {(folder / file).resolve()}, outside the "
                "model's folder; such a folder cannot be trusted. Put the file itself there, if the weights are yours."
            )
    return dict(listed)


def _lies_in(folder: Path, file: Path) -> bool:
    if folder in file.parents:
        return True
    return folder.parent.name == "snapshots" and folder.parent.parent / "blobs" in file.parents
