"""A reward model under its name on the hub is what its folder is: here from the hub's cache, without a network."""

import shutil

import huggingface_hub.constants
import numpy as np
import pytest

from rmcore.config.model import LoraSettings
from rmcore.core.errors import ModelError
from rmcore.data.rendering import Rendering
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.trained import load_renderer
from tests.support.random_models import adapted

NAME, COMMIT = "alice/judge", "c0ffee" * 6 + "abcd"
PROMPTS, RESPONSES = ["What is 2 + 2?", "Name a fruit " * 30], ["4", "lemon"]


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """Put a folder into the hub's cache, as a download of NAME does: a snapshot of links to blobs."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def fetch(folder):
        place = tmp_path / "cache" / f"models--{NAME.replace('/', '--')}"
        snapshot = place / "snapshots" / COMMIT
        for kind in (place / "refs", place / "blobs", snapshot):
            kind.mkdir(parents=True)
        (place / "refs" / "main").write_text(COMMIT)
        for number, file in enumerate(sorted(path for path in folder.iterdir() if path.is_file())):
            shutil.copy(file, place / "blobs" / str(number))
            (snapshot / file.name).symlink_to(place / "blobs" / str(number))

    return fetch


def saved(rm, folder):
    """Save a model whose rendering, limit and beta are none that a folder without records would get."""
    rm.beta = 0.25
    rm.renderer.rendering = Rendering("plain", 40)
    rm.save(folder)
    return folder


def test_a_hub_model_s_recorded_rendering_limit_and_beta_are_obeyed(rm, fetched, tmp_path):
    folder = saved(rm, tmp_path / "best")
    fetched(folder)
    there, here = (BradleyTerryRM.from_pretrained(name, device="cpu") for name in (NAME, folder))
    assert there.renderer.rendering == here.renderer.rendering == Rendering("plain", 40)
    assert there.beta == here.beta == 0.25
    assert np.array_equal(there.score(PROMPTS, RESPONSES), here.score(PROMPTS, RESPONSES))
    sides = list(zip(PROMPTS, RESPONSES, strict=True))
    renderer = load_renderer(NAME, max_seq_len=None, render_fn=None)
    assert renderer.rendering == Rendering("plain", 40)
    assert renderer.tokenize_sides(sides) == here.renderer.tokenize_sides(sides)


def test_a_hub_model_that_is_not_what_its_seal_says_is_refused(rm, fetched, tmp_path):
    folder = saved(rm, tmp_path / "best")
    Rendering("plain", 39).save(folder)
    fetched(folder)
    with pytest.raises(ModelError, match=r"rm_rendering\.json.*rm_seal\.json"):
        BradleyTerryRM.from_pretrained(NAME, device="cpu")


@pytest.mark.slow
def test_a_hub_adapter_is_put_on_its_base(fetched, tiny_folder, tmp_path):
    rm = adapted(tiny_folder, LoraSettings())
    adapter = saved(rm, tmp_path / "best") / "adapter"
    fetched(adapter)
    there, here = (BradleyTerryRM.from_pretrained(name, device="cpu") for name in (NAME, adapter))
    assert there.has_adapters
    assert there.beta == 0.25
    assert np.array_equal(there.score(PROMPTS, RESPONSES), here.score(PROMPTS, RESPONSES))
    assert load_renderer(NAME, max_seq_len=None, render_fn=None).rendering == Rendering("plain", 40)


def test_a_hub_model_that_was_not_fetched_is_refused_without_a_network(fetched, tmp_path):
    with pytest.raises(ModelError, match=rf"{NAME}.*not fetched before"):
        BradleyTerryRM.from_pretrained(NAME, device="cpu")
