"""A model that is only on the hub is asked for once, and what cannot be had is refused before anybody waits."""

from contextlib import nullcontext

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


def test_what_is_no_hub_name_or_is_here_is_not_asked_for_and_an_alias_by_its_own(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "best").mkdir(parents=True)
    none = ("tiny", "minilm", "sft", "world", "a/b/c", "/no/such/folder", "./nothing", "a b/c", "out/best")
    for name in (*none, "llama", "owner/model"):
        require_model(name)
    assert hub.asked == [ALIASES["llama"], "owner/model"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: "/cache/config.json")
    require_model("owner/model")
    assert len(hub.asked) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (HTTPError("Name or service not known"), r"'llama' could.*does not answer \(Name or service.*name a folder"),
        (refused(RepositoryNotFoundError, 404), r"shows you no such model \(.*hf auth login"),
        (refused(HfHubHTTPError, 503), None),  # a busy hub is left to those who try again
    ],
)
def test_what_cannot_be_had_is_said_with_the_way_out(hub, answer, said):
    hub.answer = answer
    with nullcontext() if said is None else pytest.raises(ModelError, match=said):
        require_model("llama")
    assert len(hub.asked) == 1


def test_the_loaders_ask_first(hub):
    from rmcore.models.loading import read_config

    hub.answer = HTTPError("no network")
    with pytest.raises(ModelError, match="no network"):
        read_config("owner/model", trust_remote_code=False)
    assert hub.asked == ["owner/model"]
