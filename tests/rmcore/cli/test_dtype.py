"""`--dtype bfloat16` of the measuring commands: taken, recorded, kept apart from float32, or refused with a reason."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch

from command_line import rm_opt
from rmcore.cli.inputs import ModelReading, PairReading
from rmcore.data.parts import SourceInParts
from rmcore.data.table import write_pairs
from rmcore.ensembles.bulk import PARTS_SUFFIX
from rmcore.ensembles.command import _job
from rmcore.ensembles.features import head_of
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.reporting.card import ROUNDED, read_evidence
from rmcore.stages.stages import CURVATURE, stage_of_metric


@pytest.fixture(scope="module")
def home(tiny_folder, gold_pairs, tmp_path_factory):
    """Two checkpoints on one backbone, and pairs."""
    folder = tmp_path_factory.mktemp("dtype")
    for number in range(2):
        rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=96)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(number)
            head_of(rm).weight.add_(torch.randn(head_of(rm).weight.shape, generator=generator))
        rm.save(folder / f"m{number}")
    write_pairs(gold_pairs[:40], folder / "pairs.parquet")
    return folder


def run(command, home, *arguments, dtype="bfloat16"):
    return rm_opt(*command, "--data", home / "pairs.parquet", "--device", "cpu", "--dtype", dtype, *arguments)


@pytest.mark.slow
def test_evaluate_and_diff_record_it_and_a_card_says_so(home, tmp_path):
    tables, told = {}, {}
    for dtype in ("float32", "bfloat16"):
        places = ["--json", tmp_path / f"{dtype}.json", "--rewards", tmp_path / f"{dtype}.parquet"]
        done = run(["evaluate", "--checkpoint", home / "m0"], home, "--num-resamples", 100, *places, dtype=dtype)
        assert done.status == 0, done.err
        tables[dtype] = pd.read_parquet(tmp_path / f"{dtype}.parquet")["reward_chosen"].to_numpy()
        record = json.loads((tmp_path / f"{dtype}.json").read_text())
        assert record["dtype"] == dtype
        told[dtype] = [
            note for one in read_evidence(record, "x") for section in one.sections for note in section.findings
        ]
    assert np.any(tables["bfloat16"] != tables["float32"])
    np.testing.assert_allclose(tables["bfloat16"], tables["float32"], atol=2.0**-5 * np.abs(tables["float32"]).max())
    assert ROUNDED in told["bfloat16"]
    assert ROUNDED not in told["float32"]
    run(["diff", home / "m0", home / "m1"], home, "--json", tmp_path / "diff.json")
    assert json.loads((tmp_path / "diff.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_score_goes_on_only_in_the_format_in_which_it_was_begun(home, tmp_path, gold_pairs):
    begun = tmp_path / "rewards.parquet"
    score = ["score", "--checkpoint", home / "m0", "--out", begun, "--part-rows", 8]
    for dtype in ("float32", "bfloat16"):
        assert run(score, home, dtype=dtype).status == 0
        rewards = pd.read_parquet(begun)["reward_chosen"].to_numpy()
        rm = BradleyTerryRM.from_pretrained(home / "m0", device="cpu", dtype=dtype)
        expected = rm.score_pairs(gold_pairs[:40])[:, 0]
        exactly = 1e-5 if dtype == "float32" else 2.0**-5 * np.abs(expected).max()
        np.testing.assert_allclose(rewards, expected, rtol=0, atol=exactly)
    parts = begun.with_name(begun.name + PARTS_SUFFIX)
    source = SourceInParts(str(home / "pairs.parquet"), 8, "train", PairReading().columns(), None)
    parts.mkdir()  # as a kill leaves it: a part, and the job that it is of
    job = _job(str(home / "m0"), ModelReading(dtype="bfloat16"), PairReading(), source)
    (parts / "job.json").write_text(json.dumps(job))
    (parts / "part_0000000.parquet").touch()
    assert re.search(r"another job .* dtype differ", run(score, home, dtype="float32").err)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["analyze", "--checkpoint", "absent"], "curvature"),
        (["readiness", "pairs", "--checkpoint", "absent", "--num-pairs", "4"], "curvature"),
    ]
    if stage_of_metric(CURVATURE)
    else [],
)
def test_what_is_more_than_rewards_refuses_it_before_anything_is_read(command, why, home):
    assert re.search(rf"--dtype bfloat16 is for rewards, and .*{why}.*: leave it out", run(command, home).err)
