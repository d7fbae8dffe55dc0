"""`rm-opt card --push`, against a hub on loopback: what arrives, what is refused, what is never said."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli import app
from hub_server import StoredRepository, hub_server
from rmcore.cli.guard import guard
from rmcore.core.errors import ModelError
from rmcore.models.seal import SEAL_FILE, check_seal
from rmcore.reporting.card.evidence import Found, Judgement
from rmcore.reporting.card.model_card import CARD_FILE, name_repository, read_card, write_card
from rmcore.serving.model_files import check_links
from warm_commands import WITHOUT_FLOWS, WarmCommands

TOKEN = "hf_alice"
SENT = {
    *("README.md", "chat_template.jinja", "config.json", "model.safetensors"),
    *("rm_preference.json", "rm_rendering.json", "rm_seal.json", "tokenizer.json", "tokenizer_config.json"),
}
NAME = "alice/judge"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    """A hub, and commands in processes that know its address from the start."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    with hub_server() as hub:
        # Large files by the protocol that the stand-in speaks; NO_PROXY: to loopback without one.
        own = {"HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "HF_HOME": "/nowhere"}
        warm = WarmCommands(WITHOUT_FLOWS)
        try:
            yield hub, warm, environment | own
        finally:
            warm.close()


@pytest.fixture(scope="module")
def trained(tiny_folder, tmp_path_factory):
    """A checkpoint, among files that belong to none."""
    from rmcore.models.reward_model import BradleyTerryRM

    best = tmp_path_factory.mktemp("push") / "best"
    BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128).save(best)
    for name in ("optimizer.pt", "training_args.bin", "events.log", ".env", "modeling_own.py", "rewards.parquet"):
        (best / name).write_bytes(b"a secret")
    (best / "checkpoint-1").mkdir()
    return best


@pytest.fixture(scope="module")
def facts(trained):
    """What a card says of the checkpoint beside its verdict."""
    from rmcore.cli.card_facts import find_origin, gather_facts
    from rmcore.ensembles.ensemble_folder import checkpoint_digest
    from rmcore.models.reward_model import BradleyTerryRM

    rm = BradleyTerryRM.from_pretrained(trained, device="cpu")
    return gather_facts(find_origin(str(trained)), checkpoint_digest(trained), rm, None)


@pytest.fixture
def checkpoint(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "best", copy_function=os.link))


@pytest.fixture
def push(server, checkpoint):
    """Push the checkpoint, by default with a token; nothing that it says holds the token."""
    hub, warm, environment = server
    hub.forget()

    def run(*words, name=NAME, token=TOKEN):
        given = environment | ({} if token is None else {"HF_TOKEN": token})
        done = warm.run(["card", "--push", name, "--checkpoint", checkpoint, "--device", "cpu", *words], given)
        said = done.stdout + done.stderr
        assert token is None or token not in said
        assert "Traceback" not in said
        return done.returncode, said

    run.hub, run.checkpoint = hub, checkpoint
    return run


def write_verdict(checkpoint, facts, status="passes", rung=1):
    """Write the card that `rm-opt card` writes of a model with this verdict; gives the headline."""
    (checkpoint / CARD_FILE).write_text(verdict_text(facts, status, rung))
    return headline(status)


def headline(status):
    return f"It {status.replace('_', ' ')}"


def verdict_text(facts, status="passes", rung=1):
    judgement = Judgement(
        rung, status, headline(status), "pairs", ("one reason",), None, (), None, None, None, "a file"
    )
    return write_card(facts, [Found(judgement=judgement)], made="2026-11-25T00:00:00+00:00")


def test_what_makes_the_model_arrives_privately_and_nothing_else(push, tmp_path):
    status, said = push()
    assert status == 0, said
    stored = push.hub.repositories[NAME]
    assert stored.private
    assert stored.files.keys() == SENT
    assert all(stored.files[name] == (push.checkpoint / name).read_bytes() for name in SENT - {CARD_FILE, SEAL_FILE})
    assert f'NAME = "{NAME}"' in stored.files[CARD_FILE].decode()
    assert read_card(stored.files[CARD_FILE]).is_as_written
    for name, content in stored.files.items():
        (tmp_path / name).write_bytes(content)
    check_seal(tmp_path)  # made of what was sent, so it is whole on the other side
    assert len(stored.commits) == 1
    assert "nobody judged" in said
    assert "left out    .env, checkpoint-1, events.log, modeling_own.py, optimizer.pt" in said
    assert not (push.checkpoint / CARD_FILE).exists()  # a card that was made for the hub is there alone


def test_a_second_push_sends_no_large_file_again_and_removes_other_weights(push, facts):
    write_verdict(push.checkpoint, facts)
    hub = push.hub
    other = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}"}
    mine = {"notes.md": b"mine", "lora/adapter_model.safetensors": b"mine", ".gitattributes": b"hub's"}
    hub.repositories[NAME] = StoredRepository(True, other | mine | card_there(facts))
    status, said = push()
    assert status == 0, said
    assert hub.repositories[NAME].files.keys() == SENT | mine.keys()
    assert f"replaces    {facts.digest[:16]} in {NAME}: It passes" in said
    assert f"removed     {', '.join(sorted(other))}: weights" in said
    status, said = push()
    assert (status, "removed" in said) == (0, False)
    assert sum(method == "PUT" for method, _ in hub.seen) == 1


def card_there(facts):
    """The card of an earlier push, as a hub has it."""
    return {CARD_FILE: name_repository(verdict_text(facts), NAME).encode()}


@pytest.mark.parametrize(
    ("card", "says"),
    [
        (lambda text: text + b"Our shop's.\n", "its card was changed since `rm-opt card` wrote it"),
        (lambda text: b"\xff\xfe", "its card was not written by `rm-opt card`"),
        (lambda text: b"---\na: [\n---\n", "its card was not written by `rm-opt card`"),
        (lambda text: None, "it has files and no README.md"),
    ],
)
def test_what_no_push_wrote_is_left_alone(card, says, push, facts):
    write_verdict(push.checkpoint, facts)
    content = card(card_there(facts)[CARD_FILE])
    files = {"old.safetensors": b"1"} | ({} if content is None else {CARD_FILE: content})
    push.hub.repositories[NAME] = StoredRepository(True, files)
    status, said = push()
    assert status == 2
    assert says in " ".join(said.split())
    assert "nothing was sent. Name another repository" in " ".join(said.split())
    assert push.hub.repositories[NAME] == StoredRepository(True, files)


def test_a_card_of_other_words_may_be_sent_twice_but_replaces_no_other(push, facts):
    write_verdict(push.checkpoint, facts)
    local = push.checkpoint / CARD_FILE
    local.write_text(local.read_text() + "Our data are from our shop.\n")
    push.hub.repositories[NAME] = StoredRepository(True, card_there(facts))
    assert push()[0] == 0
    assert b"from our shop" in push.hub.repositories[NAME].files[CARD_FILE]
    assert push()[0] == 0  # nothing is lost
    local.write_text(local.read_text() + "And more.\n")
    assert "was changed since" in push()[1]


def test_what_others_change_meanwhile_is_not_overwritten(push, facts):
    write_verdict(push.checkpoint, facts)
    stored = push.hub.repositories[NAME] = StoredRepository(True, card_there(facts))
    push.hub.meanwhile["/commit/"] = lambda: stored.files.update({CARD_FILE: b"# edited on the hub"})
    status, said = push()
    assert status == 2
    assert f"someone has changed {NAME} since this push looked at it" in " ".join(said.split())
    assert stored.files == {CARD_FILE: b"# edited on the hub"}
    assert "its card was not written by" in push()[1]


def test_a_link_out_of_the_folder_is_not_followed(push, facts, tmp_path):
    write_verdict(push.checkpoint, facts)
    secret = tmp_path / "credentials"
    secret.write_text("a secret")
    (push.checkpoint / CARD_FILE).unlink()
    for name in (CARD_FILE, "vocab.txt"):  # the second is told first
        (push.checkpoint / name).symlink_to(secret)
        status, said = push("--although-not-ready")
        assert (status, f"{name} is a link to {secret}" in " ".join(said.split())) == (2, True)
    assert push.hub.seen == []


def test_a_snapshot_of_the_hub_s_cache_links_to_its_own_blobs_alone(tmp_path):
    snapshot = tmp_path / "models--alice--judge" / "snapshots" / "abc"
    blobs = [tmp_path / f"models--{name}" / "blobs" / "0123" for name in ("alice--judge", "bob--judge")]
    snapshot.mkdir(parents=True)
    for blob in blobs:
        blob.parent.mkdir(parents=True)
        blob.write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    (snapshot / "vocab.txt").symlink_to(blobs[1])
    check_links(snapshot, ["config.json", "tokenizer.json"])
    with pytest.raises(ModelError, match=r"vocab\.txt is a link to .*bob--judge.*, outside the model's folder"):
        check_links(snapshot, ["config.json", "vocab.txt"])


def test_a_name_alone_is_one_of_the_user_s_and_public_is_public(push, facts):
    write_verdict(push.checkpoint, facts)
    status, said = push("--public", name="judge")
    assert status == 0, said
    assert not push.hub.repositories[NAME].private
    assert NAME in said


@pytest.mark.parametrize(("status", "rung"), [("fails", 1), ("not_ready", 3)])
def test_a_verdict_against_it_stops_it_before_the_hub_hears_of_it(status, rung, push, facts):
    told = write_verdict(push.checkpoint, facts, status, rung)
    code, said = push()
    assert code == 2
    assert f"the verdict speaks against this model: {told}" in said
    assert push.hub.seen == []
    if status == "not_ready":
        assert push("--although-not-ready")[0] == 0
        assert f"✗ {told}" in push.hub.repositories[NAME].files[CARD_FILE].decode()


def test_a_card_of_other_weights_or_of_somebody_else_is_refused(push, facts):
    write_verdict(push.checkpoint, replace(facts, digest="0" * 64))
    assert "was written for other weights" in push("--although-not-ready")[1]
    (push.checkpoint / CARD_FILE).write_text("# mine\n")
    assert "was not written by `rm-opt card`" in push()[1]
    assert push.hub.seen == []
    assert push("--although-not-ready")[0] == 0
    (push.checkpoint / CARD_FILE).write_bytes("# modèle\n".encode("latin-1"))
    assert "is no text in UTF-8, so it was not written by `rm-opt card`" in " ".join(
        push("--although-not-ready")[1].split()
    )


def test_options_that_a_push_would_not_heed_are_refused(push, facts, checkpoint, capsys):
    write_verdict(push.checkpoint, facts)
    for words in (("--license", "mit"), ("--evidence", "metrics.json"), ("--out", "card.md")):
        status, said = push(*words)
        assert (status, push.hub.seen) == (2, [])
        assert "would not change it" in " ".join(said.split())
    assert guard(lambda: app(["card", "--checkpoint", str(checkpoint), "--public"], standalone_mode=False)) == 2
    assert "give --push OWNER/NAME" in capsys.readouterr().err


def test_a_dry_run_says_all_and_asks_nobody(push, facts):
    write_verdict(push.checkpoint, facts)
    status, said = push("--dry-run", token=None)
    assert status == 0, said
    assert all(name in said for name in SENT)
    assert "KiB model.safetensors" in said
    assert "nothing was sent; it would be private, as alice/judge" in said
    assert "the hub was not asked; weights of an earlier push there are removed" in said
    assert push.hub.seen == []


def test_without_a_token_nothing_is_begun(push):
    status, said = push(token=None)
    assert status == 2
    assert "HF_TOKEN is not set" in said
    assert push.hub.seen == []


@pytest.mark.parametrize(
    ("token", "name", "says"),
    [
        ("hf_unknown", NAME, "does not know the token in HF_TOKEN"),
        (TOKEN, "bob/judge", "lets your token write nothing to bob/judge (You don't have the rights"),
        ("hf_reader", "reader/judge", "the token has no write access"),
    ],
)
def test_what_the_hub_refuses_is_named(token, name, says, push, facts):
    write_verdict(push.checkpoint, facts)
    status, said = push(name=name, token=token)
    assert status == 2
    assert says in " ".join(said.split())
    assert push.hub.repositories == {}


@pytest.mark.parametrize(("there", "words"), [(False, ()), (True, ("--public",))])
def test_a_repository_of_the_other_visibility_is_left_alone(there, words, push, facts):
    write_verdict(push.checkpoint, facts)
    push.hub.repositories[NAME] = StoredRepository(there, {"old": b"1"})
    status, said = push(*words)
    assert status == 2
    assert f"is there already and {'private' if there else 'public'}" in said
    assert push.hub.repositories[NAME].files == {"old": b"1"}


@pytest.mark.parametrize(
    ("part", "code", "says"),
    [
        ("/commit/", 500, "the hub failed with status 500 (the hub is out of order for [HF_TOKEN])"),
        ("/large/", 400, "the files did not arrive at the hub"),
        ("whoami", 0, "does not answer"),
    ],
)
def test_a_hub_that_fails_leaves_the_repository_as_it_was(part, code, says, push, facts):
    write_verdict(push.checkpoint, facts)
    push.hub.fail[part] = code
    status, said = push(name="judge")
    assert status == 2
    assert says in " ".join(said.split())
    assert not any(stored.files for stored in push.hub.repositories.values())
    if part == "/large/":
        push.hub.fail.clear()
        assert push()[0] == 0  # the same command begins again


def test_no_network_is_named():
    code = (
        "from rmcore.core.hub_upload import Repository\n"
        "try:\n    Repository('alice/judge', is_private=True, token='hf_alice')\n"
        "except RuntimeError as error:\n    print(error)"
    )
    own = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | own, capture_output=True, text=True, check=True
    )
    assert "the hub at http://127.0.0.1:9 does not answer" in done.stdout


def test_a_hub_that_is_switched_off_is_named(checkpoint, facts, monkeypatch, capsys):
    write_verdict(checkpoint, facts)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    words = ["card", "--push", NAME, "--checkpoint", str(checkpoint)]
    assert guard(lambda: app(words, standalone_mode=False)) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err
