"""Records of a checkpoint next to its weights: the scale of its margins, and the seal of all that decides its rewards.

Rewards alone do not say how sure a model is: one that was trained with beta = 0.25 has margins four times as wide as
one with beta = 1 that gives the same probabilities, P(first preferred) = sigmoid(beta * margin). So a checkpoint
records its beta (`rm_preference.json`). One without the record, trained elsewhere, has beta 1.

The seal is the digest of each file that decides rewards, in one file. A flipped bit, an exchanged tensor or an edited
template changes rewards without a trace, so every loader of a reward model compares a sealed folder with its seal
first. It depends on the content of the files alone: folders are copied, moved, linked and downloaded. Small files are
digested each time. Weights are digested where their size and modification time are not those of an earlier digest
(`known_digests`), so that 14 GB cost one reading on a machine. A folder without a seal, from elsewhere, is loaded as it
is.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from rmcore.core.errors import ModelError
from rmcore.core.files import file_digest, known_digests, write_text
from rmcore.core.manifests import is_whole, with_self_digest

PREFERENCE_FILE = "rm_preference.json"
SEAL_FILE = "rm_seal.json"
TEXT_FILES = frozenset(
    [
        *("config.json", "generation_config.json", "rm_rendering.json", "chat_template.jinja", "chat_template.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
        *("tiktoken.model", "qwen.tiktoken", "bpe.codes", "byte_maps.json", "dict.txt", "emoji.json", "merges.txt"),
        *("entity_vocab.json", "normalizer.json", "prophetnet.tokenizer", "sentencepiece.bpe.model", "spiece.model"),
        *("sentencepiece.model", "source.spm", "spm.model", "spm_char.model", "target.spm", "target_vocab.json"),
        *("tokenizer.model", "vocab-src.json", "vocab-tgt.json", "vocab.json", "vocab.txt", "word_shape.json"),
        *("word_pronunciation.json", PREFERENCE_FILE),
    ]
)
"""Files that make a model besides its weights: configuration, rendering, the scale of its margins, and every vocabulary
file that a tokenizer of transformers 5.23 names. Left out on purpose is `modules.json`, from which vLLM would take
another pooling."""
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
"""Where transformers looks for further chat templates, such as one for dialogues with tools."""
WEIGHTS_ENDING = ".safetensors"
MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".py")
"""Suffixes of a checkpoint's files that count in its digest: weights, configuration, tokenizer, rendering."""
OTHER_RECORDS = frozenset(["adapter_config.json", "attributes.json"])
"""Further records that are sealed. `rm_base.json` of an adapter is not: it names a place, which its user may correct,
and a fingerprint, which the base is compared with."""


def checked_beta(value: Any, source: str) -> float:
    """`value` as a beta.

    Args:
        value: what was given or read.
        source: where it is, for the message.

    Raises:
        ModelError: it is no finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ModelError(
            f"{source} says beta={value!r}, and the scale of a margin is a finite number above 0: without it no reward "
            "is a probability. Write the train.beta that the model was trained with (1.0 unless it was set)."
        )
    return float(value)


def read_beta(folder: Path) -> float:
    """The beta of the checkpoint in `folder`; 1.0 where it has no record.

    Raises:
        ModelError: the record is damaged, or its beta is no finite number above 0.
    """
    path = folder / PREFERENCE_FILE
    if not path.is_file():
        return 1.0
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or record.keys() != {"beta"}:
            raise ValueError("it holds something else than beta")
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is damaged ({error}), so it is not known which probability a margin of this model means; restore "
            "it from the folder the model was trained into."
        ) from error
    return checked_beta(record["beta"], str(path))


def write_beta(folder: Path, beta: float) -> None:
    """Write the record into a checkpoint folder."""
    (folder / PREFERENCE_FILE).write_text(json.dumps({"beta": beta}) + "\n")


def decides(name: str) -> bool:
    """Whether a file of that name in the folder of a checkpoint decides its rewards; no loader reads hidden ones."""
    if name.startswith("."):
        return False
    return name in TEXT_FILES | OTHER_RECORDS or name.endswith((WEIGHTS_ENDING, f"{WEIGHTS_ENDING}.index.json", ".py"))


def write_seal(folder: Path) -> None:
    """Seal the files in `folder` as they are now: whatever writes a checkpoint, or changes one, calls this last."""
    files = {
        name: {"sha256": file_digest(folder / name), "size": (folder / name).stat().st_size}
        for name in _deciding(folder)
    }
    write_text(folder / SEAL_FILE, json.dumps(with_self_digest({"files": files}), indent=1) + "\n", durable=False)


def sealed_files(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Read the seal: {name: {"sha256", "size"}}; None where the folder has none.

    Raises:
        ModelError: the seal is damaged.
    """
    path = folder / SEAL_FILE
    if not path.exists() and not path.is_symlink():
        return None
    try:
        seal = json.loads(path.read_text(encoding="utf-8"))
        if not is_whole(seal) or not all(isinstance(one["sha256"], str) for one in seal["files"].values()):
            raise ValueError("it is not what was written")
        return dict(seal["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _refused(folder, SEAL_FILE, f"is damaged ({error})") from error


def check_seal(folder: Path, *, texts_only: bool = False) -> None:
    """Compare the files of a checkpoint with its seal, where it has one.

    Args:
        folder: of the checkpoint.
        texts_only: leave the weights out, where only the tokenizer and the rendering are read.

    Raises:
        ModelError: a file was changed, removed or added since the checkpoint was written, or the seal is damaged.
    """
    files = sealed_files(folder)
    if files is None:
        return
    # Code that was added is not run: config.json, which is sealed, names none of it.
    there = {name for name in _deciding(folder) if name in files or not name.endswith(".py")}
    looked_at = [name for name in sorted(there | files.keys()) if not (texts_only and name.endswith(WEIGHTS_ENDING))]
    for name in looked_at:
        if name not in there:
            raise _refused(folder, name, f"is not there, and the seal ({SEAL_FILE}) names it")
        if name not in files:
            raise _refused(folder, name, f"is not in the seal ({SEAL_FILE}): it was added later")
        size = (folder / name).stat().st_size
        if size != files[name]["size"]:
            raise _refused(folder, name, f"has {size} bytes, and its seal ({SEAL_FILE}) says {files[name]['size']}")
    for name, digest in zip(looked_at, known_digests([folder / name for name in looked_at]), strict=True):
        if digest != files[name]["sha256"]:
            said = files[name]["sha256"]
            raise _refused(folder, name, f"has sha256 {digest[:12]}, and its seal ({SEAL_FILE}) says {said[:12]}")


def checkpoint_digest(folder: Path) -> str:
    """sha256, in 64 hex digits, over the sorted (name, sha256) of the files in a folder that decide its rewards."""
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and path.suffix in MODEL_SUFFIXES and path.name != SEAL_FILE
    )
    listed = json.dumps([[path.name, digest] for path, digest in zip(files, known_digests(files), strict=True)])
    return hashlib.sha256(listed.encode()).hexdigest()


def _deciding(folder: Path) -> list[str]:
    """Paths of the files that decide, from `folder` on: those in it, and further chat templates."""
    names = [path.name for path in folder.iterdir() if decides(path.name) and path.is_file()]
    return sorted([*names, *(path.relative_to(folder).as_posix() for path in folder.glob(MORE_TEMPLATES))])


def _refused(folder: Path, name: str, what: str) -> ModelError:
    return ModelError(
        f"{folder / name} {what}, so the checkpoint is not what was written, and its rewards would be those of another "
        f"model. Restore that file, or copy or download the folder again. If the change is meant, remove {SEAL_FILE}: "
        "the folder is then loaded like any Hugging Face folder, and `rm-opt export` writes it with a new seal."
    )
