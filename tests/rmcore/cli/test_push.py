"""`rm-opt export --push`, against a hub on loopback: what arrives, what is refused, what is never said."""

import json
import os

import pytest

from hub_server import StoredRepository, hub_server
from rmcore.models.seal import check_seal
from warm_commands import WITHOUT_FLOWS, WarmCommands

TOKEN = "hf_alice"
NAME = "alice/judge"
OURS = b"---\nrm_optimizer:\n  verdict: null\n---\n"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    """A hub, and commands in processes that know its address from the start."""
    names = ("HF_HUB_OFFLINE", "HF_TOKEN", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    with hub_server() as hub:
        # Large files by the protocol that the stand-in speaks; NO_PROXY: to loopback without one.
        own = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "HF_HOME": "/nowhere"}
        warm = WarmCommands(WITHOUT_FLOWS)
        try:
            yield hub, warm, environment | own
        finally:
            warm.close()


@pytest.fixture(scope="module")
def checkpoint(tiny_folder, tmp_path_factory):
    """A checkpoint, among files that belong to none."""
    from rmcore.models.reward_model import BradleyTerryRM

    best = tmp_path_factory.mktemp("push") / "best"
    BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128).save(best)
    for name in ("optimizer.pt", "training_args.bin", "events.log", ".env", "modeling_own.py", "notes.txt"):
        (best / name).write_bytes(b"a secret")
    (best / "checkpoint-1").mkdir()
    return best


@pytest.fixture
def push(server, checkpoint, tmp_path):
    """Export and push the checkpoint, by default with a token; nothing that it says holds the token."""
    hub, warm, environment = server
    hub.forget()

    def run(*words, name=NAME, token=TOKEN):
        given = environment | ({} if token is None else {"HF_TOKEN": token})
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        done = warm.run(["export", "--push", name, "--checkpoint", checkpoint, "--out", out, *words], given)
        said = done.stdout + done.stderr
        assert token is None or token not in said
        assert "Traceback" not in said
        return done.returncode, " ".join(said.split()), out

    run.hub = hub
    return run


def write_verdict(tmp_path, status, rung):
    """Write what `rm-opt readiness --json` writes of a model with this verdict."""
    told = {"rung": rung, "status": status, "headline": f"It {status}", "evidence": "pairs", "reasons": ["one reason"]}
    place = tmp_path / "verdict.json"
    place.write_text(json.dumps({"verdict": told, "gate": [], "next_rung": None}))
    return place


def test_what_makes_the_model_arrives_privately_and_nothing_else(push, tmp_path):
    status, said, out = push()
    assert status == 0, said
    stored = push.hub.repositories[NAME]
    assert stored.private
    assert stored.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert not any(b"a secret" in content for content in stored.files.values())
    assert f'NAME = "{NAME}"' in stored.files["README.md"].decode()
    again = tmp_path / "downloaded"
    again.mkdir()
    for name, content in stored.files.items():
        (again / name).write_bytes(content)
    check_seal(again)
    assert len(stored.commits) == 1


def test_a_second_push_sends_no_large_file_again_and_removes_other_weights(push):
    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "README.md": OURS}
    mine = {"notes.md": b"mine", ".gitattributes": b"hub's"}
    push.hub.repositories[NAME] = StoredRepository(True, old | mine)
    status, said, out = push()
    assert status == 0, said
    assert push.hub.repositories[NAME].files.keys() == {path.name for path in out.iterdir()} | mine.keys()
    assert push()[0] == 0
    assert sum(method == "PUT" for method, _ in push.hub.seen) == 1


def test_what_no_push_wrote_is_left_alone(push):
    files = {"README.md": b"# mine"}
    push.hub.repositories[NAME] = StoredRepository(True, files)
    status, said, _ = push()
    assert status == 2
    assert "so a push would overwrite other work; nothing was sent" in said
    assert push.hub.repositories[NAME] == StoredRepository(True, files)


def test_what_others_change_meanwhile_is_not_overwritten(push):
    stored = push.hub.repositories[NAME] = StoredRepository(True, {"README.md": OURS})
    push.hub.meanwhile["/commit/"] = lambda: stored.files.update({"README.md": b"# edited on the hub"})
    status, said, _ = push()
    assert status == 2
    assert "the repository has changed meanwhile" in said
    assert stored.files == {"README.md": b"# edited on the hub"}


def test_a_name_alone_is_one_of_the_user_s_and_public_is_public(push):
    status, said, _ = push("--public", name="judge")
    assert status == 0, said
    assert not push.hub.repositories[NAME].private
    assert NAME in said


def test_a_verdict_against_it_stops_it_before_the_hub_hears_of_it(push, tmp_path):
    evidence = ("--evidence", write_verdict(tmp_path, "not_ready", 3))
    code, said, _ = push(*evidence)
    assert code == 2
    assert "the verdict speaks against this model: It not_ready" in said
    assert push.hub.seen == []
    assert push(*evidence, "--although-not-ready")[0] == 0
    card = push.hub.repositories[NAME].files["README.md"].decode()
    assert "✗ It not&#95;ready" in card
    assert "status: not_ready" in card


def test_without_a_token_nothing_is_begun(push):
    status, said, out = push(token=None)
    assert status == 2
    assert "HF_TOKEN is not set" in said
    assert push.hub.seen == []
    assert not out.exists()


@pytest.mark.parametrize(("token", "name"), [("hf_unknown", NAME), (TOKEN, "bob/judge"), ("hf_reader", "reader/judge")])
def test_what_the_hub_refuses_is_named(token, name, push):
    status, said, _ = push(name=name, token=token)
    assert status == 2
    assert f"the hub publishes nothing as {name} (" in said
    assert push.hub.repositories == {}


@pytest.mark.parametrize(("there", "words"), [(False, ()), (True, ("--public",))])
def test_a_repository_of_the_other_visibility_is_left_alone(there, words, push):
    push.hub.repositories[NAME] = StoredRepository(there, {"README.md": OURS})
    status, said, _ = push(*words)
    assert status == 2
    assert f"is there already and {'private' if there else 'public'}" in said
    assert push.hub.repositories[NAME].files == {"README.md": OURS}


@pytest.mark.parametrize(("part", "code"), [("/commit/", 500), ("/large/", 400), ("whoami", 0)])
def test_a_hub_that_fails_leaves_the_repository_as_it_was(part, code, push):
    push.hub.fail[part] = code
    status, said, _ = push(name="judge")
    assert status == 2
    assert "the files did not arrive at the hub" in said
    assert not any(stored.files for stored in push.hub.repositories.values())
    if part == "/large/":
        push.hub.fail.clear()
        assert push()[0] == 0  # the same command begins again
