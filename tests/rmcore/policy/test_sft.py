"""Fine-tuning of a small policy: what counts in the loss, what the order depends on, what is refused."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen2Config

from rmcore.core.errors import DataError, TrainingError
from rmcore.policy.sft import TOKEN_BUDGET, Example, _batches, fine_tune, response_log_probs

VOCABULARY = 40
token = st.integers(0, VOCABULARY - 1)
example = st.builds(
    Example, st.lists(token, min_size=1, max_size=9).map(tuple), st.lists(token, min_size=1, max_size=9).map(tuple)
)


def new_model(seed=0):
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture(scope="module")
def model():
    return new_model().eval()


def drawn(num, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 9, size=(num, 2))
    return [Example(*(tuple(rng.integers(VOCABULARY, size=size).tolist()) for size in both)) for both in sizes]


def tune(model, examples, **changes):
    """The losses of all steps, and what `fine_tune` returns."""
    losses = []
    arguments = {"epochs": 2, "lr": 0.01, "seed": 0} | changes
    mean = fine_tune(model, examples, on_step=lambda done, total, loss: losses.append((done, total, loss)), **arguments)
    return losses, mean


@torch.inference_mode()
def alone(model, one):
    """log p(response | prompt) in float64, from the definition."""
    logits = model(input_ids=torch.tensor([one.prompt + one.response])).logits[0].double()
    logs = torch.log_softmax(logits, dim=1)
    return sum(float(logs[len(one.prompt) + place - 1, chosen]) for place, chosen in enumerate(one.response))


@pytest.mark.slow
@settings(max_examples=20)
@given(examples=st.lists(example, min_size=1, max_size=5))
def test_log_probabilities_are_those_of_each_response_alone(model, examples):
    found = response_log_probs(model, examples)
    assert found.tolist() == pytest.approx([alone(model, one) for one in examples], rel=1e-4, abs=1e-4)


def test_the_loss_of_a_step_is_the_mean_over_its_response_tokens(model):
    examples = drawn(20)
    expected = -sum(alone(model, one) for one in examples) / sum(len(one.response) for one in examples)
    [(done, total, first)], mean = tune(new_model(), examples, epochs=1)
    assert (done, total) == (1, 1)
    assert first == mean == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_what_can_be_memorised_is_and_the_answer_depends_on_the_prompt():
    model, examples = new_model(), drawn(6)
    losses, mean = tune(model, examples, epochs=80)
    assert len(losses) == 80
    assert mean == losses[-1][2]
    assert mean < 0.05 < losses[0][2] / 10
    log_probs = response_log_probs(model, examples).tolist()
    turned = [Example(one.prompt, other.response) for one, other in pairwise([*examples, examples[0]])]
    assert min(log_probs) > max(response_log_probs(model, turned).tolist())


def weights(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.slow
def test_a_seed_gives_one_training_without_dropout_whatever_torch_drew_before():
    examples = [Example(one.prompt * 10, one.response * 10) for one in drawn(100)]  # several steps a pass
    found = []
    for seed, disturbance in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(disturbance)
        model = new_model().train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.9 if disturbance == 2 else 0.0  # which stays off
        losses, _ = tune(model, examples, seed=seed, epochs=1)
        assert len(losses) > 1
        found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])


@settings(max_examples=25)
@given(sizes=st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=60), seed=token)
def test_every_pass_has_each_example_once_and_no_step_is_above_its_budget(sizes, seed):
    examples = [Example((0,) * prompt, (1,) * response) for prompt, response in sizes]
    batches = list(_batches(examples, random.Random(seed)))  # noqa: S311
    assert sorted(index for batch in batches for index in batch) == list(range(len(examples)))
    for batch in batches:
        assert batch
        assert len(batch) * max(examples[index].num_tokens for index in batch) <= TOKEN_BUDGET
    rng = random.Random(seed)  # noqa: S311
    assert batches == list(_batches(examples, rng))
    if len(batches) > 8:
        assert batches != list(_batches(examples, rng))  # the next pass has another order


@pytest.mark.parametrize(
    ("examples", "words"),
    [([], "0 examples"), ([Example((1,), (2,) * TOKEN_BUDGET)], rf"at most {TOKEN_BUDGET + 1} tokens")],
)
def test_nothing_and_what_no_step_holds_are_refused(model, examples, words):
    with pytest.raises(DataError, match=words):
        tune(model, examples)


def test_a_broken_model_is_refused_at_once_with_the_settings_to_change():
    model = new_model()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    before = weights(model)
    with pytest.raises(TrainingError, match=r"nan at step 0 .* rate 0\.01: .*policy\.base.* as policy\.name"):
        tune(model, drawn(4))
    assert torch.equal(torch.nan_to_num(weights(model)), torch.nan_to_num(before))
