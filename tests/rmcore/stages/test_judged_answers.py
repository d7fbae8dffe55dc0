"""A file of judged answers through the stages: prompts of training are left out, and rung 2 is of the file."""

import json

import pandas as pd
import pytest

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.gold.world import gold_reward, written_responses
from rmcore.data.table import read_pairs
from rmcore.reporting.html.logged import logged_block
from rmcore.stages import evaluate, prepare, readiness, train
from single_stage import stage_with

GOLD = {"source": "gold", "gold": {"num_prompts": 120}}
TRAINING = {"steps": 4, "eval_every": 4, "lr": 1e-3}


@pytest.mark.slow
def test_answers_of_training_prompts_are_left_out_and_the_others_decide(tmp_path, capsys):
    places = {name: tmp_path / name for name in ("prepare", "train", "evaluate", "readiness")}
    for place in places.values():
        place.mkdir()

    def config(**own):
        model = {"name": "tiny", "max_seq_len": 128}
        settings = {
            "device": "cpu",
            "model": model,
            "data": GOLD,
            "train": TRAINING,
            "evaluate": {"num_resamples": 100},
        }
        return PipelineConfig.model_validate(settings | own)

    prepare.run(stage_with("prepare", config(), {}), places["prepare"], NullTracker(), silent)
    train.run(stage_with("train", config(), places), places["train"], NullTracker(), silent)
    prompts = {
        name: sorted({str(pair.prompt) for pair in read_pairs(places["prepare"] / f"{name}.parquet")})
        for name in ("train", "validation", "test")
    }
    seen = [*prompts["train"][:3], *prompts["validation"][:1]]
    rows = [
        (prompt, response, gold_reward(prompt, response))
        for prompt in [*seen, *prompts["test"][:12]]
        for response in written_responses(prompt, 8, "none", seed=0)
    ]
    file = tmp_path / "judged.csv"
    pd.DataFrame(rows, columns=["prompt", "response", "score"]).to_csv(file, index=False)
    given = config(evaluate={"num_resamples": 100, "answers": str(file)})
    evaluate.run(stage_with("evaluate", given, places), places["evaluate"], NullTracker(), silent)
    assert "4 prompts are in the training pairs" in capsys.readouterr().err
    upstream = {name: places[name] for name in ("prepare", "evaluate")}
    readiness.run(stage_with("readiness", given, upstream), places["readiness"], NullTracker(), silent)
    found = json.loads((places["readiness"] / "logged_answers.json").read_text())
    assert found["judged"] == "score"
    assert found["num_prompts"] == 12
    assert [choice["k"] for choice in found["choices"]][:2] == [2, 4]
    verdict = json.loads((places["readiness"] / "readiness.json").read_text())["verdict"]
    assert verdict["rung"] == 2
    assert verdict["evidence"] == "logged answers to 12 prompts"
    block = logged_block(found)
    assert any("4 prompts are in the training pairs" in line for line in block.findings)
    assert block.tables[0].rows
