"""Steps that run out of memory are done again in smaller pieces, and the training is the one of small pieces."""

import copy

import numpy as np
import pytest
import torch

from rmcore.core.errors import TrainingError
from rmcore.training.step import PartialUpdateError
from rmcore.training.train_mode import without_dropout

LARGE = 1600


def limit_memory(model, most_tokens, calls=None):
    """A device that holds the activations of so many padded tokens; `calls` limits which forward passes it is for."""
    forward, seen = model.forward, []

    def limited(*args, input_ids, **rest):
        seen.append(input_ids.numel())
        if input_ids.numel() > most_tokens and (calls is None or len(seen) in calls):
            raise torch.OutOfMemoryError(f"{input_ids.numel()} tokens do not fit")
        return forward(*args, input_ids=input_ids, **rest)

    model.forward = limited
    return seen


@pytest.fixture
def stepper_of(make_stepper, gold_pairs):
    """Make a Stepper of a model on 24 gold pairs, 8 a step."""

    def make(rm, *, token_budget=LARGE, **changes):
        pairs = rm.renderer.tokenize_pairs(gold_pairs[:24])
        return make_stepper(rm, pairs, token_budget=token_budget, pairs_per_step=8, warmup_steps=0, **changes)

    return make


def run_steps(stepper, num=3):
    for step in range(num):
        stepper.run(step + 1, *stepper.feed[step])
    return [result for result, _ in stepper.results()]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sam"])
def test_halving_leads_to_the_trajectory_of_the_small_budget(rm, stepper_of, capsys, optimizer):
    other, begin = copy.deepcopy(rm), copy.deepcopy(rm.model)
    stepper = stepper_of(rm, optimizer=optimizer)
    limit_memory(rm.model, LARGE // 8)
    with without_dropout(rm.model):
        survived = run_steps(stepper)
    assert stepper.token_budget <= LARGE // 8
    said = capsys.readouterr().err
    assert said.count("warning: step 1 ran out of memory") == 2
    assert said.count(f"token_budget={stepper.token_budget}") == 1
    with without_dropout(other.model):
        small = run_steps(stepper_of(other, optimizer=optimizer, token_budget=stepper.token_budget))
    for mine, theirs in zip(survived, small, strict=True):
        assert mine.num_tokens == theirs.num_tokens
        np.testing.assert_allclose([mine.loss, mine.grad_norm], [theirs.loss, theirs.grad_norm], rtol=1e-5)
    # Sums may round by where memory happens to lie, and Adam moves a weight whose gradient is nearly 0 by up to lr:
    # so the whole update is compared, not each weight.
    start, mine, theirs = (torch.cat([p.flatten() for p in m.parameters()]) for m in (begin, rm.model, other.model))
    assert (mine - theirs).norm() < 1e-3 * (theirs - start).norm()


def test_packed_rows_are_halved_down_to_the_dearest_pair(rm, stepper_of, capsys):
    """A pair that shares its prompt needs less than two of its longest sides, and is tried at that."""
    stepper = stepper_of(rm, packing=rm.packing())
    least = stepper.feed.least_budget()
    assert least < 2 * max(pair.num_tokens for pair in stepper.feed.pairs)
    limit_memory(rm.model.base_model, least)
    run_steps(stepper, 1)
    assert least <= stepper.token_budget < LARGE // 2
    limit_memory(rm.model.base_model, 1)
    with pytest.raises(TrainingError, match=f"one pair needs up to {least} .*max_seq_len"):
        stepper.run(2, *stepper.feed[1])


@pytest.mark.slow
def test_a_repeated_step_draws_the_same_dropout(rm, stepper_of):
    """Memory fails in the last micro-batch of a step, when the others have drawn."""
    for layer in rm.model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    other = copy.deepcopy(rm)
    outcomes = []
    budget = LARGE // 2
    for model in (rm, other):
        stepper = stepper_of(model, token_budget=budget)
        last = len(stepper.feed[0][1])
        assert last > 1
        limit_memory(model.model, 0 if model is rm else LARGE, calls={last})
        torch.manual_seed(5)
        outcomes.append((run_steps(stepper), torch.get_rng_state()))
        budget = stepper.token_budget
    assert budget < LARGE // 2
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.slow
def test_memory_failing_in_the_second_pass_of_sam_restores_the_weights(rm, stepper_of):
    other = copy.deepcopy(rm)
    stepper = stepper_of(rm, optimizer="sam")
    passes = len(stepper.feed[0][1])
    seen = limit_memory(rm.model, 0, calls={passes + 1})  # the first micro-batch at the perturbed weights
    result = run_steps(stepper, 1)
    assert stepper.token_budget <= LARGE // 2
    assert len(seen) > 2 * passes
    again = stepper_of(other, optimizer="sam", token_budget=stepper.token_budget)
    assert result == run_steps(again, 1)
    assert all(torch.equal(value, rm.model.state_dict()[name]) for name, value in other.model.state_dict().items())


def test_where_single_pairs_do_not_fit_it_says_what_to_do(rm, stepper_of):
    stepper = stepper_of(rm)
    longest = max(pair.num_tokens for pair in stepper.feed.pairs)
    seen = limit_memory(rm.model, 1)
    with pytest.raises(TrainingError, match=f"one pair needs up to {2 * longest} .*max_seq_len"):
        run_steps(stepper, 1)
    assert stepper.token_budget == 2 * longest  # tried, not only concluded
    assert seen[-1] <= 2 * longest


def test_an_update_that_runs_out_of_memory_is_not_repeated(rm, stepper_of):
    """Half of the weights may have moved: doing it again would move them twice."""
    stepper = stepper_of(rm)
    calls = []

    def fail(**_):
        calls.append(1)
        raise torch.OutOfMemoryError("no room for moments")

    stepper.context.optimizer.step = fail
    with pytest.raises(PartialUpdateError, match="state does not fit"):
        run_steps(stepper, 1)
    assert len(calls) == 1
    assert stepper.token_budget == LARGE
