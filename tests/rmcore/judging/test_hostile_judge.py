"""A judge is a stranger with a bill: forms that servers use are read, and none costs more, learns more or breaks more
than the settings allow. Real HTTP throughout.
"""

import json
import logging
import signal
import subprocess
import sys
import threading
import zlib
from itertools import repeat

import numpy as np
import pytest

from judge_server import ASK_ALL, FORMS, KEY, Raw, completion, endpoint, judge_server, questions
from machine import PATIENCE_S
from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import ConfigError, JudgementsWantedError, RmcoreError, ServingError
from rmcore.judging.endpoint import RETRIES
from rmcore.judging.language_model import LanguageModelJudge
from rmcore.judging.replies import most_bytes

PRICES = {"price_read": 10, "price_written": 50}
OVERLOADED = {"error": {"code": 502, "message": "Upstream error: service temporarily overloaded"}}


def judge_of(server, folder, **settings):
    return LanguageModelJudge(server.named, JudgingConfig(**settings), folder)


def kept(folder):
    return [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_read_in_every_form_that_servers_use(form, tmp_path):
    """The mean of 7 and 9 where their log-probabilities are given, and never the B or 2 of the thoughts."""
    with judge_server(lambda one: FORMS[form]("7" if len(one.texts) == 2 else "A")) as server:
        expected = 8 if "log-prob" in form else 7
        assert judge_of(server, tmp_path).rewards(["p"], ["r"]) == pytest.approx(expected)
        pairwise = judge_of(server, tmp_path, mode="pairwise")
        assert pairwise.verdicts(["p"], ["a"], ["b"]).tolist() == [[1], [1]]
        assert len(server.asked) == 3  # none was unread, and asked again


@pytest.mark.parametrize("place", ["answer", "choice"])
def test_an_error_inside_status_200_is_repeated_as_its_code_says_and_told_in_its_words(place, tmp_path):
    bad = OVERLOADED if place == "answer" else {"choices": [{"index": 0, **OVERLOADED, "finish_reason": "error"}]}
    with judge_server(lambda one: completion("7") if one.number == 2 else bad) as server:
        assert judge_of(server, tmp_path).rewards(["p"], ["r"]) == [7]
        assert len(server.asked) == 3
        with pytest.raises(ServingError, match=r"502 - Upstream error: service temporarily overloaded"):
            judge_of(server, tmp_path).rewards(["p"], ["other"])
    refused = {"error": {"code": 401, "message": "No cookie"}}
    with judge_server(lambda one: refused) as server:
        with pytest.raises(ConfigError, match="refused the key"):
            judge_of(server, tmp_path).rewards(["p"], ["r"])
        assert len(server.asked) == 1


def test_a_question_that_fails_while_others_are_answered_is_asked_again(tmp_path):
    """A provider that fails on two of three requests fails on one question six times in a row sooner or later."""
    num_failed, is_answering = 0, threading.Event()

    def behaviour(one):
        nonlocal num_failed
        if not one.body["messages"][0]["content"].endswith("n 0"):
            is_answering.set()
            return "1"
        is_answering.wait(PATIENCE_S)
        num_failed += 1
        return "1" if num_failed > 2 * (1 + RETRIES) - 3 else OVERLOADED

    with judge_server(behaviour) as server:
        assert len(endpoint(server, tmp_path, concurrency=2).ask(questions(30))) == 30
        assert len(server.asked) == 29 + num_failed


def test_a_longer_wait_than_the_clients_is_waited_for_or_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("openai._base_client.MAX_RETRY_AFTER_DELAY", 0.01)
    monkeypatch.setattr("rmcore.judging.sending.CLIENT_WAITS", 0.01)

    def busy(one):
        return Raw(429, b'{"error": {"message": "rate limit"}}', {"Retry-After": "0.05"}) if one.number < 2 else "7"

    with judge_server(busy) as server:
        assert judge_of(server, tmp_path).rewards(["p"], ["r"]) == [7]
        assert len(server.asked) == 3
    said = capsys.readouterr().err
    assert said.count("asks to wait") == said.count("note:") == 1
    with (
        judge_server(lambda one: Raw(429, b"{}", {"Retry-After": "7200"})) as server,
        pytest.raises(ServingError, match="asks to wait 2 h 00 min"),
    ):
        judge_of(server, tmp_path / "other").rewards(["p"], ["r"])


def thinks(one):
    usage = {"prompt_tokens": 300, "completion_tokens": one.body["max_tokens"]}
    message = {"reasoning": "Let me compare. Answer 7"}
    return completion(None, message=message, choice={"finish_reason": "length"}, usage=usage)


def thinks_aloud(one):
    return completion("<think>Surely 7", choice={"finish_reason": "length"})


def cuts(one):
    return completion("7", usage={"prompt_tokens": 2050, "completion_tokens": 1})


@pytest.mark.parametrize(
    ("behaviour", "size", "helps"),
    [(thinks, 1, "answer_tokens"), (thinks_aloud, 1, "answer_tokens"), (cuts, 1000, "longer context")],
)
def test_an_answer_that_says_nothing_of_the_question_is_no_judgement_and_what_helps_is_told(
    behaviour, size, helps, tmp_path, capsys
):
    """Neither guessed from, nor asked again, nor a reason for an audit to let it decide."""
    with judge_server(behaviour) as server:
        judge = judge_of(server, tmp_path)
        assert np.isnan(judge.rewards(["p"], ["a long answer " * size])).all()
        assert len(server.asked) == 1
        assert helps in judge.why_unread
        assert helps in capsys.readouterr().err


@pytest.mark.parametrize("text", ["-" * 40_000, "a\n" + " " * 40_000 + "b", "word " * 1000])
def test_a_question_of_few_tokens_is_not_taken_for_a_cut_one(text, tmp_path):
    with judge_server(lambda one: completion("7", usage={"prompt_tokens": 1100, "completion_tokens": 1})) as server:
        assert judge_of(server, tmp_path).rewards(["p"], [text]) == [7]


@pytest.mark.parametrize("read", [-(10**9), 10**18, True, float("nan"), 0, None])
def test_token_counts_that_cannot_be_right_earn_nothing_and_make_no_budget(read, tmp_path, capsys):
    with judge_server(lambda one: completion("1", usage={"prompt_tokens": read, "completion_tokens": 2})) as server:
        paid = endpoint(server, tmp_path / "paid", max_cost=1, **PRICES)
        with pytest.raises(ConfigError, match="max_cost would limit nothing"):
            paid.ask(questions(3))
        assert paid.budget.cost >= 0
        assert len(server.asked) == 1
        counted = endpoint(server, tmp_path / "counted", **PRICES)
        counted.ask(questions(3))
        assert 0 <= counted.budget.num_tokens <= 6
        assert capsys.readouterr().err.count("how many tokens") == 1


def test_every_request_that_is_sent_counts_and_none_is_sent_beyond_the_budget(tmp_path):
    with judge_server(lambda one: Raw(503, b"{}")) as server:
        asked = endpoint(server, tmp_path, max_calls=4)
        with pytest.raises(JudgementsWantedError, match=r"4 calls .* status 503"):
            asked.ask(questions(4))
        assert len(server.asked) == asked.budget.num_calls == 4


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_is_followed(status, tmp_path):
    with judge_server(lambda one: "7") as elsewhere:
        to = elsewhere.url.replace("http://", "http://me:pw@") + "/chat/completions?token=hidden"
        with judge_server(lambda one: Raw(status, b"", {"Location": to})) as server:
            with pytest.raises(
                ConfigError, match=rf"sends on to {elsewhere.url.removesuffix('/v1')}, and no"
            ) as caught:
                judge_of(server, tmp_path).rewards(["private"], ["r"])
            assert len(server.asked) == 1
        assert not elsewhere.asked
        assert not any(part in str(caught.value) for part in ("pw", "hidden", "completions"))


ESCAPED = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
ECHOES = {
    "answer": completion(f"7 {KEY}"),
    "model": completion("7", model=f"model {KEY}"),
    "escaped": Raw(200, json.dumps(completion("7", model="KEY")).replace("KEY", ESCAPED).encode()),
    "refusal": completion(None, message={"refusal": f"I refuse {KEY}"}),
    **{f"status {status}": Raw(status, json.dumps({"error": {"message": KEY}}).encode()) for status in (400, 401, 500)},
    "no JSON": Raw(500, f"<html>{KEY}</html>".encode()),
    "error inside": {"error": {"code": 403, "message": f"bad key {KEY}"}},
}


@pytest.mark.parametrize("echo", ECHOES)
def test_a_key_that_a_server_repeats_is_nowhere(echo, tmp_path, caplog, capsys):
    with judge_server(lambda one: ECHOES[echo], root=f"root {KEY}") as server, caplog.at_level(logging.DEBUG):
        judge = judge_of(server, tmp_path)
        said = ""
        try:
            judge.rewards([str(at) for at in range(9)], ["r"] * 9)
        except RmcoreError as error:
            said = f"{error} {error.__cause__}"
        found = capsys.readouterr()
        texts = [file.read_text() for file in tmp_path.rglob("*.*")]
        for text in (*texts, said, found.out, found.err, caplog.text, json.dumps(judge.endpoint.spent)):
            assert KEY not in text
            assert ESCAPED not in text


def nested(depth):
    return Raw(200, b'{"choices": ' + b"[" * depth + b"]" * depth + b"}")


TOO_MUCH = {
    "endless": (lambda: Raw(200, repeat(b" " * 65_536)), "more than"),
    "an endless error": (lambda: Raw(500, repeat(b" " * 65_536)), "more than"),
    "long": (lambda: completion("x" * 10**6), "more than"),
    "compressed": (lambda: Raw(200, zlib.compress(b" " * 10**6), {"Content-Encoding": "deflate"}), "compresses"),
    "nested": (lambda: nested(900), "no chat completion"),
    "nested deeply": (lambda: nested(50_000), "no chat completion"),
    "digits": (lambda: Raw(200, b'{"choices": ' + b"9" * 5000 + b"}"), "no chat completion"),
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_what_is_too_much_is_neither_read_on_nor_kept(kind, tmp_path):
    said, words = TOO_MUCH[kind]
    with judge_server(lambda one: said()) as server, pytest.raises(ServingError, match=words):
        judge_of(server, tmp_path).rewards(["p"], ["r"])
    assert not kept(tmp_path)


def test_an_answer_that_comes_byte_by_byte_ends_with_the_whole_requests_time(tmp_path, monkeypatch):
    monkeypatch.setattr("rmcore.judging.endpoint.RETRIES", 1)
    ended = threading.Event()

    def pieces():
        while not ended.wait(0.02):  # each is a read that ends in time
            yield b" "

    with judge_server(lambda one: Raw(200, pieces())) as server:
        with pytest.raises(ServingError, match=r"timeout_seconds=0\.3"):
            judge_of(server, tmp_path, timeout_seconds=0.3).rewards(["p"], ["r"])
        assert len(server.asked) == 2


def test_a_longer_text_than_the_tokens_allow_is_kept_no_longer_than_that(tmp_path, capsys):
    with judge_server(lambda one: completion("7" + " " * 100_000)) as server:
        assert np.isnan(judge_of(server, tmp_path).rewards(["p"], ["r"])).all()
    (row,) = kept(tmp_path)
    assert len(row["text"]) <= most_bytes(16, with_logprobs=False)
    assert "characters" in capsys.readouterr().err


ESCAPES = "\x1b]0;title\x07\x1b[31mred\x9b2J\r"


@pytest.mark.parametrize("status", [None, 400, 401, 500])
def test_what_a_server_says_does_not_drive_the_terminal(status, tmp_path, capsys):
    def behaviour(one):
        if status is None:
            return completion("hm", model=f"{ESCAPES}{min(one.number, 1)}")
        return Raw(status, json.dumps({"error": {"message": ESCAPES}}).encode())

    with judge_server(behaviour, root=ESCAPES) as server:
        judge = judge_of(server, tmp_path, concurrency=1)
        with pytest.raises(RmcoreError) as caught:
            judge.rewards([str(at) for at in range(9)], ["r"] * 9)
        shown = [
            str(caught.value),
            *capsys.readouterr().err.splitlines(),
            *judge.endpoint.models,
            judge.endpoint.served,
        ]
        assert all(line.isprintable() for line in shown)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_is_asked_to_end_keeps_what_is_under_way_and_asks_no_more(number, tmp_path):
    asking = []
    all_asked = threading.Barrier(5, action=lambda: asking[0].send_signal(number))

    def behaviour(one):
        if one.number < 5:
            all_asked.wait(PATIENCE_S)
        return "1"

    with judge_server(behaviour) as server:
        command = [sys.executable, "-c", ASK_ALL, server.named, str(tmp_path), "5"]
        asking.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        said = asking[0].communicate()[1]
        assert asking[0].returncode != 0
        assert "KeyboardInterrupt" in said
        assert 5 <= len(kept(tmp_path)) == len(server.asked) < 40
