"""A file of prompts and responses, as the deployment `score` reads it, asks about it and writes it down."""

import json

import pytest

import serving_world as world

pytestmark = pytest.mark.services


def test_rows_of_prompt_and_response_are_scored_and_it_is_told_what_was_cut(home, client, tmp_path):
    from tasks.served_scoring import ModelToServe, Scored, ask, read_data, rewards_table, summarise

    rm = world.served_model(client)
    rows = [("What is 2 + 2?", "4"), ("Grüße! 🙂", "Hello."), ("Count.", "one two " * 2 * world.MAX_SEQ_LEN)]
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in [*rows, ("no answer", None)]]
    file.write_text("\n".join(lines) + "\n")
    data = read_data(str(file), "train", None)
    answer = ask(client, data, "cut")
    table = rewards_table(data, answer.rewards, answer.num_cut)
    assert table[["prompt", "response"]].values.tolist() == [list(row) for row in rows]
    assert table.reward.tolist() == world.close(world.expected(rm, rows))
    assert (table.cut > 0).tolist() == [False, False, True]
    scored = Scored(answer, client.version(), start_seconds=1.0, seconds=1.0)
    summary = summarise(ModelToServe("best", "best", "best"), data, table, scored)
    assert (summary["num_rows"], summary["num_unusable"], summary["num_cut"]) == (3, 1, 1)
    assert summary["pairwise_accuracy"] is None
