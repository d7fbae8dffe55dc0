"""Each trainer's own request, as its public source builds it, against the real server: the reward is the library's.

    OpenRLHF  3c3be62 (0.11.0)     openrlhf/utils/agent.py, `_fetch_rewards_via_http`
    slime     624b824 (0.3.1)      slime/rollout/rm_hub/__init__.py, `remote_rm`, and slime/utils/data.py
    miles     31f1ca9 (0.1.0)      miles/rollout/rm_hub/__init__.py, `remote_rm`: the same payload

All post by aiohttp with no header of their own, so the token is in the address.
"""

import asyncio
import base64
from itertools import product

import aiohttp
import httpx
import pytest

from machine import PATIENCE_S
from rmcore.core.errors import ConfigError
from rmcore.data.rendering import Renderer, Rendering
from rmcore.serving.http_app import HttpSettings
from rmcore.serving.protocols import PROTOCOLS
from rmcore.serving.rendered import Rendered
from rmcore.serving.types import MAX_ROWS
from tests.support.chat_templates import LLAMA31, QWEN3, begin_with_bos
from torch_engine import answering_with

TOKEN = "token/of+this test".replace(" ", "_")
LOGIN = "rm:token%2Fof%2Bthis_test"
PAIRS = [
    ("What is 2 + 2?", "4"),
    ("What is 2 + 2?", "Five, I think."),
    ("Grüße! 🙂", ""),
    ("Count.", "one two " * 8 + "three"),
]
CLOSE = 1e-5


@pytest.fixture
def template():
    """The chat template in place of tiny's own."""
    return


@pytest.fixture
def rewarder(rm, template):
    if template is not None:
        rm.tokenizer.chat_template = template
        if template is LLAMA31:
            begin_with_bos(rm.tokenizer)
    rm.renderer = Renderer(rm.tokenizer, Rendering("chat", 256))
    return rm


@pytest.fixture
def server(rewarder, tmp_path):
    with answering_with(rewarder, tmp_path, token=TOKEN, protocols=tuple(PROTOCOLS)) as app:
        yield app


async def post(url, payload):
    """What all four do: aiohttp, JSON, the status, the JSON of the answer."""
    async with aiohttp.ClientSession() as session, session.post(url, json=payload, timeout=PATIENCE_S) as answer:
        answer.raise_for_status()
        return await answer.json()


def ask(server, path, payload):
    return asyncio.run(post(f"http://{LOGIN}@127.0.0.1:{server.port}/{path}", payload))


def openrlhf_payload(tokenizer, messages, response, label="4", *, apply_chat_template=True):
    """`SingleTurnAgentExecutor.execute` of OpenRLHF: the query is what the prompt's and the action's tokens read."""
    prompt = messages[-1]["content"]
    if apply_chat_template:
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    action = tokenizer(response + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(text=prompt, add_special_tokens=False)["input_ids"] + action
    query = tokenizer.decode(tokens, skip_special_tokens=False)
    return {"query": [query], "prompts": [prompt], "labels": [label]}


@pytest.mark.parametrize("template", [None, QWEN3, LLAMA31], ids=["tiny", "qwen3", "llama31"])
def test_openrlhfs_remote_reward_model_gives_the_librarys_rewards(server, rewarder, template):
    """A policy stops at its end token, where Qwen's template goes on with a line break, and Llama's has another one."""
    for (prompt, response), apply_chat_template in product(PAIRS, (True, False)):
        payload = openrlhf_payload(
            rewarder.tokenizer, [{"role": "user", "content": prompt}], response, apply_chat_template=apply_chat_template
        )
        if apply_chat_template and template is LLAMA31:
            payload["query"] = [payload["query"][0].removesuffix("<|im_end|>") + "<|eot_id|>"]
        answer = ask(server, "get_reward", payload)
        expected = rewarder.score([prompt], [response]).item()
        assert answer["rewards"] == answer["scores"] == [pytest.approx(expected, abs=CLOSE)]


@pytest.mark.parametrize("template", [None, QWEN3, LLAMA31], ids=["tiny", "qwen3", "llama31"])
def test_slimes_remote_reward_is_the_librarys_as_a_number(server, rewarder, template):
    """The response has the policy's end token: slime keeps special tokens (`--rollout-skip-special-tokens` is off)."""
    end = "<|eot_id|>" if template is LLAMA31 else "<|im_end|>"
    for prompt, response in PAIRS:
        messages = [{"role": "user", "content": prompt}]
        rendered = rewarder.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for given in (messages, rendered, prompt):
            reward = ask(server, "slime", {"prompt": given, "response": response + end, "label": "4"})
            assert reward == pytest.approx(rewarder.score([prompt], [response]).item(), abs=CLOSE)


@pytest.mark.parametrize(
    ("path", "payload", "field"),
    [
        ("get_reward", {"query": ["a", "b"], "prompts": ["a"]}, "prompts"),
        ("get_reward", {"queries": ["a"]}, "query"),
        ("get_reward", {"query": [""]}, "inputs.0"),
        ("slime", {"prompt": "a"}, "response"),
        ("slime", {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "response": "a"}, "inputs.0"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name_and_logged(server, capfd, path, payload, field):
    for _ in range(2):
        answer = httpx.post(f"http://{LOGIN}@127.0.0.1:{server.port}/{path}", json=payload, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]) == (422, "invalid"), answer.text
        assert answer.json()["field"] == field or field is ..., answer.text
    assert capfd.readouterr().err.count(f"warning: /{path}: refused: ") == 1
    assert server._pending_rows == 0


def test_too_many_inputs_are_refused_before_any_is_read(server, monkeypatch):
    read = []
    monkeypatch.setattr(Rendered, "text", lambda _, text: read.append(text))
    address = f"http://{LOGIN}@127.0.0.1:{server.port}/get_reward"
    answer = httpx.post(address, json={"query": ["a"] * (MAX_ROWS + 1)}, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["field"], read) == (422, "query", [])


ROUTES = ["/get_reward", "/slime"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES)
def test_every_protocol_asks_for_the_token(server, path):
    basic = [f"Basic {base64.b64encode(one.encode()).decode()}" for one in (f"{TOKEN}:", "rm:", "rm:other", TOKEN)]
    for login in [None, *basic, f"Basic {TOKEN}", "Basic é", "Bearer", "Basic"]:
        headers = {} if login is None else {"Authorization": login.encode()}
        address = f"http://127.0.0.1:{server.port}{path}"
        answer = httpx.post(address, headers=headers, content=b"{", timeout=PATIENCE_S)
        assert answer.status_code == 401, login
        assert "Basic" not in answer.headers["WWW-Authenticate"]  # for which a browser would keep a password


@pytest.mark.slow
def test_a_protocol_is_off_unless_it_is_named(rm, tmp_path):
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with answering_with(rm, tmp_path, token=TOKEN) as app:
        address = f"127.0.0.1:{app.port}"
        for path in ROUTES:
            assert httpx.post(f"http://{address}{path}", json={}, headers=bearer, timeout=PATIENCE_S).status_code == 404
        assert httpx.get(f"http://{LOGIN}@{address}/health", timeout=PATIENCE_S).status_code == 401
        assert httpx.get(f"http://{address}/health", headers=bearer, timeout=PATIENCE_S).status_code == 200
    with pytest.raises(ConfigError, match=r"does not speak sglang; take any of openrlhf, slime"):
        HttpSettings(protocols=("slime", "sglang"))
