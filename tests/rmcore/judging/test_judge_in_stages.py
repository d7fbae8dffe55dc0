"""A language model as the judge of rung 3, of `readiness confirm` and of the watch, over real HTTP."""

import contextlib
import json

import numpy as np
import pandas as pd
import pytest

import policy_chain
from judge_server import judge_server
from rmcore.cli import app
from rmcore.cli.guard import FAILED, WAITING, guard
from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import ConfigError, JudgementsWantedError
from rmcore.data.gold.world import gold_reward
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import write_pairs
from rmcore.judging.rubrics import identity
from rmcore.policy.judge import audit_of, require_named_judge

pytestmark = pytest.mark.slow


def gold(one):
    """Scores and compares as the gold world does, coarsely; it cannot read what has a question mark in it."""
    prompt, *responses = one.texts
    rewards = [gold_reward(prompt, response) for response in responses]
    if len(rewards) == 1:
        return "hm" if "?" in responses[0] else str(int(np.clip(5 + rewards[0], 1, 9)))
    return "A" if rewards[0] > rewards[1] else "B" if rewards[1] > rewards[0] else "C"


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("RM_OPT_HOME", str(tmp_path_factory.mktemp("home")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def server():
    with judge_server(gold) as found:
        yield found


@pytest.fixture(scope="module")
def chain(chain_store, server):
    config = policy_chain.changed(policy={"judge": server.named, "fresh_prompts": 30}, readiness={"planned_kl": 0.5})
    return policy_chain.Chain(chain_store, config)


def test_rung_three_is_judged_and_says_that_nobody_has_audited_the_judge(chain, server):
    judged = json.loads((chain.folder("readiness_v2") / "readiness.json").read_text())
    assert judged["verdict"]["evidence"].endswith("judged by the language model judge-1")
    assert any("nobody has audited" in reason for reason in judged["verdict"]["reasons"])
    table = pd.read_parquet(chain.folder("samples") / "samples.parquet")
    assert table["gold"].between(1, 9).all()
    assert not table["response"].str.contains("?", regex=False).any()  # unread, and set aside


COIN = "its agreement with people is a coin's"


def undecided(file, server, **judging):
    """The settings with an audit by which their judge may not decide."""
    settings = JudgingConfig(**judging)
    record = {
        "asked": identity(server.named, settings),
        "verdict": {"may_decide": False, "reasons": [COIN]},
        "metrics": {"reliability": {"value": 0.8, "ci_low": 0.7, "ci_high": 0.9}},
    }
    file.write_text(json.dumps(record))
    return settings.model_copy(update={"audit": str(file)})


def test_a_judge_that_may_not_decide_leaves_the_verdict_unclear_and_the_accuracy_corrected(chain, server, tmp_path):
    file = tmp_path / "audit.json"
    audited = chain.with_config(policy={"judging": undecided(file, server)})
    verdict = json.loads((audited.folder("readiness_v2") / "readiness.json").read_text())["verdict"]
    assert verdict["status"] == "unclear"
    assert COIN in verdict["reasons"]
    assert audited.key("samples") == chain.key("samples")  # an audit changes a verdict, and draws nothing anew
    noisy, plain = (
        json.loads((own.folder("overoptimization") / "overoptimization.json").read_text())["parts"][
            "on_policy_accuracy"
        ]
        for own in (audited, chain)
    )
    assert noisy["value"] == pytest.approx(min(max((plain["value"] - 0.2) / 0.6, 0), 1))
    other = JudgingConfig(audit=str(file), mode="pairwise")
    with pytest.raises(ConfigError, match="audit of another judge: its mode differ"):
        audit_of(server.named, other)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is no audit of a judge"):
        require_named_judge(server.named, JudgingConfig(audit=str(file)))


def test_a_served_plan_is_confirmed_and_a_spent_budget_continues_without_asking_twice(chain, server, tmp_path):
    judging = undecided(tmp_path / "audit.json", server, mode="pairwise", rubric="factuality", max_calls=20)
    own = chain.with_config(policy={"judging": judging})
    before = len(server.asked)
    ends = 0
    while True:
        with contextlib.suppress(JudgementsWantedError):
            folder = own.folder("confirmation")
            break
        ends += 1
        assert ends < 30
    asked = [json.dumps(one.body["messages"]) for one in server.asked[before:]]
    assert len(set(asked)) == len(asked)
    assert ends >= 2
    record = json.loads((folder / "confirmation.json").read_text())
    assert record["judge"] == "the language model judge-1"
    assert record["verdict"]["status"] == "unclear"
    assert COIN in record["verdict"]["reasons"]
    assert record["unit"] == "wins less losses a comparison"
    assert set(record["differences"]) <= {-1.0, -0.5, 0.0, 0.5, 1.0}


def test_where_a_model_answers_is_no_part_of_a_key_and_how_it_is_asked_is(chain, server):
    elsewhere = chain.with_config(policy={"judge": "openai:judge-1@http://127.0.0.1:9/v1"})
    assert elsewhere.key("samples") == chain.key("samples")
    for changes, differs in [({"max_calls": 3, "concurrency": 2}, False), ({"rubric": "safety"}, True)]:
        judging = JudgingConfig(**changes)
        assert (chain.with_config(policy={"judging": judging}).key("samples") != chain.key("samples")) == differs


def call(*arguments):
    return guard(lambda: app([str(one) for one in arguments], standalone_mode=False))


def test_the_command_line_audits_and_labels(server, gold_pairs, tmp_path, capsys):
    data, out = tmp_path / "pairs.jsonl", tmp_path / "audit.json"
    pairs = gold_pairs[:120]
    write_pairs(pairs, tmp_path / "pairs.parquet")
    data = tmp_path / "pairs.parquet"
    options = ("--judge", server.named, "--mode", "pairwise", "--data", data)
    assert call("judge", "audit", *options, "--plan") == 0
    assert f"{2 * 120 + 2 * 100} calls" in capsys.readouterr().out
    before = len(server.asked)
    assert call("judge", "audit", *options, "--max-calls", 40) == WAITING
    assert call("judge", "audit", *options, "--json", out, "--probed", 20) == 0
    assert len(server.asked) == before + 2 * 120 + 2 * 20
    said = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["metrics"]["agreement"]["value"] > 0.6
    assert "agreement" in said
    assert "calls" in said
    rows = [{"prompt": pair.prompt, "response": text} for pair in pairs[:8] for text in (pair.chosen, pair.rejected)]
    pd.DataFrame(rows).to_json(tmp_path / "answers.jsonl", orient="records", lines=True)
    labelled = tmp_path / "labelled.parquet"
    assert call("data", "label", tmp_path / "answers.jsonl", "--judge", server.named, "--out", labelled) == 0
    assert call("data", "label", tmp_path / "answers.jsonl", "--judge", server.named, "--mode", "pairwise", "--out",
                tmp_path / "weighted.jsonl", "--audit", out) == 0  # fmt: skip
    right = record["metrics"]["reliability"]["value"] or record["metrics"]["agreement"]["value"]
    (weighted, *_) = load_pairs(str(tmp_path / "weighted.jsonl")).observations
    assert weighted.weight == pytest.approx(2 * right - 1)
    assert weighted.annotator == "the language model judge-1"
    table = pd.read_parquet(labelled)
    assert {"prompt", "chosen", "rejected", "annotator"} <= set(table.columns)
    for row in table.itertuples():
        assert gold_reward(row.prompt, row.chosen) > gold_reward(row.prompt, row.rejected)
    capsys.readouterr()
    assert call("data", "check", labelled) == 0
    assert f"{len(table)}" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_paid(tmp_path):
    rows = [{"prompt": f"prompt {at // 2}", "response": f"answer {at}"} for at in range(8)]
    pd.DataFrame(rows).to_json(tmp_path / "answers.jsonl", orient="records", lines=True)
    (tmp_path / "folder.jsonl").mkdir()
    with judge_server(lambda one: "A" if one.texts[1] > one.texts[2] else "B") as server:
        options = ("data", "label", tmp_path / "answers.jsonl", "--judge", server.named, "--mode", "pairwise", "--out")
        for wrong in (tmp_path / "answers.jsonl" / "pairs.jsonl", tmp_path / "folder.jsonl"):
            assert call(*options, wrong) == FAILED
        assert not server.asked
        out = tmp_path / "no" / "such" / "pairs.jsonl"
        assert call(*options, out, "--max-calls", 1) == WAITING
        assert not list(out.parent.iterdir())
        assert call(*options, out) == 0
        assert [one.name for one in out.parent.iterdir()] == ["pairs.jsonl"]
        assert len(load_pairs(str(out)).pairs) == 4
