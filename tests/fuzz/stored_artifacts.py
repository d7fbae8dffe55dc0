"""Stored artifacts with one damage: reported, never given as valid, and computed again; what is whole stays valid."""

import json
import os
import random
from pathlib import Path

from data_files import SilentDifference, flipped

DEFAULT_COUNT = 100
STAGES = ("prepare", "train", "evaluate")


def one(draw: random.Random, place: Path) -> str:
    """Damage one file of one artifact of a store; "refused" where that is told, "same" where nothing is lost."""
    from rmcore.core.manifests import MANIFEST, TIMES, make_key
    from rmcore.core.store import Store

    def write(stage: str) -> None:
        content = random.Random(stage)  # noqa: S311 - data
        inputs = {"stage": stage, "seed": 7}
        with store.lock(make_key(inputs)), store.publish(stage, stage, inputs, outcome=("*.json", "*.bin")) as out:
            (out / "summary.json").write_text(json.dumps({"metrics": {"eval/accuracy": content.random()}}))
            (out / "weights.bin").write_bytes(content.randbytes(draw.choice((0, 1, 300, 70_000))))
            (out / "figures").mkdir()
            (out / "figures" / "curve.png").write_bytes(content.randbytes(90))

    store, keys = Store(place / "store"), {stage: make_key({"stage": stage, "seed": 7}) for stage in STAGES}
    for stage in STAGES:
        write(stage)
    stage = draw.choice(STAGES)
    folder = store.find(stage, keys[stage])
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    victim = draw.choice(sorted(before))
    stat, kept_time = victim.stat(), draw.random() < 0.3
    harm = _damage(victim, draw)
    if kept_time and victim.is_file() and not victim.is_symlink():
        os.utime(victim, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    now = victim.read_bytes() if victim.is_file() else None
    is_manifest, is_same = victim.name == MANIFEST, now == before[victim]
    is_same = is_same or (
        is_manifest and now is not None and now.strip() == before[victim].strip()
    )  # JSON ends so, too
    is_lost, other, said = not is_same and victim.name != TIMES, Store(place / "store"), f"{harm} of {victim.name}: "
    if draw.random() < 0.5:
        told = {artifact for artifact, damage in other.verify() if damage is not None}
        if told != ({folder} if is_lost else set()):
            raise SilentDifference(f"{said}verify names {[artifact.name for artifact in told]}")
    states = {name: other.status(name, key).state for name, key in keys.items()}
    if {name for name, state in states.items() if state != "valid"} != ({stage} if is_lost else set()):
        raise SilentDifference(f"{said}the artifacts are {states}")
    if is_manifest and is_lost and any(entry.stage == stage for entry in other.entries()):
        raise SilentDifference(f"{said}the artifact is listed")
    if not is_lost:
        return "same"
    other.collect_garbage(keep=9)
    write(stage)
    if other.status(stage, keys[stage]).state != "valid" or any(damage for _, damage in other.verify()):
        raise SilentDifference(f"{said}computed again, the artifact is not valid")
    return "refused"


def _damage(victim: Path, draw: random.Random) -> str:
    """Harm one file in one way; what was done."""
    content = victim.read_bytes()
    harm = draw.choice(("flip", "cut", "append", "delete", "empty", "folder", "link", "swap", "nested", "touch"))
    spot = draw.randrange(max(len(content), 1))
    changed = {
        **{"flip": flipped(content, spot, draw), "cut": content[:spot], "append": content + b" ", "empty": b""},
        **{"nested": b"[" * 100_000, "swap": content[::-1], "touch": content},
    }
    if harm in changed:
        victim.write_bytes(changed[harm])
        return harm
    victim.unlink()
    if harm == "folder":
        victim.mkdir()
    elif harm == "link":
        victim.symlink_to(draw.choice(("/dev/null", "nowhere", victim.name, "..")))
    return harm
