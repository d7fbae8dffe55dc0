"""Stored answers: no process asks a question twice, whatever is cut, refused, or killed on the way."""

import os
import subprocess
import sys
import threading

import pytest

from judge_server import Raw, endpoint, judge_server, questions
from rmcore.judging.answers import Question, answers_folder


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
        again = [Question(one.messages, one.choices, ask=1) for one in questions(2)]
        endpoint(server, tmp_path).ask(again)
        endpoint(server, tmp_path, temperature=0.5).ask(questions(1))
        assert len(server.asked) == 11
        assert first.answers.file.stat().st_mode & 0o077 == 0
        assert os.environ["OPENAI_API_KEY"] not in first.answers.file.read_text()


def test_a_line_that_a_kill_has_cut_is_asked_again_and_costs_no_other(tmp_path):
    with judge_server(lambda one: "1") as server:
        first = endpoint(server, tmp_path)
        first.ask(questions(3))
        whole = first.answers.file.read_bytes()
        first.answers.file.write_bytes(whole[:-20])
        endpoint(server, tmp_path).ask(questions(4))
        assert len(server.asked) == 5
        endpoint(server, tmp_path).ask(questions(4))
        assert len(server.asked) == 5


def test_stored_lines_of_another_form_are_counted_and_asked_again(tmp_path, capsys):
    with judge_server(lambda one: "1") as server:
        file = endpoint(server, tmp_path).answers.file
        file.write_text('{"key": "k", "text": "1"}\n[1]\n2\n{"cut')
        endpoint(server, tmp_path).ask(questions(1))
        said = capsys.readouterr().err
        assert said.count("3 lines of") == said.count("note:") == 1
        assert len(server.asked) == 1


def test_answers_are_kept_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    assert answers_folder() == tmp_path / "judge"


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
    assert endpoint(second, tmp_path).ask(questions(2))[0].text == "2"  # away by now, and all is known


def test_a_server_without_a_list_is_not_taken_for_the_one_that_was_at_its_address(tmp_path):
    with judge_server(lambda one: "1", root="org/first") as first:
        endpoint(first, tmp_path).ask(questions(1))
    port = int(first.url.rsplit(":", 1)[1].split("/")[0])
    with judge_server(lambda one: "2", port=port) as second:
        assert endpoint(second, tmp_path).ask(questions(1))[0].text == "2"


def test_servers_that_tell_nothing_are_told_apart_by_their_host(tmp_path, capsys):
    with judge_server(lambda one: "1") as first, judge_server(lambda one: "2") as second:
        assert [endpoint(one, tmp_path).ask(questions(1))[0].text for one in (first, second, first)] == ["1", "2", "1"]
        assert "stored answers" in capsys.readouterr().err


def test_answers_are_known_by_the_temperature_that_was_sent(tmp_path):
    def behaviour(one):
        return (
            Raw(400, b'{"error": {"message": "Unsupported parameter: temperature"}}')
            if "temperature" in one.body
            else "1"
        )

    with judge_server(behaviour) as server:
        endpoint(server, tmp_path, temperature=0.7, concurrency=1).ask(questions(3))
        asked = len(server.asked)
        assert asked == 1 + 3
        endpoint(server, tmp_path, temperature=0.0).ask(questions(3))  # refused as well, and so the same question
        assert len(server.asked) == asked


def test_a_temperature_that_is_refused_from_now_on_loses_no_answer(tmp_path, capsys):
    refused = False

    def behaviour(one):
        return (
            Raw(400, b'{"error": {"message": "Unsupported parameter: temperature"}}')
            if refused and "temperature" in one.body
            else "1"
        )

    with judge_server(behaviour) as server:
        endpoint(server, tmp_path).ask(questions(2))
        refused = True
        assert len(endpoint(server, tmp_path, concurrency=1).ask(questions(4))) == 4
        assert len(server.asked) == 2 + 1 + 2
        capsys.readouterr()
        assert len(endpoint(server, tmp_path).ask(questions(4))) == 4
        assert len(server.asked) == 2 + 1 + 2
        assert "refused the parameter temperature before" in capsys.readouterr().err


ASK_ALL = """
import sys
from pathlib import Path
from rmcore.config.judging import JudgingConfig
from rmcore.judging.endpoint import Address, Endpoint, Question
asked = Endpoint(Address.parse(sys.argv[1]), JudgingConfig(concurrency=1), Path(sys.argv[2]))
print([one.text for one in asked.ask([Question((("user", f"question {at}"),), ("1", "2")) for at in range(40)])])
"""


@pytest.mark.slow
def test_processes_that_ask_at_the_same_time_ask_each_question_once_and_lose_nothing(tmp_path):
    both = threading.Barrier(2)

    def behaviour(one):
        if one.number < 2:
            both.wait(300)  # the second question comes from the other process, while the first one waits
        return one.body["messages"][0]["content"][-1]

    with judge_server(behaviour) as server:
        command = [sys.executable, "-c", ASK_ALL, server.named, str(tmp_path)]
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
        killed.append(subprocess.Popen([sys.executable, "-c", ASK_ALL, server.named, str(tmp_path)]))
        killed[0].wait()
        assert [one.text for one in endpoint(server, tmp_path).ask(questions(40))] == [str(at)[-1] for at in range(40)]
        assert len(server.asked) == 41
