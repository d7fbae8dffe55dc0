"""Checkpoints of a small reward model with one file changed: refused, or the same rewards as before."""

import json
import random
import shutil
import struct
from functools import cache
from pathlib import Path

from data_files import SilentDifference, flipped, refused

DEFAULT_COUNT = 200
QUESTIONS = ("What is tea?", "Name a river.", "2 + 2?", "Write a poem about rain.")
ANSWERS = ("A drink made of leaves.", "The Rhine, in Europe.", "4", "I do not know, sorry.")
TOLERANCE = 1e-6


@cache
def _whole(scratch: Path) -> tuple[Path, list[float]]:
    """A saved checkpoint and its rewards, made once."""
    import nano_model
    from rmcore.models import tiny
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.training.checkpoint import save_checkpoint

    tiny.tiny_config = nano_model.nano_config
    built = tiny.build_tiny(scratch / "tiny", seed=0)
    save_checkpoint(BradleyTerryRM.from_pretrained(built, device="cpu", max_seq_len=128), scratch / "best")
    return scratch / "best", _rewards(scratch / "best")


def _rewards(folder: Path) -> list[float]:
    from rmcore.models.reward_model import BradleyTerryRM

    return BradleyTerryRM.from_pretrained(folder, device="cpu").score(QUESTIONS, ANSWERS).tolist()


def one(draw: random.Random, place: Path) -> str:
    """Change one file of a copy and score by it; "same" or "refused"."""
    from rmcore.core.errors import RmcoreError

    whole, expected = _whole(place.parent)
    shutil.copytree(whole, place / "best")
    victim = draw.choice(sorted(path for path in (place / "best").rglob("*") if path.is_file()))
    if draw.random() < 0.4:
        victim = next((place / "best").glob("*.safetensors"))
    harm = _change(victim, draw)
    try:
        found = _rewards(place / "best")
    except RmcoreError as error:
        return refused(str(error))
    furthest = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    if not furthest <= TOLERANCE:
        raise SilentDifference(f"{harm} of {victim.name}: rewards differ by {furthest:.2g}")
    return "same"


def _change(victim: Path, draw: random.Random) -> str:
    """Change one file in one way; what was done."""
    content = victim.read_bytes()
    harm, spot = (
        draw.choice(("flip", "cut", "delete", "empty", "edit", "edit", "zero")),
        draw.randrange(len(content) + 1),
    )
    victim.unlink()
    if harm == "delete":
        return harm
    after = {"cut": content[:spot], "empty": b"", "zero": content[:spot] + bytes(400) + content[spot + 400 :]}
    if harm == "edit" and victim.suffix == ".safetensors":
        after["edit"] = _edited_tensors(content, draw)
    elif harm == "edit" and victim.suffix == ".json":
        after["edit"] = json.dumps(_edited(json.loads(content), draw)).encode()
    victim.write_bytes(after[harm] if harm in after else flipped(content, min(spot, len(content) - 1), draw))
    return harm


def _edited(tree, draw: random.Random):
    """A JSON value with one value, name or order changed, at any depth."""
    if isinstance(tree, dict) and tree:
        name = draw.choice(sorted(tree))
        if draw.random() < 0.15:
            return {key: value for key, value in tree.items() if key != name}
        return tree | {name: _edited(tree[name], draw)}
    if isinstance(tree, list) and tree:
        spot = draw.randrange(len(tree))
        if draw.random() < 0.3:
            return tree[spot:] + tree[:spot]
        return [*tree[:spot], _edited(tree[spot], draw), *tree[spot + 1 :]]
    junk = (None, True, 0, 1, -3, 0.5, 10**12, "", "float16", "nothing", [], {})
    return tree + 1 if isinstance(tree, int) and draw.random() < 0.5 else draw.choice(junk)


def _edited_tensors(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file with two names exchanged, or one tensor relabelled, renamed or left out."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    one, other = draw.sample(sorted(header.keys() - {"__metadata__"}), 2)
    edit = draw.choice(("swap", "dtype", "rename", "remove"))
    if edit == "swap":
        header[one], header[other] = header[other], header[one]
    elif edit == "dtype":
        header[one] = header[one] | {"dtype": draw.choice(("I32", "U32", "F16", "BF16", "F64"))}
    elif edit == "rename":
        header[one + "_"] = header.pop(one)
    else:
        del header[one]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body
