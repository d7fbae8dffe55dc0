"""A model that is only on the hub is asked for once, and what cannot be had is refused before anybody waits."""

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError

from rmcore.core.errors import ModelError
from rmcore.core.hub import ALIASES, require_model


@pytest.fixture
def hub(monkeypatch):
    """What the hub was asked, and what it answers: raised where it is an exception."""

    class Hub:
        asked, answer = [], None

        def model_info(self, name, timeout):
            self.asked.append(name)
            if isinstance(self.answer, Exception):
                raise self.answer

    Hub.asked = []
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    return Hub


def refused(kind, status):
    request = httpx.Request("GET", "https://huggingface.co/api/models/owner/model")
    return kind("the hub says no\nmore", response=httpx.Response(status, request=request))


@pytest.mark.parametrize("name", ["tiny", "minilm", "sft", "world", "a/b/c", "/no/such/folder", "./nothing", "a b/c"])
def test_what_is_no_hub_name_is_not_asked_for(hub, name):
    require_model(name)
    assert hub.asked == []


def test_what_lies_here_is_not_asked_for(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "best").mkdir(parents=True)
    require_model("out/best")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: "/cache/config.json")
    require_model("owner/model")
    assert hub.asked == []


def test_an_alias_is_asked_for_by_its_name_on_the_hub(hub):
    require_model("llama")
    require_model("owner/model")
    assert hub.asked == [ALIASES["llama"], "owner/model"]


def test_without_an_answer_the_name_and_the_way_out_are_said(hub):
    hub.answer = HTTPError("Name or service not known")
    with pytest.raises(
        ModelError, match=r"'llama' could not be loaded.*does not answer \(Name or service.*name a folder"
    ):
        require_model("llama")
    assert len(hub.asked) == 1


def test_a_model_that_there_is_not_is_said(hub):
    hub.answer = refused(RepositoryNotFoundError, 404)
    with pytest.raises(ModelError, match=r"shows you no such model \(.*hf auth login"):
        require_model("owner/model")


def test_a_busy_hub_is_left_to_those_who_try_again(hub):
    hub.answer = refused(HfHubHTTPError, 503)
    require_model("owner/model")
    assert hub.asked == ["owner/model"]


def test_the_loaders_ask_first(hub):
    from rmcore.models.loading import read_config

    hub.answer = HTTPError("no network")
    with pytest.raises(ModelError, match="no network"):
        read_config("owner/model", trust_remote_code=False)
    assert hub.asked == ["owner/model"]
