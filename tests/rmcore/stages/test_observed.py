"""Files as public preference data are, from raw rows through training to what is measured of held-out judgements."""

import json
from pathlib import Path

import pytest

import preference_files as files
from policy_chain import Chain
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.store import Store
from rmcore.training.material import read_likelihood

SHAPES = {
    "ultrafeedback": lambda path: files.write_ultrafeedback(path, 80),
    "helpsteer2": lambda path: files.write_helpsteer2(path, 120),
    "arena": lambda path: files.write_arena(path, 160, num_judges=4),
}


def run(source: str, folder: Path, **training) -> tuple[Path, dict]:
    """Prepare, train and evaluate; the folder of the training, and what was measured."""
    config = PipelineConfig.model_validate(
        {
            "device": "cpu",
            "model": {"name": "tiny", "max_seq_len": 128},
            "data": {"source": source, "test_fraction": 0.3},
            "train": {"steps": 6, "eval_every": 3, "lr": 1e-3, **training},
            "evaluate": {"num_resamples": 200},
        }
    )
    chain = Chain(Store(folder / "store"), config)
    return chain.folder("train"), json.loads((chain.folder("evaluate") / "metrics.json").read_text())


@pytest.fixture(scope="module", params=list(SHAPES))
def measured(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, *run(SHAPES[request.param](folder / "rows.jsonl"), folder)


@pytest.mark.slow
def test_every_shape_goes_from_rows_to_held_out_nats_without_a_setting(measured) -> None:
    shape, trained, record = measured
    found = record["observations"]
    expected = {"ultrafeedback": {"ranking"}, "helpsteer2": {"grades"}, "arena": {"pair", "tie"}}[shape]
    assert set(found["kinds"]) == expected
    assert found["num_left_out"] == 0  # a rare grade that training lacks costs that grade alone
    names = set(found["metrics"])
    if shape == "helpsteer2":
        weights = {name: part["weight"] for name, part in found["parts"].items()}
        assert weights == dict.fromkeys(files.ATTRIBUTES, 0.0) | {"helpfulness": 1.0}
        assert {f"nats[{name}]" for name in files.ATTRIBUTES} <= names
        assert found["parts"]["verbosity"]["left_out"]["value"] == 0.0  # it has no weight
    else:
        assert {f"nats[{kind}]" for kind in expected} <= names
    for name, value in found["metrics"].items():
        if value["ci_low"] is not None:
            assert value["ci_low"] <= value["value"] <= value["ci_high"], name
    assert 0 <= record["metrics"]["test"]["pairwise_accuracy"]["value"] <= 1
    likelihood = read_likelihood(trained / "best")
    assert (len(likelihood.log_tie) > 0) == (shape != "helpsteer2")


@pytest.mark.slow
def test_the_pairs_alone_are_trained_on_where_that_is_asked_for(tmp_path) -> None:
    trained, record = run(SHAPES["arena"](tmp_path / "rows.jsonl"), tmp_path, objective="pairs")
    assert record["observations"] is None
    assert read_likelihood(trained / "best") is None
