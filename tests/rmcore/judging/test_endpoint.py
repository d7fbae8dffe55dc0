"""Asking an endpoint: each question once, by any process, within the budget, and clear words for what goes wrong."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from judge_server import ASK_ALL, KEY, Raw, completion, endpoint, judge_server, questions
from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import ConfigError, JudgementsWantedError, ServingError
from rmcore.judging.endpoint import MOST_REFUSED, Address, Endpoint
from rmcore.judging.language_model import LanguageModelJudge

COST = (100 * 10 + 2 * 50) / 1e6
"""Price of one call of the server's at `PRICES`."""
PRICES = {"price_read": 10, "price_written": 50}


BAD_ADDRESSES = (
    *("openai:model", "openai:@http://x/v1", "model@http://x/v1", "openai:m@ftp://x", "openai:m@ftp://me:hidden@x/v1"),
    *("openai:m@http://x:99999/v1", "openai:m@http://[::1/v1"),
    *("openai:m@https://x:hidden@y:99999/v1", "openai:m@http://me:hidden@x/v1"),
    *("openai:m@https://x/v1?hidden", "openai:m@https://x/v1#hidden", "openai:m@https://hidden@x/v1"),
)


@pytest.mark.parametrize("named", BAD_ADDRESSES)
def test_an_address_of_another_form_or_with_credentials_is_refused_and_they_are_not_repeated(named):
    with pytest.raises(ConfigError, match="judge") as caught:
        Address.parse(named)
    assert "hidden" not in str(caught.value)


def test_a_model_name_may_have_slashes_and_at_signs():
    assert Address.parse("openai:org/m@v2@http://x:1/v1/") == Address("org/m@v2", "http://x:1/v1")
    assert Address.parse("openai:@cf/meta/llama@http://x/v1") == Address("@cf/meta/llama", "http://x/v1")


@pytest.mark.parametrize("budget", [{"max_calls": 4}, {"max_cost": COST * 3.01, **PRICES}])
def test_a_spent_budget_is_a_state_and_the_next_run_goes_on_from_there(budget, tmp_path):
    with judge_server(lambda one: "1") as server:
        with pytest.raises(JudgementsWantedError, match="is spent: 4 calls"):
            endpoint(server, tmp_path, concurrency=1, **budget).ask(questions(6))
        assert len(server.asked) == 4
        assert len(endpoint(server, tmp_path, concurrency=1, **budget).ask(questions(6))) == 6
        assert len(server.asked) == 6


@pytest.mark.slow
def test_a_busy_server_is_asked_again_and_a_broken_one_is_named(tmp_path):
    def busy(one):
        if one.number < 3:
            return Raw(429 if one.number else 500, b"{}", {"Retry-After": "0.01"})
        return "1"

    with judge_server(busy) as server:
        assert endpoint(server, tmp_path / "a", concurrency=1).ask(questions(1))[0].text == "1"
        assert len(server.asked) == 4
    with (
        judge_server(lambda one: Raw(503, b'{"error": "out of memory"}')) as server,
        pytest.raises(ServingError, match=r"judge-1 at http.* failed .*503"),
    ):
        endpoint(server, tmp_path / "b").ask(questions(1))


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (Raw(404, b'{"error": "no model judge-1"}'), ConfigError),
        (Raw(400, b'{"error": "too long"}'), ConfigError),
        (Raw(200, b"<html>welcome</html>", {"Content-Type": "text/html"}), ServingError),
        (Raw(200, b'{"object": "chat.completion"', {}, cut=True), ServingError),
        (completion(None), None),
        (completion("1", choices=[]), ServingError),
        (completion(None, message={"refusal": "I will not."}), None),
    ],
)
def test_malformed_answers_are_refused_or_unread_and_never_guessed(said, error, tmp_path, capsys):
    with judge_server(lambda one: said) as server:
        judge = LanguageModelJudge(server.named, JudgingConfig(), tmp_path)
        if error is not None:
            with pytest.raises(error, match="judge-1 at"):
                judge.rewards(["p"], ["r"])
            assert not judge.endpoint.answers.file.exists()  # nothing is kept that would be believed later
        else:
            scores = judge.rewards(["p"], ["r"])
            assert json.dumps(scores.tolist()) == "[NaN]"
            assert judge.num_unread == 1
            assert "could not be read" in capsys.readouterr().err


@pytest.mark.slow
def test_parameters_that_an_endpoint_refuses_by_name_are_left_out(tmp_path, capsys):
    def behaviour(one):
        if "temperature" in one.body:
            return Raw(400, b'{"error": {"message": "temperature is not supported with this model"}}')
        if "max_tokens" in one.body:
            return Raw(400, b'{"error": {"message": "use max_completion_tokens instead of max_tokens"}}')
        if "logprobs" in one.body:
            return Raw(400, b'{"error": {"message": "logprobs are not available"}}')
        return "1"

    with judge_server(behaviour) as server:
        asked = endpoint(server, tmp_path, answer_tokens=7)  # many calls at once are refused before the first is known
        assert len(asked.ask(questions(20))) == 20
        assert server.asked[-1].body.keys() & {"temperature", "max_tokens", "logprobs", "top_logprobs"} == set()
        assert server.asked[-1].body["max_completion_tokens"] == 7
        said = capsys.readouterr().err
        assert said.count("temperature, which is left out") == 1


@pytest.mark.parametrize(
    "error",
    [
        {"message": "We like it less.", "param": "top_logprobs"},
        {"message": "does not support parameters: ['top_logprobs']"},
        {"message": "Invalid JSON payload received. Unknown name 'top_logprobs': Cannot find field."},
        {"message": "top_logprobs must be between 0 and 5", "param": None},
        {"detail": [{"loc": ["body", "top_logprobs"], "msg": "Extra inputs are not permitted", "input": 20}]},
        {"message": "Top_logprobs is not enabled for this model"},
        {"message": "`top_logprobs` is deprecated"},
    ],
)
def test_the_words_by_which_servers_refuse_a_parameter_are_understood(error, tmp_path):
    def behaviour(one):
        return Raw(422, json.dumps({"error": error}).encode()) if "top_logprobs" in one.body else "1"

    with judge_server(behaviour) as server:
        assert endpoint(server, tmp_path).ask(questions(1))[0].text == "1"


REFUSED = {
    "a context that is too short": {"message": "max_tokens and the prompt exceed the context length"},
    "a filter": {"message": "content filter: 'what is the temperature, max_tokens'", "param": "messages"},
}


@pytest.mark.parametrize(("why", "place"), zip(REFUSED, (0, 5), strict=True))
def test_a_text_that_the_endpoint_refuses_is_set_aside_and_the_others_are_judged_as_before(why, place, tmp_path):
    """It is about one text, unless none is answered, and about no parameter that it names."""

    def behaviour(one):
        is_refused = one.texts[1] == f"text {place}"
        return Raw(400, json.dumps({"error": REFUSED[why]}).encode()) if is_refused else "5"

    with judge_server(behaviour) as server:
        judge = LanguageModelJudge(server.named, JudgingConfig(concurrency=1), tmp_path)
        scores = judge.rewards(["p"] * 10, [f"text {at}" for at in range(10)])
        assert np.flatnonzero(np.isnan(scores)).tolist() == [place]
        assert len(server.asked) == 10 + 1  # with a reminder
        assert all({"temperature", "max_tokens"} <= one.body.keys() for one in server.asked)


def test_a_text_that_is_refused_first_on_a_rerun_does_not_end_it(tmp_path):
    def behaviour(one):
        is_long = one.body["messages"][0]["content"].endswith("5")
        return Raw(400, b'{"error": {"message": "too long for the context"}}') if is_long else "1"

    with judge_server(behaviour) as server:
        with pytest.raises(JudgementsWantedError):
            endpoint(server, tmp_path, concurrency=1, max_calls=5).ask(questions(6))
        replies = endpoint(server, tmp_path).ask(questions(6))
        assert [bool(one.refusal) for one in replies] == [False] * 5 + [True]


def test_an_endpoint_that_refuses_every_question_is_not_asked_all_of_them(tmp_path):
    with judge_server(lambda one: Raw(400, b'{"error": {"message": "no chat template"}}')) as server:
        asked = endpoint(server, tmp_path, concurrency=1)
        with pytest.raises(ConfigError, match=r"refused the question.*no chat template"):
            asked.ask(questions(30))
        assert len(server.asked) == MOST_REFUSED
        assert not asked.answers.file.exists()


@pytest.mark.parametrize(
    ("content", "logprobs"),
    [
        ("abc", {}),
        ([{"token": None, "logprob": -1, "top_logprobs": None}], {}),
        ([{"token": "1", "logprob": -1, "top_logprobs": 3}], {}),
        ([{"token": "1", "logprob": 0, "top_logprobs": [{"token": None}, {"token": "1", "logprob": 0}]}], {"1": 0}),
    ],
)
def test_log_probabilities_of_another_form_are_left_out(content, logprobs, tmp_path):
    with judge_server(lambda one: completion("1", choice={"logprobs": {"content": content}})) as server:
        (reply,) = endpoint(server, tmp_path).ask(questions(1))
        assert (reply.text, reply.logprobs) == ("1", logprobs)


def test_a_budget_in_money_needs_prices_and_is_kept_by_many_calls_at_once(tmp_path):
    with judge_server(lambda one: "1") as server, pytest.raises(JudgementsWantedError):
        endpoint(server, tmp_path, max_cost=COST * 5, **PRICES).ask(questions(30))
    assert len(server.asked) == 5
    with pytest.raises(ValueError, match="no price is known"):
        JudgingConfig(max_cost=1)


def test_half_a_surrogate_pair_ends_no_run(tmp_path):
    with judge_server(lambda one: "5") as server:
        assert LanguageModelJudge(server.named, JudgingConfig(), tmp_path).rewards(["p"], ["a\ud800b"]) == [5]


def test_what_the_environment_says_goes_nowhere_but_the_key_and_that_over_plain_http_to_this_machine_alone(
    tmp_path, monkeypatch
):
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "secret")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with judge_server(lambda one: "1") as server:
        assert endpoint(server, tmp_path).ask(questions(1))[0].text == "1"
        headers = dict(server.asked[0].headers)
        assert headers.pop("authorization") == f"Bearer {KEY}"
        assert "secret" not in str(headers)
    elsewhere = Endpoint(Address("m", "http://192.0.2.1/v1"), JudgingConfig(), tmp_path)
    with pytest.raises(ConfigError, match="not encrypted"):
        elsewhere.ask(questions(1))


@pytest.mark.slow
def test_nothing_is_asked_twice_by_this_object_or_the_next(tmp_path):
    with judge_server(lambda one: one.body["messages"][0]["content"][-1]) as server:
        first = endpoint(server, tmp_path)
        asked = [*questions(6), *questions(6)]
        replies = [reply.text for reply in first.ask(asked)]
        assert replies == [*"012345", *"012345"]
        assert [reply.text for reply in endpoint(server, tmp_path).ask(questions(8))] == list("01234567")
        assert len(server.asked) == 8
        assert first.budget.num_calls == 6
        endpoint(server, tmp_path, temperature=0.5).ask(questions(1))
        assert len(server.asked) == 9
        assert first.answers.file.stat().st_mode & 0o077 == 0
        assert os.environ["OPENAI_API_KEY"] not in first.answers.file.read_text()


def test_stored_lines_that_are_cut_or_of_another_form_are_asked_again_and_cost_no_other(tmp_path, capsys):
    with judge_server(lambda one: "1") as server:
        first = endpoint(server, tmp_path)
        first.ask(questions(3))
        file = first.answers.file
        file.write_bytes(b'{"key": "k", "text": "1"}\n[1]\n2\n' + file.read_bytes()[:-20])
        endpoint(server, tmp_path).ask(questions(4))
        assert len(server.asked) == 5
        said = capsys.readouterr().err
        assert said.count("3 lines of") == said.count("note:") == 1
        endpoint(server, tmp_path).ask(questions(4))
        assert len(server.asked) == 5


@pytest.mark.slow
def test_servers_that_call_different_models_the_same_share_no_answers_and_one_that_moved_does(tmp_path, capsys):
    with (
        judge_server(lambda one: "1", root="org/first") as first,
        judge_server(lambda one: "2", root="org/2") as second,
    ):
        assert endpoint(first, tmp_path).ask(questions(2))[0].text == "1"
        assert "not used" not in capsys.readouterr().err
        assert endpoint(second, tmp_path).ask(questions(2))[0].text == "2"
        assert "2 stored answers of judge-1 are of root org/first" in capsys.readouterr().err
        assert endpoint(first, tmp_path).ask(questions(2))[0].text == "1"
        with judge_server(lambda one: "3", root="org/first") as moved:
            assert endpoint(moved, tmp_path).ask(questions(2))[0].text == "1"
            assert not moved.asked
        assert len(first.asked) == len(second.asked) == 2


def test_a_server_that_is_busy_or_away_is_the_one_whose_answers_are_stored(tmp_path):
    with judge_server(lambda one: "1", root="org/first") as first, judge_server(lambda one: "1") as other:
        endpoint(first, tmp_path / "a").ask(questions(2))
        endpoint(other, tmp_path / "b").ask(questions(2))
    with judge_server(lambda one: "2", root="org/first", busy=[429, 503] * 4) as busy:
        assert endpoint(busy, tmp_path / "a").ask(questions(2))[0].text == "1"
        assert not busy.asked
        assert endpoint(busy, tmp_path / "b").ask(questions(2))[0].text == "2"  # which no name says to be the same
    assert endpoint(first, tmp_path / "a").ask(questions(2))[0].text == "1"
    assert endpoint(other, tmp_path / "b").ask(questions(2))[0].text == "1"


def test_servers_that_tell_nothing_are_told_apart_by_their_host_and_from_the_one_that_was_at_their_address(
    tmp_path, capsys
):
    with judge_server(lambda one: "1", root="org/first") as first:
        endpoint(first, tmp_path / "a").ask(questions(1))
    port = int(first.url.rsplit(":", 1)[1].split("/")[0])
    with judge_server(lambda one: "2", port=port) as second:
        assert endpoint(second, tmp_path / "a").ask(questions(1))[0].text == "2"
    with judge_server(lambda one: "1") as first, judge_server(lambda one: "2") as second:
        found = [endpoint(one, tmp_path / "b").ask(questions(1))[0].text for one in (first, second, first)]
        assert found == ["1", "2", "1"]
        assert "stored answers" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_that_ask_at_the_same_time_ask_each_question_once_and_lose_nothing(tmp_path):
    both = threading.Barrier(2)

    def behaviour(one):
        if one.number < 2:
            both.wait(300)  # the second question comes from the other process, while the first one waits
        return one.body["messages"][0]["content"][-1]

    with judge_server(behaviour) as server:
        command = [sys.executable, "-c", ASK_ALL, server.named, str(tmp_path), "1"]
        asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        said = [one.communicate()[0].strip() for one in asking]
        assert said == [str([str(at)[-1] for at in range(40)])] * 2
        assert len(server.asked) == 40
        assert endpoint(server, tmp_path).ask(questions(40))[7].text == "7"
        assert len(server.asked) == 40


@pytest.mark.slow
def test_a_process_that_is_killed_loses_the_answer_under_way_alone_and_holds_no_question(tmp_path):
    killed = []

    def behaviour(one):
        if one.number == 20:
            killed[0].kill()
            killed[0].wait()
        return one.body["messages"][0]["content"][-1]

    with judge_server(behaviour) as server:
        killed.append(subprocess.Popen([sys.executable, "-c", ASK_ALL, server.named, str(tmp_path), "1"]))
        killed[0].wait()
        assert [one.text for one in endpoint(server, tmp_path).ask(questions(40))] == [str(at)[-1] for at in range(40)]
        assert len(server.asked) == 41
