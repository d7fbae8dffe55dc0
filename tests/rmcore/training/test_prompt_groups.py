"""Pairs of one prompt side by side: every pair once, the same loss and gradient, fewer tokens."""

from collections import Counter

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError
from rmcore.data.rendering import TokenizedPair, TokenizedSide
from rmcore.models.packing.forward import find_packing, rewards_of
from rmcore.training.feed import make_feed
from rmcore.training.prompt_groups import GroupedOrder, PromptGroups, find_prompt_groups
from rmcore.training.ranks import ALONE, Ranks

PAD, VOCABULARY, LONGEST = 1, 40, 48
SHAPE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 1,
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "max_position_embeddings": LONGEST + 2,
}  # fmt: skip
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS = {
    "causal": lambda: hf.Qwen2Config(**SHAPE, num_key_value_heads=2, bos_token_id=None, eos_token_id=2),
    "encoder": lambda: hf.BertConfig(**SHAPE, **UNDROPPED),
}


def drawn_pairs(num_prompts=6, answers=5, pairs=7, seed=0):
    """Pairs of few answers a prompt, so that answers stand in several of them."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt in range(num_prompts):
        asked = rng.integers(3, VOCABULARY, 6).tolist()
        texts = [[*asked, *rng.integers(3, VOCABULARY, rng.integers(2, 9)).tolist(), 3 + at] for at in range(answers)]
        for _ in range(pairs):
            chosen, rejected = (TokenizedSide(texts[at], 0) for at in rng.choice(answers, 2, replace=False))
            found.append(TokenizedPair(f"{len(found)}", chosen, rejected, None, f"prompt {prompt}"))
    return found


PAIRS = drawn_pairs()


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request):
    torch.manual_seed(0)
    found = hf.AutoModelForSequenceClassification.from_config(CONFIGS[request.param]())
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return found.double()


@pytest.fixture(scope="module")
def packing(model):
    found = find_packing(model.float(), longest_side=LONGEST, precision="fp32", pad_id=PAD)
    model.double()
    return found


def feed(packing, size, ranks=ALONE, pairs=PAIRS, budget=400, **train):
    config = TrainConfig(pairs_per_step=12, group_prompts=size, **train)
    return make_feed(
        pairs, config, num_steps=8, seed=3, token_budget=budget, pad_id=PAD, ranks=ranks, packing=packing
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=60), st.integers(2, 6),
    st.integers(1, 9), st.integers(0, 5),
)  # fmt: skip
def test_an_epoch_has_every_pair_once_in_groups_of_one_prompt(pairs, size, per_step, seed):
    prompts, answers = np.array(pairs).T
    answers = prompts * 10 + answers
    groups = PromptGroups(prompts, np.unique(answers, return_inverse=True)[1], size)
    steps = -(-len(pairs) // per_step)
    order = GroupedOrder(groups, per_step, 2 * steps, seed)
    for epoch in range(2):
        walked = [index for step in range(epoch * steps, (epoch + 1) * steps) for index in order[step]]
        assert sorted(walked) == list(range(len(pairs)))
        runs = 1 + int((np.diff(prompts[walked]) != 0).sum())
        # As few as there are groups, and fewer only where groups of one prompt happen to meet.
        assert runs <= sum(-(-count // size) for count in Counter(prompts.tolist()).values())
    again = GroupedOrder(groups, per_step, 2 * steps, seed)
    assert [order[step] for step in range(2 * steps)] == [again[step] for step in range(2 * steps)]


def test_pairs_of_one_chosen_answer_stand_together():
    groups = find_prompt_groups(PAIRS, 32)
    (walked,) = GroupedOrder(groups, len(PAIRS), 1, 0)[:]
    changes = int((np.diff(groups.answers[walked]) != 0).sum())
    assert changes == len(set(groups.answers)) - 1
    assert len(set(groups.prompts)) == 6


def test_pairs_that_say_nothing_of_their_prompt_are_each_alone():
    bare = [TokenizedPair(one.pair_id, one.chosen, one.rejected) for one in PAIRS]
    assert len(set(find_prompt_groups(bare, 4).prompts)) == len(PAIRS)


def outcome(model, batches, num_pairs):
    """Margins of the pairs of a step and the gradient of its summed loss."""
    model.zero_grad()
    margins = torch.zeros(num_pairs, dtype=torch.float64)
    for batch in batches:
        rewards = rewards_of(model, batch.rows)
        own = rewards[: batch.num_pairs] - rewards[batch.num_pairs :]
        (-logsigmoid(own).sum()).backward()
        margins[list(batch.indices)] = own.detach()
    return margins, torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def test_what_is_shared_changes_neither_margins_nor_gradient(model, packing):
    grouped = feed(packing, 5)
    for step in range(3):  # an epoch
        indices, together = grouped[step]
        pairs = [PAIRS[index] for index in indices]
        each = feed(packing, 1, pairs=pairs).cut(range(len(pairs)), 400)
        assert sorted(place for batch in together for place in batch.indices) == list(range(len(pairs)))
        assert sum(batch.rows.num_tokens for batch in together) < sum(batch.rows.num_tokens for batch in each)
        assert all(batch.rows.num_tokens <= 400 for batch in together)
        (ours, our_gradient), (theirs, their_gradient) = (
            outcome(model, batches, len(pairs)) for batches in (together, each)
        )
        assert torch.allclose(ours, theirs, atol=1e-10)
        # Norms of the causal model compute in float32, whatever its weights are.
        assert torch.allclose(our_gradient, their_gradient, atol=1e-6 * float(their_gradient.abs().max()))


def test_several_processes_share_whole_groups_and_compute_each_pair_once(packing):
    for step in range(3):
        shares = [feed(packing, 4, Ranks(rank, 3))[step] for rank in range(3)]
        indices = shares[0][0]
        counted = [place for _, batches in shares for one in batches if not one.idle for place in one.indices]
        assert sorted(counted) == list(range(len(indices)))
        assert len({len(batches) for _, batches in shares}) == 1


def test_one_prompt_alone_is_shared_out_among_the_processes(packing):
    pairs = drawn_pairs(num_prompts=1, pairs=12)
    shares = [feed(packing, 12, Ranks(rank, 3), pairs=pairs)[0][1] for rank in range(3)]
    assert all(not batch.idle for batches in shares for batch in batches)
    assert all(sum(batch.num_pairs for batch in batches) == 4 for batches in shares)


def test_a_group_that_is_larger_than_the_budget_is_cut_between_pairs(packing):
    grouped = feed(packing, 7, budget=40)
    for step in range(3):
        indices, batches = grouped[step]
        assert sum(one.num_pairs for one in batches) == len(indices)
        assert all(one.rows.num_tokens <= 40 for one in batches)


def test_where_nothing_can_be_shared_it_is_refused(packing):
    with pytest.raises(ConfigError, match="share nothing"):
        feed(None, 4)
    with pytest.raises(ConfigError, match="another is given"):
        make_feed(
            PAIRS, TrainConfig(group_prompts=2), num_steps=1, seed=0, token_budget=400, pad_id=PAD, ranks=ALONE,
            packing=packing, order=[[0]],
        )  # fmt: skip
    for settings in ({"batching": "plain"}, {"packing": False}, {"curriculum": "easy_first"}):
        with pytest.raises(ValueError, match="an order of its own"):
            TrainConfig(group_prompts=2, **settings)
