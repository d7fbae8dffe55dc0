"""Which tensors a model's files hold: the index of several files, which is not trusted, and the headers of each."""

import json
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from rmcore.core.errors import ModelError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Held(NamedTuple):
    """A tensor as the header of its file describes it."""

    dtype: str
    """Safetensors' word."""
    shape: tuple[int, ...]


def read_index(folder: Path) -> dict[str, str] | None:
    """{tensor: file} of the index; None where there is none.

    Raises:
        ModelError: it is damaged, or names a file that does not lie directly in `folder`: a path, or a link out of it.
            Links of the hub's cache, from a snapshot to the blobs next to it, are its way of storing files and stay.
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


def read_tensors(folder: Path) -> dict[str, Held]:
    """Describe the tensors of a model's folder by the headers of its files; {} where it has no safetensors.

    Raises:
        ModelError: the index or a file is damaged.
    """
    whole = (folder / WEIGHTS_FILE).is_file()  # which the library takes where there is an index, too
    files = [WEIGHTS_FILE] if whole else sorted(set((read_index(folder) or {}).values()))
    found: dict[str, Held] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    held = opened.get_slice(name)
                    found[name] = Held(held.get_dtype(), tuple(held.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{folder / file} cannot be read as safetensors ({error}): it is absent, cut short or damaged; copy or "
                "save it again."
            ) from error
    return found


def _lies_in(folder: Path, file: Path) -> bool:
    if folder in file.parents:
        return True
    return folder.parent.name == "snapshots" and folder.parent.parent / "blobs" in file.parents
