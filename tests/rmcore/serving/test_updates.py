"""An update as a folder: what a trainer writes is what travels, and a server takes nothing else."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import serving_world as world
from rmcore.core.errors import ConfigError, RequestError
from rmcore.core.files import file_digest
from rmcore.models.seal import PREFERENCE_FILE
from rmcore.serving.types import RewardModelTrainingMode as Mode
from rmcore.serving.updates import MANIFEST_FILE, UpdateRef, check_update, write_update
from rmcore.serving.weight_files import WeightLayout, write_index
from rmcore.serving.weight_sync import RMPublisherAdapter

SHAPES = {"embed.weight": (8, 4), "layer.q.weight": (4, 4), "layer.norm": (4,), "steps": (), "score.weight": (1, 4)}
ADAPTED = ["layer.q.weight"]
TRAVELS = {Mode.FULL: set(SHAPES), Mode.HEAD_ONLY: {"score.weight"}, Mode.LORA: {"layer.q.weight", "score.weight"}}


def draw_state(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return state | {"steps": torch.tensor(seed)}


@pytest.fixture
def served(tmp_path):
    """A folder that is served in bfloat16, with its head in float32 and in the same file."""
    folder = tmp_path / "weights" / "served-000001"
    folder.mkdir(parents=True)
    state = draw_state(0, torch.bfloat16)
    save_file(state | {"score.weight": state["score.weight"].float()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def content(folder):
    """Everything below a folder, without the lock, which is always empty and always stays."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("[!.]*")} | {
        p.name: None for p in folder.glob(".*") if p.name != ".lock"
    }


def values(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("mode", Mode)
def test_what_travels_is_the_modes_tensors_in_the_served_types_and_the_rest_is_as_it_was(served, mode):
    before, state = values(served), draw_state(1) | {"lm_head.extra": torch.ones(2)}
    ref = write_update(served, state, mode, changed=ADAPTED)
    folder = check_update(served, ref.folder_name, ref.digest)
    found = values(folder)
    assert found.keys() == before.keys()
    for name, tensor in found.items():
        expected = state[name].to(before[name].dtype) if name in TRAVELS[mode] else before[name]
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, expected)
    [head] = [path for path in folder.glob("*.safetensors") if "score.weight" in load_file(path)]
    assert load_file(head).keys() == {"score.weight"}
    assert {path.name for path in served.parent.iterdir()} == {served.name, folder.name}


def test_tensors_may_be_tied_transposed_cut_out_of_others_or_trained(tmp_path):
    shared, folder = torch.randn(6, 4), tmp_path / "served-000001"
    shapes = {"embed": (6, 4), "tied": (6, 4), "turned": (4, 6), "top": (2, 4), "end": (2, 4), "score.weight": (1, 4)}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    state = {"embed": shared, "tied": shared, "turned": shared.T, "top": shared[:2], "end": shared[4:]}
    state["score.weight"] = torch.nn.Parameter(torch.randn(4, 1)).T
    found = values(tmp_path / write_update(folder, state, Mode.FULL).folder_name)
    assert found.keys() == shapes.keys()
    assert all(torch.equal(found[name], state[name]) for name in found)


@pytest.mark.slow
@settings(max_examples=30)  # each update is synced to disk
@given(shard_bytes=st.integers(1, 200))
def test_no_file_is_larger_than_allowed_and_the_head_is_alone(tmp_path_factory, shard_bytes):
    folder = tmp_path_factory.mktemp("sharded") / "served-000001"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(draw_state(0), folder / "model.safetensors")
    ref = write_update(folder, draw_state(1), Mode.FULL, shard_bytes=shard_bytes)
    layout = WeightLayout.read(check_update(folder, ref.folder_name, ref.digest))
    assert layout.tensors.keys() == SHAPES.keys()
    for file in layout.files:
        held = layout.names(file)
        assert sum(layout.tensors[name].num_bytes for name in held) <= shard_bytes or len(held) == 1
        assert ("score.weight" in held) == (held == {"score.weight"})


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
def test_a_state_that_cannot_be_served_is_not_published(served, state, settings, says):
    with pytest.raises(RequestError, match=says):
        write_update(served, state, **{"mode": Mode.FULL} | settings)
    assert [path.name for path in served.parent.iterdir()] == [served.name]


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
def test_a_state_that_does_not_fit_this_model_is_not_published(tmp_path, served_as, state, mode, says):
    save_file(served_as, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError, match=says):
        write_update(tmp_path, state, mode)
    assert not list(tmp_path.parent.glob("*update-*"))


def file_of(folder, name):
    """The file that holds a tensor."""
    return next(path for path in folder.glob("*.safetensors") if name in load_file(path))


def patched(path, edit):
    content = edit(path.read_bytes())
    path.unlink()
    path.write_bytes(content)


def announced(folder):
    """What a publisher that lies would announce: the digests of what is there now."""
    digests = {path.name: file_digest(path) for path in [*folder.glob("*.safetensors"), folder / PREFERENCE_FILE]}
    (folder / MANIFEST_FILE).write_text(json.dumps(digests))
    return UpdateRef(folder.name, file_digest(folder / MANIFEST_FILE))


def replaced(folder, **tensors):
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, file_of(folder, "score.weight"))
    write_index(folder, [path.name for path in folder.glob("*.safetensors")])
    return announced(folder)


def linked(path):
    os.rename(path, path.parent.parent / "aside")
    os.symlink(path.parent.parent / "aside", path)


ONES = torch.ones(1, 4)
LIES = {
    "truncated": (lambda f: patched(file_of(f, "embed.weight"), lambda b: b[:-8]), "cannot be read"),
    "flipped": (lambda f: patched(file_of(f, "score.weight"), lambda b: b[:-1] + bytes([b[-1] ^ 1])), "cut short"),
    "manifest changed": (lambda f: patched(f / MANIFEST_FILE, lambda b: b + b" "), "is expected"),
    "no digest": (lambda f: (f / MANIFEST_FILE).write_text("{}") and UpdateRef(f.name, file_digest(f / MANIFEST_FILE)),
                  "has no digest of"),
    "file gone": (lambda f: file_of(f, "score.weight").unlink(), "cannot be read"),
    "manifest gone": (lambda f: (f / MANIFEST_FILE).unlink(), "cannot be read"),
    "linked file": (lambda f: linked(file_of(f, "score.weight")), "is a link"),
    "linked manifest": (lambda f: linked(f / MANIFEST_FILE), "no plain file"),
    "unknown name": (lambda f: replaced(f, score__weight=ONES, x__y=torch.ones(1)), "holds x.y, unlike"),
    "missing name": (lambda f: replaced(f, score__bias=ONES), "unlike the served model"),
    "shape": (lambda f: replaced(f, score__weight=torch.ones(2, 4)), r"F32 \[2, 4\], served is F32 \[1, 4\]"),
    "type": (lambda f: replaced(f, score__weight=ONES.half()), r"F16 \[1, 4\], served is F32"),
    "another configuration": (lambda f: patched(f / "config.json", lambda b: b'{"a": 1}'), "config.json has sha256"),
    "another scale": (lambda f: patched(f / PREFERENCE_FILE, lambda b: b + b" "), f"{PREFERENCE_FILE} has sha256"),
    "unnamed weights": (lambda f: save_file({"x": ONES}, f / "x.safetensors"), "holds x.safetensors, which no update"),
    "unnamed modules": (lambda f: (f / "modules.json").write_text("[]") and None, "holds modules.json, which no"),
    "code": (lambda f: (f / "modeling.py").write_text("import os") and None, "cannot be read"),
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
    first = write_update(served, draw_state(1), Mode.HEAD_ONLY)
    served = check_update(served, first.folder_name, first.digest)
    full, head = (write_update(served, draw_state(3), mode) for mode in (Mode.FULL, Mode.HEAD_ONLY))
    served = check_update(served, full.folder_name, full.digest)
    with pytest.raises(RequestError, match="they changed since it was written"):
        check_update(served, head.folder_name, head.digest)


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
def test_only_a_folder_directly_below_is_an_update(served, name):
    (served.parent.parent / "x").mkdir()
    (served.parent / "update-link").symlink_to(served.parent.parent / "x")
    with pytest.raises(RequestError, match="there is no update") as caught:
        check_update(served, name, "0" * 64)
    assert len(str(caught.value)) < 500


class Far:
    """A server as its publisher sees it, which serves a next folder each time that it is requested."""

    address = "http://127.0.0.1:8100"

    def __init__(self, *folders):
        self.folders, self.num_asked, self.update = folders, 0, None

    def version(self):
        folder = self.folders[min(self.num_asked, len(self.folders) - 1)]
        self.num_asked += 1
        return SimpleNamespace(
            weight_version=self.num_asked, weights_folder=str(folder.parent), layout_folder=str(folder), dtype="float32"
        )

    def publish(self, update, timeout_s):
        self.update = update
        return self.version()


def test_where_another_publishers_weights_are_served_meanwhile_a_publication_begins_again(tmp_path, capsys):
    rm = world.new_model(1)
    gone, served = tmp_path / "served-000001", tmp_path / "served-000002"
    rm.save(served)
    far = Far(gone, served)
    RMPublisherAdapter(far, Mode.FULL).publish(rm)
    assert check_update(served, far.update.folder, far.update.digest).is_dir()
    assert "the served weights changed meanwhile, to version 2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is not to be seen"):
        RMPublisherAdapter(Far(gone), Mode.FULL).publish(rm)
