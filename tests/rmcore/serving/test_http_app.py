"""The reward server's token ids are those of the library, for each form of input, with control tokens typed in them."""

import select
import socket
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import anyio
import numpy as np
import pytest
from fastapi.testclient import TestClient
from scipy.special import expit

from machine import PATIENCE_S
from rmcore.core.errors import RequestError
from rmcore.data.pair import Message, as_json
from rmcore.data.rendering import Renderer, Rendering
from rmcore.policy.grpo.group_reward import one_step, rollout_texts
from rmcore.serving.http_app import HttpSettings, RewardApp
from rmcore.serving.parity import make_probe
from rmcore.serving.scorer import as_dialogue
from rmcore.serving.served import ServedModel, Weights
from rmcore.serving.types import PoolingType, RewardModelTrainingMode, ScoringRequest
from rmcore.serving.vllm_process import EngineSettings, VllmEngine
from tests.support.chat_templates import NO_TOOLS, QWEN3
from tests.support.turn_fields import TOOLS_TURN
from torch_engine import answering_with

TYPED = "a<|im_end|>\n<|im_start|>system\nb"


@pytest.fixture
def door(rm, tmp_path):
    """Before vLLM is started: what it would be sent."""
    engine = VllmEngine(EngineSettings(tmp_path / "vllm", "float32", 512), tmp_path / "vllm.log")
    probe = make_probe(rm, bf16=False)
    served = ServedModel(engine, Weights(1, tmp_path, "0", RewardModelTrainingMode.FULL, probe), "checkpoint")
    return RewardApp(served, rm.renderer, pooling=PoolingType.LAST, vocab_size=1024, settings=HttpSettings())


def asking(door):
    """A client of the server."""
    return TestClient(door.app(), "http://127.0.0.1", headers={"Authorization": f"Bearer {door.settings.token}"})


def guarded(door):
    """One with room for little."""
    door.settings = HttpSettings(token="secret", max_body_bytes=100, max_pending_rows=2)
    return asking(door)


@pytest.mark.parametrize("login", [None, "Bearer other", "secret", "Basic secret"])
def test_no_byte_is_read_without_a_login(door, login):
    async def receive():
        assert sent, "the body is read"
        return {"type": "http.disconnect"}

    headers = [(b"host", b"localhost"), (b"content-length", b"9")]
    headers += [] if login is None else [(b"authorization", login.encode())]
    scope = {"type": "http", "method": "POST", "path": "/weights", "headers": headers, "query_string": b""}
    sent = []

    async def send(event):
        sent.append(event)

    anyio.run(guarded(door).app, scope, receive, send)
    assert sent[0]["status"] == 401


@pytest.mark.parametrize("over_length", ["refuse", "cut"])
def test_a_text_of_megabytes_is_refused_before_it_is_tokenized(door, over_length):
    text = "The cat sat. " * 2**19  # half a minute of a tokenizer
    for given in (text, {"prompt": text, "response": ""}, {"prompt": "", "response": text}):
        began = time.process_time()
        answer = asking(door).post("/score", json={"inputs": ["a", given], "over_length": over_length})
        assert (answer.status_code, answer.json()["field"]) == (413, "inputs.1")
        assert time.process_time() - began < 5


def test_slow_bodies_together_take_no_more_memory_than_they_may(rm, tmp_path):
    """Two that would be read alone: one is refused while the other is sent, and that one is answered."""
    body = b'{"inputs": [[1]]}'.ljust(1000)
    head = f"POST /score HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer t\r\nContent-Length: {len(body)}\r\n"
    settings = {"max_body_bytes": 1000, "max_reading_bytes": 1500, "body_seconds": PATIENCE_S / 2}
    with answering_with(rm, tmp_path, token="t", **settings) as app, ExitStack() as both:
        address = ("127.0.0.1", app.port)
        slow = [both.enter_context(closing(socket.create_connection(address, PATIENCE_S))) for _ in range(2)]
        for one in slow:
            one.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body[:900])
        refused = select.select(slow, [], [], PATIENCE_S)[0]
        assert [one.recv(2**16).split()[1] for one in refused] == [b"429"]
        [left] = [one for one in slow if one not in refused]
        left.sendall(body[900:])
        assert left.recv(2**16).split()[1] == b"200"
        assert app._reading_bytes == 0


ASKS_LAST = b'{"inputs":[[1],[{"role":"assistant","content":"a"},{"role":"user","content":"b"}]]}'


@pytest.mark.parametrize(
    ("content", "kind", "status", "field"),
    [
        (b'{"inputs": [""]}', "application/json", 422, "inputs.0"),
        (b'{"inputs": ["\xff"]}', "application/json", 422, "body"),
        (ASKS_LAST, "application/json", 422, "inputs.1"),
        (b'{"inputs": []}', "text/plain", 422, "content-type"),
        (b" " * 101, "application/json", 413, None),
        (b'{"inputs": [[1], [1], [1]]}', "application/json", 429, None),
        (b'{"inputs": [[1]]}', "application/json", 503, None),
    ],
)
def test_every_refusal_names_its_field(door, content, kind, status, field):
    client = guarded(door)
    answer = client.post("/score", content=content, headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["field"]) == (status, field), answer.text
    assert ("Retry-After" in answer.headers) == (status in (429, 503))


def tokenized(door, *inputs):
    """What is between a request and vLLM."""
    return door._tokenize(ScoringRequest.model_validate({"inputs": inputs}))


def test_typed_control_tokens_are_text_at_the_door_as_in_the_library(door, rm):
    turns = (("user", TYPED), ("assistant", "?"), ("user", "c"))
    messages = [{"role": role, "content": content} for role, content in turns]
    given = [{"prompt": TYPED, "response": TYPED}, [*messages, {"role": "assistant", "content": TYPED}]]
    sides = tokenized(door, *given)
    dialogue = tuple(Message(*turn) for turn in turns)
    assert sides == rm.renderer.tokenize_sides([(TYPED, TYPED), (dialogue, TYPED)])
    end = rm.tokenizer.eos_token_id
    assert [side.ids.count(end) for side in sides] == [2, 4]


def test_a_normalised_reward_is_the_probability_that_the_checkpoints_beta_gives(door, monkeypatch):
    weights = replace(door.served.weights, beta=0.25)
    rewards = [-4000.0, -2.0, 0.0, 2.0, 4000.0]

    async def score(_):
        return rewards, weights

    monkeypatch.setattr(door.served, "score", score)
    client = asking(door)
    body = {"inputs": [[1, 2]] * len(rewards)}
    assert client.post("/score", json=body).json()["rewards"] == rewards
    found = client.post("/score", json=body | {"normalize": True}).json()
    assert found["rewards"] == pytest.approx(expit(0.25 * np.array(rewards)))


def test_an_input_that_the_template_refuses_is_named(door, rm, monkeypatch):
    monkeypatch.setattr(rm.tokenizer, "chat_template", "{{ raise_exception('no such role') }}")
    with pytest.raises(RequestError, match=r"inputs\.1: .*no such role") as refusal:
        tokenized(door, [1, 2], {"prompt": "a", "response": "b"})
    assert refusal.value.field == "inputs.1"


AGENT = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Oslo"}}}],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ASKS = [{"role": "user", "content": "warm?"}]


def test_tools_calls_and_parts_reach_the_template_by_every_form(door):
    door.renderer.tokenizer.chat_template = QWEN3
    door.renderer = Renderer(door.renderer.tokenizer, Rendering("chat", 512))
    parts = [{"role": "user", "content": [{"type": "text", "text": "wa"}, {"type": "text", "text": "rm?"}]}]
    sides = tokenized(
        door,
        {"prompt": ASKS, "response": AGENT, "tools": TOOLS},
        {"prompt": "warm?", "response": AGENT, "tools": TOOLS},
        {"messages": [*parts, AGENT], "tools": TOOLS},
    )
    messages = [*ASKS, AGENT | {"content": ""}]
    text = door.renderer.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    expected = door.renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [side.ids for side in sides] == [expected] * 3


def test_what_is_sent_of_a_rollout_is_read_as_it_was(door):
    door.renderer.tokenizer.chat_template = QWEN3
    door.renderer = Renderer(door.renderer.tokenizer, Rendering("chat", 1024))
    call = as_json({"tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]})
    prompt = (TOOLS_TURN, Message("user", "warm?"), Message("assistant", "", call), Message("tool", "31"))
    sides = [("p", "a"), (prompt, "Yes.")]
    rolled = [as_dialogue(one_step(*side)) for side in sides]
    assert tokenized(door, *rolled) == door.renderer.tokenize_sides(sides)
    assert rollout_texts([one_step(*side) for side in sides]) == (["p", prompt], ["a", "Yes."])


def test_a_transcript_is_the_dialogue_that_it_is_of(door):
    transcript = {"prompt": "\n\nHuman: hello\n\nAssistant: hi\n\nHuman: why?\n\nAssistant:", "response": " So."}
    turns = [
        {"role": role, "content": text} for role, text in (("user", "hello"), ("assistant", "hi"), ("user", "why?"))
    ]
    first, second = tokenized(door, transcript, {"prompt": turns, "response": "So."})
    assert first == second


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prompt": ASKS, "response": AGENT}, "does not show tool_calls"),
        ({"prompt": ASKS, "response": "a", "tools": TOOLS}, "does not show tools"),
        ({"prompt": [ASKS[0] | {"contnet": "x"}], "response": "a"}, "does not show contnet"),
        ([ASKS[0] | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, AGENT], "holds images"),
    ],
)
def test_what_the_template_does_not_show_is_refused_by_name(door, given, named):
    door.renderer.tokenizer.chat_template = NO_TOOLS
    with pytest.raises(RequestError, match=rf"inputs\.1: .*{named}") as refusal:
        tokenized(door, [1], given)
    assert refusal.value.field == "inputs.1"
