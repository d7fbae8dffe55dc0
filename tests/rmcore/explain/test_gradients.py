from types import SimpleNamespace

import pytest
import torch

from random_models import model_of
from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.core.errors import ModelError
from rmcore.data.rendering import Rendering
from rmcore.explain.gradients import integrated_gradients
from rmcore.explain.spans import spans_of
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer

PROMPT = "How many apples are there?"
ANSWER = "Great question! There are 12 apples. You are right."


@pytest.fixture(params=["tiny", "lora", "gpt2", "gpt2 padded by eos", "bert", "roberta"])
def any_rm(request, tiny_folder):
    if request.param in ("tiny", "lora"):
        lora = LoraSettings() if request.param == "lora" else None
        config = ModelConfig(name=str(tiny_folder), max_seq_len=128, lora=lora)
        return BradleyTerryRM.new(config, seed=0, device=torch.device("cpu"))
    return model_of(request.param)


def test_attributions_add_up_and_the_model_is_as_it_was(any_rm):
    any_rm.model.train()
    wanted = {name: one.requires_grad for name, one in any_rm.model.named_parameters()}
    before = any_rm.score([PROMPT], [ANSWER])
    found = integrated_gradients(any_rm, PROMPT, ANSWER)
    assert found.total == pytest.approx(float(before[0]), abs=1e-5)
    assert abs(found.total - found.base) > 1e-3
    assert abs(found.error) <= 0.01 * max(1, abs(found.total - found.base))
    assert sum(one.value for one in found.tokens) == pytest.approx(found.total - found.base + found.error)
    read = {at for one in found.tokens for at in range(one.start, one.end)}
    assert read >= {at for at, character in enumerate(ANSWER) if character != " "}
    by_sentence = found.by_span(spans_of(ANSWER, "sentence", most=64))
    assert len(by_sentence) == 3
    assert sum(by_sentence) == pytest.approx(sum(one.value for one in found.tokens))
    assert any_rm.model.training
    assert wanted == {name: one.requires_grad for name, one in any_rm.model.named_parameters()}
    assert all(one.grad is None for one in any_rm.model.parameters())
    assert (any_rm.score([PROMPT], [ANSWER]) == before).all()


def test_the_base_is_the_reward_of_an_answer_of_pad_tokens(any_rm):
    """Read where the answer's own reward is read, and where the pad token may end a row, too."""
    found = integrated_gradients(any_rm, PROMPT, ANSWER)
    placed = any_rm.renderer.place_side(PROMPT, ANSWER)
    rows = torch.tensor([placed.side.ids])
    layer = any_rm.model.get_input_embeddings()
    with torch.no_grad():
        embedded = layer(rows).clone()
        for at, place in enumerate(placed.places):
            if place is not None:
                embedded[0, at] = layer.weight[any_rm.pad_id]
        any_rm.model.eval()
        plain = any_rm.model.get_base_model() if any_rm.has_adapters else any_rm.model
        options = {} if hasattr(plain, "score") else {"token_type_ids": torch.zeros_like(rows)}
        states = plain.base_model(inputs_embeds=embedded, attention_mask=torch.ones_like(rows), **options)[0]
        if hasattr(plain, "score"):
            last = max(at for at, token in enumerate(placed.side.ids) if token != any_rm.pad_id)
            expected = plain.score(states[:, last])
        else:
            pooler = getattr(plain.base_model, "pooler", None)
            expected = plain.classifier(states if pooler is None else pooler(states))
    assert found.base == pytest.approx(float(expected.squeeze()), abs=1e-5)


class Bag(torch.nn.Module):
    """A reward that is linear in the embeddings of the tokens."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, 4)
        self.head = torch.nn.Linear(4, 1)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.head((self.embedding(input_ids) * attention_mask[..., None]).sum(1)))


class Bagged(BradleyTerryRM):
    """Such a model behind the interface of a reward model."""

    device = torch.device("cpu")


def test_a_linear_reward_gets_its_own_terms():
    tokenizer = tiny_tokenizer()
    bag = Bag(len(tokenizer))
    bag.name_or_path = ""
    rm = Bagged(bag, tokenizer, Rendering("plain", 100))
    found = integrated_gradients(rm, PROMPT, ANSWER)
    placed = rm.renderer.place_side(PROMPT, ANSWER)
    worth = (bag.head.weight @ (bag.embedding.weight - bag.embedding.weight[rm.pad_id]).T).detach()
    expected = [
        float(worth[0, token]) for token, place in zip(placed.side.ids, placed.places, strict=True) if place is not None
    ]
    assert [one.value for one in found.tokens] == pytest.approx(expected, abs=1e-5)
    assert found.error == pytest.approx(0, abs=1e-5)
    assert found.num_steps == 32


def test_tokens_that_the_limit_cuts_off_are_not_there():
    rm = model_of("bert")
    long = " ".join([ANSWER] * 6)
    found = integrated_gradients(rm, PROMPT, long)
    assert found.tokens[-1].end < len(long)
    spans = spans_of(long, "sentence", most=64)
    assert found.by_span(spans)[-1] == 0


def test_a_model_without_token_embeddings_is_refused():
    rm = model_of("bert")
    rm.model.get_input_embeddings = lambda: None
    with pytest.raises(ModelError, match="no layer of token embeddings"):
        integrated_gradients(rm, PROMPT, ANSWER)
