"""A language model behind vLLM's own OpenAI interface as the judge."""

import socket

import pytest

from forwarder import Forwarder
from rmcore.config.judging import JudgingConfig
from rmcore.judging.answers import Question
from rmcore.judging.language_model import LanguageModelJudge
from rmcore.policy.sampling.sampler import SamplingSettings

pytestmark = pytest.mark.services


@pytest.fixture
def named(served):
    """A port for what vLLM answers on its own user's socket."""
    served.draw([[5, 6, 7]], SamplingSettings(1, max_new_tokens=1))  # it answers, also after a test that ended it

    def connect():
        vllm = socket.socket(socket.AF_UNIX)
        vllm.connect(f"{served._vllm._place.name}/s")
        return vllm

    forwarder = Forwarder(connect)
    yield f"openai:policy@{forwarder.address}/v1"
    forwarder.close()


def test_its_probabilities_come_with_its_answers_and_its_tokens_are_counted(named, tmp_path):
    judge = LanguageModelJudge(named, JudgingConfig(answer_tokens=4), tmp_path)
    (reply,) = judge.endpoint.ask([Question((("user", "2 + 2?"),), tuple("0123456789"))])
    assert reply.model == "policy"
    assert judge.endpoint.served.startswith("root /")  # the folder of the model: another one of the same name differs
    assert reply.tokens_read > 0
    assert 0 < reply.tokens_written <= 4
    assert judge.endpoint.budget.num_tokens == reply.tokens_read + reply.tokens_written
