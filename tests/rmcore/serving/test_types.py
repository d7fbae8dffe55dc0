"""What travels: the four forms of an input, and errors that name the field."""

import json

import pytest
from pydantic import ValidationError

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
        (3, "inputs.1"),
        (None, "inputs.1"),
        ([1, -2], "inputs.1.token_ids.1"),
        ([1, 2.0], "inputs.1.token_ids.1"),
        ([1, "a"], "inputs.1.token_ids.1"),
        ([True, False], "inputs.1.token_ids.0"),
        (MESSAGES[:1], "inputs.1.messages"),
        ([*MESSAGES, {"role": "user", "content": "c"}], "inputs.1.messages"),
        ([*MESSAGES, {"role": "tool", "content": "c"}], "inputs.1.messages"),
        ([{"role": "", "content": "a"}, MESSAGES[1]], "inputs.1.messages.0.role"),
        ([{"role": "user"}, MESSAGES[1]], "inputs.1.messages.0.content"),
        ({"prompt": "a"}, "inputs.1.pair.response"),
        ({"prompt": "a", "response": "b", "weight": 1}, "inputs.1.pair.weight"),
        ({"prompt": 1, "response": "b"}, "inputs.1.pair.prompt"),
    ],
)
def test_an_error_names_the_field(bad, field):
    with pytest.raises(ValidationError) as caught:
        ScoringRequest.from_list(["good", bad])
    assert ".".join(map(str, caught.value.errors()[0]["loc"])).startswith(field)
    with pytest.raises(ValidationError):
        ScoringRequest.model_validate_json(json.dumps({"inputs": ["good", bad]}))


@pytest.mark.parametrize(
    "settings", [{"normalise": True}, {"over_length": "truncate"}, {"policy_version": -1}, {"normalize": "maybe"}]
)
def test_an_unknown_setting_is_refused(settings):
    with pytest.raises(ValidationError):
        ScoringRequest.from_list(["a"], **settings)


def test_more_rows_than_one_request_holds_are_refused():
    assert len(ScoringRequest.from_list(["a"] * MAX_ROWS).inputs) == MAX_ROWS
    with pytest.raises(ValidationError, match="inputs"):
        ScoringRequest.from_list(["a"] * (MAX_ROWS + 1))


def test_a_request_cannot_be_changed():
    request = ScoringRequest.from_list(["a"])
    with pytest.raises(ValidationError, match="frozen"):
        request.normalize = True


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_no_reward_that_is_not_finite_travels(reward):
    with pytest.raises(ValidationError):
        RewardProbe(token_ids=((1,),), rewards=(reward,), tolerance=1.0)


@pytest.mark.parametrize("num_rewards", [1, 3])
def test_a_probe_has_one_reward_an_input(num_rewards):
    with pytest.raises(ValidationError, match=f"2 inputs and {num_rewards} rewards"):
        RewardProbe(token_ids=((1,), (2,)), rewards=(0.5,) * num_rewards, tolerance=1.0)
