"""What travels: the forms of an input, a parity probe, and errors that name the field."""

import json
import math

import pytest
import torch
from pydantic import ValidationError

from rmcore.config.model import ModelConfig
from rmcore.core.errors import ServingError
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.parity import BF16_TOLERANCE, FLOAT32_TOLERANCE, check_probe, make_probe
from rmcore.serving.types import MAX_ROWS, ChatMessage, PromptResponse, RewardProbe, ScoringRequest

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_each_form_is_taken_for_what_it_is_and_survives_the_wire():
    request = ScoringRequest.from_list(["text", MESSAGES, [1, 0, 7], {"prompt": "a", "response": ""}])
    text, messages, ids, pair = request.inputs
    assert text == "text"
    assert messages == (ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="b"))
    assert ids == (1, 0, 7)
    assert pair == PromptResponse(prompt="a", response="")
    assert ScoringRequest.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("", "inputs.1.text"),
        ([], "inputs.1"),
        (None, "inputs.1"),
        ([1, -2], "inputs.1.token_ids.1"),
        ([1, 2.0], "inputs.1.token_ids.1"),
        ([True, False], "inputs.1.token_ids.0"),
        (MESSAGES[:1], "inputs.1.messages"),
        ([*MESSAGES, {"role": "user", "content": "c"}], "inputs.1.messages"),
        ([{"role": "", "content": "a"}, MESSAGES[1]], "inputs.1.messages.0.role"),
        ({"prompt": "a"}, "inputs.1.pair.response"),
        ({"prompt": "a", "response": "b", "weight": 1}, "inputs.1.pair.weight"),
    ],
)
def test_an_error_names_the_field(bad, field):
    with pytest.raises(ValidationError) as caught:
        ScoringRequest.from_list(["good", bad])
    assert ".".join(map(str, caught.value.errors()[0]["loc"])).startswith(field)
    with pytest.raises(ValidationError):
        ScoringRequest.model_validate_json(json.dumps({"inputs": ["good", bad]}))


REWARDS = {"token_ids": ((1,), (2,)), "tolerance": 1.0}


@pytest.mark.parametrize(
    "make",
    [
        *(lambda given=given: ScoringRequest.from_list(["a"], **given)
          for given in ({"normalise": True}, {"over_length": "x"}, {"policy_version": -1}, {"normalize": "maybe"})),
        lambda: ScoringRequest.from_list(["a"] * (MAX_ROWS + 1)),
        lambda: setattr(ScoringRequest.from_list(["a"]), "normalize", True),
        *(lambda rewards=rewards: RewardProbe(rewards=rewards, **REWARDS)
          for rewards in ((float("nan"), 0.5), (0.5, float("inf")), (0.5,), (0.5,) * 3)),
    ],
)  # fmt: skip
def test_an_unknown_setting_too_many_rows_a_change_and_rewards_that_do_not_fit_are_refused(make):
    assert len(ScoringRequest.from_list(["a"] * MAX_ROWS).inputs) == MAX_ROWS
    with pytest.raises(ValidationError):
        make()


@pytest.fixture(scope="module")
def rm():
    return BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device=torch.device("cpu"))


def test_the_probe_holds_the_models_rewards_at_every_length(rm):
    rm.model.train()
    state = torch.random.get_rng_state()
    probe = make_probe(rm, bf16=False)
    assert rm.model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    lengths = [len(ids) for ids in probe.token_ids]
    assert max(lengths) == 64
    assert min(lengths) < 30
    check_probe(probe, probe.rewards)


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, FLOAT32_TOLERANCE), (True, BF16_TOLERANCE)])
def test_the_worst_row_is_shown(rm, bf16, tolerance):
    probe = make_probe(rm, bf16=bf16)
    assert probe.tolerance == pytest.approx(tolerance, rel=2)
    served = [reward + 0.99 * probe.tolerance for reward in probe.rewards]
    check_probe(probe, served)
    served[3] = probe.rewards[3] + 2 * probe.tolerance
    served[5] = probe.rewards[5] - 3 * probe.tolerance
    with pytest.raises(ServingError, match="not served") as caught:
        check_probe(probe, served)
    assert "Worst: row 5, " in str(caught.value)
    assert f"{served[5]:+.6f}" in str(caught.value)


def test_a_reward_that_is_no_number_never_passes(rm):
    probe = make_probe(rm, bf16=True)
    served = list(probe.rewards)
    served[2] = math.nan
    with pytest.raises(ServingError, match="row 2"):
        check_probe(probe, served)


def test_weights_that_are_not_finite_make_no_probe():
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        rm.model.score.weight[0, 0] = math.nan
    with pytest.raises(ServingError, match="not finite"):
        make_probe(rm, bf16=False)
