"""A file of judged answers through the stages: prompts of training are left out, and rung 2 is of the file."""

import json

import pandas as pd
import pytest

import policy_chain
from rmcore.data.gold.world import gold_reward, written_responses
from rmcore.data.table import read_pairs
from rmcore.reporting.html.logged import logged_block


@pytest.mark.slow
def test_answers_of_training_prompts_are_left_out_and_the_others_decide(chain_store, tmp_path, capsys):
    chain = policy_chain.Chain(chain_store)
    prompts = {
        name: sorted({str(pair.prompt) for pair in read_pairs(chain.folder("prepare") / f"{name}.parquet")})
        for name in ("train", "validation", "test")
    }
    rows = [
        (prompt, response, gold_reward(prompt, response))
        for prompt in [*prompts["train"][:3], *prompts["validation"][:1], *prompts["test"]]
        for response in written_responses(prompt, 8, "none", seed=0)
    ]
    file = tmp_path / "judged.csv"
    pd.DataFrame(rows, columns=["prompt", "response", "score"]).to_csv(file, index=False)
    given = chain.with_config(evaluate={"answers": str(file)})
    folder = given.folder("readiness")
    assert "4 prompts are in the training pairs" in capsys.readouterr().err
    found = json.loads((folder / "logged_answers.json").read_text())
    assert found["judged"] == "score"
    assert found["num_prompts"] == len(prompts["test"]) > 8
    assert [choice["k"] for choice in found["choices"]][:2] == [2, 4]
    verdict = json.loads((folder / "readiness.json").read_text())["verdict"]
    assert verdict["rung"] == 2
    assert verdict["evidence"] == f"logged answers to {found['num_prompts']} prompts"
    block = logged_block(found)
    assert any("4 prompts are in the training pairs" in line for line in block.findings)
    assert block.tables[0].rows
