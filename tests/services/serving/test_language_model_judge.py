"""A language model behind vLLM's own OpenAI interface as the judge: an untrained one, which the audit finds out."""

import os
import subprocess

import httpx
import pytest

from machine import free_ports, wait_for
from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import DataError
from rmcore.judging.answers import Question
from rmcore.judging.audit import audit
from rmcore.judging.language_model import LanguageModelJudge
from small_policies import new_policy

pytestmark = pytest.mark.services
START_SECONDS = 300


@pytest.fixture(scope="module")
def named(vllm, tmp_path_factory):
    place, port = tmp_path_factory.mktemp("chat"), free_ports(1)[0]
    command = [vllm, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", new_policy(place / "model")]
    command += ["--served-model-name", "chat", "--runner", "generate", "--generation-config", "vllm"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024", "--dtype", "float32"]
    with (place / "log").open("wb") as log:
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        process = subprocess.Popen(
            [*map(str, command), "--enforce-eager"], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        wait_for(lambda: process.poll() is not None or _answers(port), (place / "log").read_text, START_SECONDS)
        assert process.poll() is None, (place / "log").read_text()[-2000:]
        yield f"openai:chat@http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def _answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False


def test_its_probabilities_come_with_its_answers_and_its_tokens_are_counted(named, tmp_path):
    judge = LanguageModelJudge(named, JudgingConfig(answer_tokens=4), tmp_path)
    (reply,) = judge.endpoint.ask([Question((("user", "2 + 2?"),), tuple("0123456789"))])
    assert reply.model == "chat"
    assert judge.endpoint.served.startswith("root /")  # the folder of the model: another one of the same name differs
    assert reply.tokens_read > 0
    assert 0 < reply.tokens_written <= 4
    assert judge.endpoint.num_tokens == reply.tokens_read + reply.tokens_written


def test_an_untrained_model_gives_no_verdict_and_the_audit_says_so(named, gold_pairs, tmp_path):
    judge = LanguageModelJudge(named, JudgingConfig(mode="pairwise", answer_tokens=4), tmp_path)
    with pytest.raises(DataError, match=r"none of \d+ answers of the language model chat could be read"):
        audit(judge, gold_pairs[:60], num_probed=10)
    assert judge.num_unread == judge.endpoint.num_calls // 2  # each was asked once more
