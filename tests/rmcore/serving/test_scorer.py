import pytest

from rmcore.core.errors import NotReadyError, RequestError
from rmcore.data.pair import Message
from rmcore.serving.client import RewardClient
from rmcore.serving.scorer import RewardModelScorer, Rollout, Step


@pytest.fixture
def client(server):
    with RewardClient(server.address, batch_size=2) as open_client:
        yield open_client


def rollouts(count):
    return [Rollout([Step(prompt="p", completion=chr(97 + index))], {"id": index}) for index in range(count)]


def test_steps_are_joined_into_one_dialogue_that_ends_with_the_last_completion(server, client):
    system = Message("system", "be brief")
    steps = [
        Step(prompt=[system, Message("user", "p1")], completion="c1"),
        Step(prompt="p2", completion="c2"),
        Step(prompt=[{"role": "tool", "content": "p3"}], completion="c3"),
    ]
    scored = [Rollout(steps), Rollout(steps[1:2])]
    rewards = RewardModelScorer(client).score(scored, policy_version=4)
    turns = [("system", "be brief"), ("user", "p1"), ("assistant", "c1"), ("user", "p2"), ("assistant", "c2")]
    prompt = [{"role": role, "content": content} for role, content in [*turns, ("tool", "p3")]]
    [seen] = server.seen
    assert seen.inputs == [{"prompt": prompt, "response": "c3"}, {"prompt": "p2", "response": "c2"}]
    assert seen.body["policy_version"] == 4
    assert rewards == list(map(server.reward, seen.inputs))
    assert [one.meta for one in scored] == [{"rm_score": reward, "rm_score_version": 1} for reward in rewards]


def test_without_a_chat_template_steps_are_paragraphs(server, client):
    steps = [
        Step(prompt="p1", completion="c1"),
        Step(prompt=[Message("system", "s"), Message("user", "u")], completion=""),
    ]
    RewardModelScorer(client, use_chat_template=False).score([Rollout(steps), Rollout(steps[:1])])
    assert server.seen[0].inputs == [
        "Prompt: p1\n\nResponse: c1\n\nPrompt: System: s\n\nUser: u\n\nResponse: ",
        "Prompt: p1\n\nResponse: c1",  # the platform's plain format
    ]


@pytest.mark.parametrize("use_chat_template", [True, False])
def test_a_render_function_decides_the_text(server, client, use_chat_template):
    scorer = RewardModelScorer(
        client, use_chat_template=use_chat_template, render_fn=lambda rollout: f"<{rollout.steps[0].completion}>"
    )
    assert scorer.score(rollouts(1)) == [server.reward("<a>")]
    assert server.seen[0].inputs == ["<a>"]


def test_names_settings_and_cuts_are_written(server, client):
    scored = rollouts(3)
    scorer = RewardModelScorer(client, score_key="quality", normalize=True, over_length="cut")
    rewards = scorer.score(scored)
    assert all(0 < reward < 1 for reward in rewards)
    assert [rollout.meta for rollout in scored] == [
        {"id": index, "quality": reward, "quality_version": 1, "quality_num_cut": 2}
        for index, reward in enumerate(rewards)
    ]
    assert {(seen.body["normalize"], seen.body["over_length"]) for seen in server.seen} == {(True, "cut")}


def test_no_rollouts_give_no_rewards_without_a_call(server, client):
    assert RewardModelScorer(client).score([]) == []
    assert server.seen == []


@pytest.mark.parametrize(("status", "error"), [(422, RequestError), (503, NotReadyError)])
def test_a_call_that_fails_writes_nothing_and_names_the_rollout(server, client, status, error):
    answer = (status, {"error": "no", "message": "too long.", "field": "inputs.1.response"})
    server.behave = lambda seen: answer if seen.inputs[0]["response"] == "e" else None
    scored = rollouts(6)
    with pytest.raises(error, match=r"inputs\.5\.response: too long"):
        RewardModelScorer(client).score(scored)
    assert [rollout.meta for rollout in scored] == [{"id": index} for index in range(6)]


def test_a_rollout_that_cannot_be_scored_is_named_before_anything_is_sent(server, client):
    scored = [*rollouts(4), Rollout([]), *rollouts(1)]
    with pytest.raises(RequestError, match="rollout 4 of the list has no steps"):
        RewardModelScorer(client).score(scored)
    with pytest.raises(RequestError, match="render_fn returned NoneType for rollout 0"):
        RewardModelScorer(client, render_fn=lambda rollout: None).score(rollouts(2))
    with pytest.raises(RequestError, match=r"inputs\.1: String should have at least 1 character"):
        RewardModelScorer(client, render_fn=lambda rollout: "x" * (rollout.meta["id"] != 1)).score(rollouts(2))
    assert server.seen == []
    assert [rollout.meta for rollout in scored] == [{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}, {}, {"id": 0}]
