"""An update as a folder: what a trainer writes is what travels, and a server takes nothing else."""

import hashlib
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rmcore.core.errors import RequestError
from rmcore.core.files import file_digest
from rmcore.serving.types import RewardModelTrainingMode as Mode
from rmcore.serving.update_check import check_update
from rmcore.serving.updates import MANIFEST_FILE, UpdateRef, write_update
from rmcore.serving.weight_files import WeightLayout

SHAPES = {"embed.weight": (8, 4), "layer.q.weight": (4, 4), "layer.norm": (4,), "steps": (), "score.weight": (1, 4)}
ADAPTED = ["layer.q.weight"]
TRAVELS = {Mode.FULL: set(SHAPES), Mode.HEAD_ONLY: {"score.weight"}, Mode.LORA: {"layer.q.weight", "score.weight"}}


def draw_state(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return state | {"steps": torch.tensor(seed)}


@pytest.fixture
def served(tmp_path):
    """A weights folder's neighbour, served in bfloat16 with its head in float32."""
    folder = tmp_path / "model"
    folder.mkdir()
    state = draw_state(0, torch.bfloat16)
    save_file(state | {"score.weight": state["score.weight"].float()}, folder / "model.safetensors", {"format": "pt"})
    return WeightLayout.read(folder)


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    return folder


def content(folder):
    """Everything below a folder, without the lock, which is always empty and always stays."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("[!.]*")} | {
        p.name: None for p in folder.glob(".*") if p.name != ".lock"
    }


def values(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("mode", Mode)
def test_what_travels_is_the_modes_tensors_in_the_served_types(served, weights, mode):
    state = draw_state(1) | {"lm_head.extra": torch.ones(2)}
    ref = write_update(weights, state, mode, served, changed=ADAPTED)
    checked = check_update(weights, ref.folder_name, ref.digest, mode, served)
    found = values(checked.folder)
    assert found.keys() == checked.tensors.keys() == TRAVELS[mode]
    assert load_file(checked.folder / "head.safetensors").keys() == {"score.weight"}
    for name, tensor in found.items():
        wanted = {"steps": torch.int64, "score.weight": torch.float32}.get(name, torch.bfloat16)
        assert tensor.dtype == wanted
        assert torch.equal(tensor, state[name].to(wanted))
    assert ref.digest == hashlib.sha256((checked.folder / MANIFEST_FILE).read_bytes()).hexdigest()
    assert content(weights).keys() == {ref.folder_name, *(f"{ref.folder_name}/{n}" for n in os.listdir(checked.folder))}


def test_tensors_may_be_tied_transposed_cut_out_of_others_or_trained(tmp_path, weights):
    shared = torch.randn(6, 4)
    layout_of = {
        "embed": (6, 4),
        "tied": (6, 4),
        "turned": (4, 6),
        "top": (2, 4),
        "end": (2, 4),
        "score.weight": (1, 4),
    }
    save_file({name: torch.zeros(shape) for name, shape in layout_of.items()}, tmp_path / "model.safetensors")
    state = {"embed": shared, "tied": shared, "turned": shared.T, "top": shared[:2], "end": shared[4:]}
    state["score.weight"] = torch.nn.Parameter(torch.randn(4, 1)).T
    ref = write_update(weights, state, Mode.FULL, WeightLayout.read(tmp_path))
    found = values(weights / ref.folder_name)
    assert found.keys() == layout_of.keys()
    assert all(torch.equal(found[name], state[name]) for name in found)


@pytest.mark.slow
@settings(max_examples=30)  # each update is synced to disk
@given(shard_bytes=st.integers(1, 200))
def test_no_file_is_larger_than_allowed_and_the_head_is_alone(tmp_path_factory, shard_bytes):
    folder = tmp_path_factory.mktemp("sharded")
    save_file(draw_state(0), folder / "model.safetensors")
    layout = WeightLayout.read(folder)
    ref = write_update(folder, draw_state(1), Mode.FULL, layout, shard_bytes=shard_bytes)
    seen = []
    for path in (folder / ref.folder_name).glob("*.safetensors"):
        held = load_file(path)
        seen += held
        assert sum(layout.tensors[name].num_bytes for name in held) <= shard_bytes or len(held) == 1
        assert ("score.weight" in held) == (path.name == "head.safetensors") == (set(held) == {"score.weight"})
    assert sorted(seen) == sorted(SHAPES)
    check_update(folder, ref.folder_name, ref.digest, Mode.FULL, layout)


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
        pytest.param(draw_state(1) | {"layer.norm": torch.ones(1, 4)}, {}, "another model", id="rank"),
        pytest.param(draw_state(1) | {"steps": torch.tensor(1.0)}, {}, "no cast is meant", id="type"),
        pytest.param(with_value("embed.weight", float("nan")), {}, "embed.weight holds NaN", id="NaN"),
        pytest.param(
            with_value("score.weight", -float("inf")), {"mode": Mode.HEAD_ONLY}, "score.weight holds", id="inf"
        ),
        pytest.param(draw_state(1), {"mode": Mode.LORA}, "changed names nothing", id="no adapters"),
        pytest.param(draw_state(1), {"mode": Mode.LORA, "changed": ["layer.q"]}, "changed names layer.q,", id="layer"),
    ],
)
def test_a_state_that_cannot_be_served_is_not_published(served, weights, state, settings, says):
    with pytest.raises(RequestError, match=says):
        write_update(weights, state, layout=served, **{"mode": Mode.FULL} | settings)
    assert not content(weights)


@pytest.mark.parametrize(
    ("served_as", "state", "mode", "says"),
    [
        ({f"layer.{i}": torch.ones(1) for i in range(8)}, {}, Mode.FULL, r"lacks layer\.0, .*, layer\.4 and 3 more"),
        ({"layer.0": torch.ones(1)}, {}, Mode.HEAD_ONLY, "no reward head"),
        (
            {"score.weight": torch.ones(1, dtype=torch.float16)},
            {"score.weight": torch.tensor([7e4])},
            Mode.FULL,
            r"NaN or infinity as torch\.float16",
        ),
    ],
)
def test_a_state_that_does_not_fit_this_model_is_not_published(tmp_path, weights, served_as, state, mode, says):
    save_file(served_as, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match=says):
        write_update(weights, state, mode, WeightLayout.read(tmp_path))
    assert not content(weights)
    with pytest.raises(RequestError, match="is not on this machine"):
        write_update(weights / "elsewhere", served_as, Mode.FULL, WeightLayout.read(tmp_path))


HEAD = "head.safetensors"
RECORD = {"shape": [1, 4], "dtype": "F32", "file": HEAD}


def rewritten(folder, change):
    """Change a manifest or its file, and announce the digest of what is there then."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    change(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return UpdateRef(folder.name, hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest())


def replaced(folder, file=HEAD, **tensors):
    """Put other tensors into a file, as a publisher that lies would."""
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, folder / file)
    return rewritten(folder, lambda m: m["files"].update({file: file_digest(folder / file)}))


def patched(folder, file, edit):
    path = folder / file
    path.write_bytes(edit(path.read_bytes()))


def garbled(folder, file):
    (folder / file).write_bytes(b"\xff" * 99)
    if file == MANIFEST_FILE:
        return UpdateRef(folder.name, file_digest(folder / file))
    return rewritten(folder, lambda m: m["files"].update({file: file_digest(folder / file)}))


def head(m, **what):
    m["tensors"]["score.weight"].update(what)


def linked(folder, file):
    os.rename(folder / file, folder.parent / "aside")
    os.symlink(folder.parent / "aside", folder / file)


LIES = {
    "truncated": (lambda f: patched(f, "backbone-00001.safetensors", lambda b: b[:-8]), "cut short or changed"),
    "flipped": (lambda f: patched(f, HEAD, lambda b: b[:-1] + bytes([b[-1] ^ 1])), "cut short or changed"),
    "manifest changed": (lambda f: patched(f, MANIFEST_FILE, lambda b: b + b" "), "the request says"),
    "file gone": (lambda f: (f / HEAD).unlink(), "cannot be read"),
    "manifest gone": (lambda f: (f / MANIFEST_FILE).unlink(), "cannot be read"),
    "linked file": (lambda f: linked(f, HEAD), "no plain file"),
    "linked manifest": (lambda f: linked(f, MANIFEST_FILE), "no plain file"),
    "NaN": (lambda f: replaced(f, score__weight=torch.full((1, 4), float("nan"))), "score.weight in .* holds NaN"),
    "stowaway": (lambda f: replaced(f, score__weight=torch.ones(1, 4), x__y=torch.ones(1)), "other tensors than"),
    "header": (lambda f: replaced(f, score__weight=torch.ones(2, 4)), "other tensors than"),
    "garbage": (lambda f: garbled(f, HEAD), "cannot be read as safetensors"),
    "unknown name": (lambda f: rewritten(f, lambda m: m["tensors"].update(score=RECORD)), "holds score, which"),
    "missing name": (lambda f: rewritten(f, lambda m: m["tensors"].pop("layer.norm")), "lacks layer.norm"),
    "shape": (lambda f: rewritten(f, lambda m: head(m, shape=[2, 4])), r"F32 \[2, 4\], served is F32 \[1, 4\]"),
    "type": (lambda f: rewritten(f, lambda m: head(m, dtype="F16")), r"F16 \[1, 4\], served is F32"),
    "escape": (lambda f: rewritten(f, lambda m: head(m, file="../x.safetensors")), "is no manifest .*file"),
    "list of files": (lambda f: rewritten(f, lambda m: m["files"].pop(HEAD)), "lists other files"),
    "mode": (lambda f: rewritten(f, lambda m: m.update(mode="head_only")), "published as head_only"),
    "no mode": (lambda f: rewritten(f, lambda m: m.update(mode="half")), "is no manifest .mode"),
    "field": (lambda f: rewritten(f, lambda m: m.update(other=1)), "is no manifest .other"),
    "no JSON": (lambda f: garbled(f, MANIFEST_FILE), "is no manifest"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_update_that_is_not_what_it_says_is_refused(served, weights, lie):
    damage, says = LIES[lie]
    ref = write_update(weights, draw_state(1), Mode.FULL, served)
    ref = damage(weights / ref.folder_name) or ref  # announced is what its publisher would announce
    before = content(weights)
    with pytest.raises(RequestError, match=says):
        check_update(weights, ref.folder_name, ref.digest, Mode.FULL, served)
    assert content(weights) == before


@pytest.mark.parametrize("announced", Mode)
@pytest.mark.parametrize("published", Mode)
@pytest.mark.parametrize("manifest", Mode)
def test_an_update_is_taken_in_its_own_mode_only(served, weights, announced, published, manifest):
    ref = write_update(weights, draw_state(1), published, served, changed=ADAPTED)
    ref = rewritten(weights / ref.folder_name, lambda m: m.update(mode=manifest))
    # A lora update may hold any tensors beside the head's: all and none are also subsets.
    fits = manifest in {published, Mode.LORA}
    if announced == manifest and fits:
        assert check_update(weights, ref.folder_name, ref.digest, announced, served).mode == announced
    else:
        with pytest.raises(RequestError, match=r"published as|may not|lacks"):
            check_update(weights, ref.folder_name, ref.digest, announced, served)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "..",
        ".",
        "",
        "/etc",
        "update-x/../..",
        "update-\0",
        "update-gone",
        ".update-x.tmp",
        "update-link",
        "a" * 9999,
    ],
)
def test_only_a_folder_directly_below_is_an_update(served, weights, name):
    (weights.parent / "x").mkdir()
    (weights / "update-link").symlink_to(weights.parent / "x")
    with pytest.raises(RequestError, match="there is no update") as caught:
        check_update(weights, name, "0" * 64, Mode.FULL, served)
    assert len(str(caught.value)) < 500
