"""The folders that vLLM loads: whole or not there, whatever fails; what a trainer writes is what travels, and a server
takes nothing else.
"""

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from machine import largest_file
from rmcore.core.errors import ModelError, RequestError, ServingError, StoreError
from rmcore.core.files import file_digest
from rmcore.models.seal import PREFERENCE_FILE, read_beta
from rmcore.models.weight_files import INDEX_FILE, WEIGHTS_FILE
from rmcore.serving.server import OWN_FOLDER, ServeSettings, _weights_folder
from rmcore.serving.types import RewardModelTrainingMode as Mode
from rmcore.serving.updates import MANIFEST_FILE, UpdateRef, check_update, drop_left, stage_checkpoint, write_update
from rmcore.serving.weight_files import WeightLayout, folder_digest, write_index

SHAPES = {"embed.weight": (8, 4), "layer.q.weight": (4, 4), "layer.norm": (4,), "steps": (), "score.weight": (1, 4)}
ADAPTED = ["layer.q.weight"]
TRAVELS = {Mode.FULL: set(SHAPES), Mode.HEAD_ONLY: {"score.weight"}, Mode.LORA: {"layer.q.weight", "score.weight"}}


def draw_state(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return state | {"steps": torch.tensor(seed)}


@pytest.fixture
def served(tmp_path):
    """A folder that is served in bfloat16, with its head in float32 next to the norm."""
    folder = tmp_path / "weights" / "served-000001"
    folder.mkdir(parents=True)
    state = draw_state(0, torch.bfloat16)
    last = {"layer.norm": state.pop("layer.norm"), "score.weight": state.pop("score.weight").float()}
    for name, tensors in (("model-1.safetensors", state), ("model-2.safetensors", last)):
        save_file(tensors, folder / name, {"format": "pt"})
    write_index(folder, ["model-1.safetensors", "model-2.safetensors"])
    (folder / "config.json").write_text("{}")
    return folder


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("[!.]*")}


def values(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mode", Mode)
def test_what_travels_is_the_modes_tensors_in_the_served_types_and_files_without_any_are_links(served, mode):
    before, state = values(served), draw_state(1) | {"lm_head.extra": torch.ones(2)}
    ref = write_update(served, state, mode, changed=ADAPTED)
    folder = check_update(served, ref.folder_name, ref.digest)
    found = values(folder)
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        expected = state[name].to(before[name].dtype) if name in TRAVELS[mode] else before[name]
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, expected)
    linked = {file.name for file in folder.glob("model-*") if file.samefile(served / file.name)}
    assert linked == ({"model-1.safetensors"} if mode == Mode.HEAD_ONLY else set())
    assert names(served.parent) == [served.name, folder.name]


def test_tensors_may_be_tied_transposed_cut_out_of_others_or_trained(tmp_path):
    shared, folder = torch.randn(6, 4), tmp_path / "served-000001"
    shapes = {"embed": (6, 4), "tied": (6, 4), "turned": (4, 6), "top": (2, 4), "end": (2, 4), "score.weight": (1, 4)}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / WEIGHTS_FILE)
    state = {"embed": shared, "tied": shared, "turned": shared.T, "top": shared[:2], "end": shared[4:]}
    state["score.weight"] = torch.nn.Parameter(torch.randn(4, 1)).T
    found = values(tmp_path / write_update(folder, state, Mode.FULL).folder_name)
    assert found.keys() == shapes.keys()
    assert all(torch.equal(found[name], state[name]) for name in found)


def with_value(name, value):
    state = draw_state(1)
    state[name].view(-1)[-1] = value
    return state


@pytest.mark.parametrize(
    ("state", "settings", "says"),
    [
        pytest.param({"score.weight": torch.ones(1, 4)}, {}, "lacks embed.weight, layer.norm, layer.q.", id="missing"),
        pytest.param(
            draw_state(1) | {"layer.norm": torch.ones(3)}, {}, r"norm has shape \[3\].*served as \[4\]", id="shape"
        ),
        pytest.param(draw_state(1) | {"steps": torch.tensor(1.0)}, {}, "no cast is meant", id="type"),
        pytest.param(with_value("embed.weight", float("nan")), {}, "embed.weight holds NaN", id="NaN"),
        pytest.param(with_value("layer.norm", 3.4e38), {}, r"norm holds NaN or infinity as torch\.bfloat16", id="inf"),
        pytest.param(draw_state(1), {"mode": Mode.LORA}, "changed names nothing", id="no adapters"),
        pytest.param(draw_state(1), {"mode": Mode.LORA, "changed": ["layer.q"]}, "changed names layer.q,", id="layer"),
    ],
)
def test_a_state_that_cannot_be_served_is_not_published(served, state, settings, says):
    with pytest.raises(RequestError, match=says):
        write_update(served, state, **{"mode": Mode.FULL} | settings)
    assert names(served.parent) == [served.name]


def test_a_model_without_a_head_by_name_is_published_whole_alone(tmp_path):
    save_file({f"layer.{i}": torch.ones(1) for i in range(8)}, tmp_path / WEIGHTS_FILE)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="no reward head"):
        write_update(tmp_path, {}, Mode.HEAD_ONLY)
    with pytest.raises(RequestError, match=r"lacks layer\.0, .*, layer\.4 and 3 more"):
        write_update(tmp_path, {}, Mode.FULL)


def test_an_update_brings_its_beta_and_leaves_the_served_one_alone(served):
    """Left out, it is the served model's; a folder before it keeps its own, although files are links."""
    folders = [served]
    for beta in (0.25, None, 2.0):
        ref = write_update(folders[-1], draw_state(1), Mode.HEAD_ONLY, beta=beta)
        folders.append(check_update(folders[-1], ref.folder_name, ref.digest))
    assert [read_beta(folder) for folder in folders] == [1.0, 0.25, 0.25, 2.0]
    assert folder_digest(folders[2]) != folder_digest(folders[3])


def file_of(folder, name):
    """The file that holds a tensor."""
    return next(path for path in folder.glob("*.safetensors") if name in load_file(path))


def patched(path, edit):
    content = edit(path.read_bytes())
    path.unlink()
    path.write_bytes(content)


def replaced(folder, **tensors):
    """What a publisher that lies would announce: other tensors, and the digests of what is there then."""
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, file_of(folder, "score.weight"))
    (folder / INDEX_FILE).unlink()
    write_index(folder, [path.name for path in folder.glob("*.safetensors")])
    digests = {path.name: file_digest(path) for path in [*folder.glob("*.safetensors"), folder / PREFERENCE_FILE]}
    (folder / MANIFEST_FILE).write_text(json.dumps(digests))
    return UpdateRef(folder.name, file_digest(folder / MANIFEST_FILE))


def linked(path):
    os.rename(path, path.parent.parent / "aside")
    os.symlink(path.parent.parent / "aside", path)


ONES, NORM = torch.ones(1, 4), torch.ones(4, dtype=torch.bfloat16)
LIES = {
    "truncated": (lambda f: patched(file_of(f, "embed.weight"), lambda b: b[:-8]), "cannot be read"),
    "flipped": (lambda f: patched(file_of(f, "score.weight"), lambda b: b[:-1] + bytes([b[-1] ^ 1])), "cut short"),
    "manifest changed": (lambda f: patched(f / MANIFEST_FILE, lambda b: b + b" "), "is expected"),
    "no digest": (lambda f: (f / MANIFEST_FILE).write_text("{}") and UpdateRef(f.name, file_digest(f / MANIFEST_FILE)),
                  "other weights are served since"),
    "manifest gone": (lambda f: (f / MANIFEST_FILE).unlink(), "cannot be read"),
    "linked file": (lambda f: linked(file_of(f, "score.weight")), "is a link"),
    "linked manifest": (lambda f: linked(f / MANIFEST_FILE), "no plain file"),
    "unknown name": (lambda f: replaced(f, layer__norm=NORM, score__weight=ONES, x__y=torch.ones(1)), "has x.y with"),
    "missing name": (lambda f: replaced(f, layer__norm=NORM, score__bias=ONES), "has score.bias, score.weight with"),
    "shape": (lambda f: replaced(f, layer__norm=NORM, score__weight=torch.ones(2, 4)), "has score.weight with another"),
    "type": (lambda f: replaced(f, layer__norm=NORM, score__weight=ONES.half()), "has score.weight with another"),
    "another configuration": (lambda f: patched(f / "config.json", lambda b: b'{"a": 1}'), "config.json has sha256"),
    "another scale": (lambda f: patched(f / PREFERENCE_FILE, lambda b: b + b" "), f"{PREFERENCE_FILE} has sha256"),
    "unnamed weights": (lambda f: save_file({"x": ONES}, f / "x.safetensors"), "holds x.safetensors, which no update"),
    "code": (lambda f: (f / "modeling.py").write_text("import os") and None, "holds modeling.py, which no"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_update_that_is_not_what_it_says_is_refused(served, lie):
    damage, says = LIES[lie]
    ref = write_update(served, draw_state(1), Mode.FULL)
    ref = damage(served.with_name(ref.folder_name)) or ref  # announced is what its publisher would announce
    before = content(served)
    with pytest.raises(RequestError, match=says):
        check_update(served, ref.folder_name, ref.digest)
    assert content(served) == before


def test_an_update_of_what_is_served_no_longer_is_refused(served):
    """The tensors that did not travel would be those of before."""
    full, head = (write_update(served, draw_state(3), mode) for mode in (Mode.FULL, Mode.HEAD_ONLY))
    served = check_update(served, full.folder_name, full.digest)
    with pytest.raises(RequestError, match="other weights are served since it was written"):
        check_update(served, head.folder_name, head.digest)


OUTSIDE = ("../x", "", "/etc", "update-x/../..", "update-\0", "update-gone", ".update-x.tmp", "update-link", "a" * 9999)


@pytest.mark.parametrize("name", OUTSIDE)
def test_only_a_folder_directly_below_is_an_update(served, name):
    (served.parent.parent / "x").mkdir()
    (served.parent / "update-link").symlink_to(served.parent.parent / "x")
    with pytest.raises(RequestError, match="there is no update") as caught:
        check_update(served, name, "0" * 64)
    assert len(str(caught.value)) < 500


def test_a_staged_checkpoint_outlives_what_its_owner_does(tmp_path, served, tiny_folder):
    source, folder = served, tmp_path / "new" / "weights" / "served-000001"
    for path in tiny_folder.glob("tokenizer*"):
        shutil.copy(path, source)
    for other in ("old.safetensors", "modules.json", "optimizer.pt"):
        (source / other).write_bytes(b"not the model's: no index names it")
    digest = folder_digest(source)
    stage_checkpoint(source, folder)
    assert all(os.path.samefile(source / file, folder / file) for file in WeightLayout.read(folder).files)
    assert set(names(source)) - set(names(folder)) == {"old.safetensors", "modules.json", "optimizer.pt"}
    save_file(load_file(source / "model-2.safetensors") | {"layer.norm": NORM}, source / "model-2.safetensors")
    (source / "config.json").write_text("edited in place")
    assert folder_digest(folder) == digest != folder_digest(source)
    shutil.rmtree(source)
    assert folder_digest(folder) == digest
    assert hf.AutoTokenizer.from_pretrained(folder)("a b").input_ids


def test_links_of_the_hubs_cache_are_followed(tmp_path, served):
    cached = tmp_path / "models--someone--model"
    blobs, snapshot = cached / "blobs", cached / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    served.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../..") / "blobs" / path.name)
    stage_checkpoint(snapshot, tmp_path / "new" / "served-000001")
    assert not any(path.is_symlink() for path in (tmp_path / "new" / "served-000001").iterdir())
    shutil.rmtree(blobs)
    assert folder_digest(tmp_path / "new" / "served-000001")


def test_across_file_systems_files_are_copied(tmp_path, served):
    shared = Path("/dev/shm")  # always there on Linux, and of memory
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    weights = shared / f"weights-{os.getpid()}"
    try:
        stage_checkpoint(served, weights / served.name)
        shutil.rmtree(served)
        ref = write_update(weights / served.name, draw_state(1), Mode.HEAD_ONLY)
        found = values(check_update(weights / served.name, ref.folder_name, ref.digest))
        assert torch.equal(found["score.weight"], draw_state(1)["score.weight"])
    finally:
        shutil.rmtree(weights)


def test_a_damaged_checkpoint_is_refused_and_a_served_one_is_never_overwritten(tmp_path, served):
    digest = folder_digest(served)
    with pytest.raises(StoreError, match="is there already"):
        stage_checkpoint(served, served)
    assert folder_digest(served) == digest
    patched(served / "model-1.safetensors", lambda content: content[:-1])
    with pytest.raises(ModelError, match="cut short"):
        stage_checkpoint(served, tmp_path / "new" / "served-000001")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("limit", [100, 100_000])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, limit):
    state = {f"layer.{i}": torch.full((60_000,), float(i)) for i in range(6)} | {"score.weight": torch.ones(4)}
    served = tmp_path / "weights" / "served-000001"
    served.mkdir(parents=True)
    (served / "config.json").write_text("{}")
    save_file(state, served / WEIGHTS_FILE)
    with largest_file(limit), pytest.raises(StoreError, match="could not be written"):
        write_update(served, state, Mode.FULL)
    assert names(served.parent) == [served.name]
    ref = write_update(served, state, Mode.FULL)
    assert check_update(served, ref.folder_name, ref.digest).is_dir()


@pytest.mark.parametrize("serving", [False, True])
def test_what_nobody_needs_any_more_goes_and_what_a_living_publisher_writes_or_has_written_stays(tmp_path, serving):
    """At a server's start, of what an earlier one and its publishers left, and after each exchange."""
    alive, dead = (f".update-{name}.{digit * 16}.tmp" for name, digit in (("a", "0"), ("b", "1")))
    for name in ("served-1", "update-served", "update-over", "update-old", "update-young", alive, dead, "checkpoint"):
        (tmp_path / name / "inside").mkdir(parents=True)
    for name in ("update-old", "update-served"):
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "served-link").symlink_to(tmp_path / "checkpoint")
    descriptor = os.open(tmp_path / alive, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as its writer does
    drop_left(tmp_path, *(("update-served", {"update-over"}) if serving else ()))
    os.close(descriptor)
    stays = {alive, "update-young", "checkpoint", "served-link"}
    assert set(names(tmp_path)) == stays | ({"update-served"} if serving else {"update-over"})


def test_what_a_killed_server_left_goes_when_the_next_one_makes_a_folder_of_its_own(tmp_path, served, monkeypatch):
    temporary = tmp_path / "temporary"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (temporary / f".{OWN_FOLDER}.{'0' * 16}.tmp" / "served-000001").mkdir(parents=True)
    with _weights_folder(ServeSettings("out/best")) as place:
        stage_checkpoint(served, place / served.name)
        [hidden] = temporary.iterdir()
        assert hidden in place.parents
        assert hidden.stat().st_mode & 0o077 == 0
    assert not [*temporary.iterdir()]


def test_a_weights_folder_has_one_server_and_nothing_of_an_earlier_one(tmp_path):
    settings = ServeSettings("out/best", weights_folder=tmp_path)
    for left in ("served-000004", "update-ab", "notes"):
        (tmp_path / left).mkdir()
        os.utime(tmp_path / left, (0, 0))
    with _weights_folder(settings) as place:
        assert [path.name for path in place.iterdir() if path.is_dir()] == ["notes"]
        (place / "served-000001").mkdir()
        with pytest.raises(ServingError, match="another reward server"), _weights_folder(settings):
            pass
        assert (place / "served-000001").is_dir()
