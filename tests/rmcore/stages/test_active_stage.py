"""The stages of the saving study run for real on the smallest study: what they write, and resuming after a cut."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from experiments.presets import PRESETS
from rmcore.active.efficiency import claims_of
from rmcore.config.active import ActiveConfig
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import read_json_lines
from rmcore.core.store import ArtifactRef
from rmcore.core.tracking import METRICS_FILE
from rmcore.data.table import read_pairs, write_pairs
from rmcore.ensembles.features import pair_features
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.reporting.html.active import active_markdown, claim_rows, short_rows
from rmcore.stages import features as features_stage
from rmcore.stages.registry import STAGES, stage_call
from rmcore.stages.run import run_stage
from rmcore.stages.settings import ActiveSettings, FeaturesSettings

CONFIG = PRESETS["active-smoke"].model_copy(
    update={
        "data": DataConfig(gold=GoldConfig(num_prompts=60, pairs_per_prompt=2)),
        "active": ActiveConfig(
            num_seeds=2, noise=(0.0, 0.25), seed_pairs=8, validation_pairs=6, growth=2.0, num_members=2
        ),
    }
)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Folders of the artifacts by stage."""
    root = tmp_path_factory.mktemp("chain")
    folders = {}
    for name in ("prepare", "features", "active"):
        folders[name] = root / name
        folders[name].mkdir()
        stage = STAGES[name]
        run_stage(
            name, stage.settings.of(CONFIG), {needed: folders[needed] for needed in stage.upstream}, folders[name]
        )
    return folders


@pytest.fixture(scope="module")
def found(chain):
    return json.loads((chain["active"] / "active.json").read_text())


def test_features_are_those_of_the_backbone_in_the_order_of_the_pairs(chain):
    pairs = read_pairs(chain["features"] / "pairs.parquet")
    stored = np.load(chain["features"] / "differences.npy")
    assert len(pairs) == len(stored) == 120
    rm = BradleyTerryRM.new(CONFIG.model, seed=CONFIG.seed, device="cpu")
    first, second = pair_features(rm, pairs[30:40])
    assert stored[30:40] == pytest.approx(first - second, abs=1e-5)
    assert not list(chain["features"].glob("part_*"))


@pytest.mark.slow
def test_a_cut_off_pass_goes_on_with_the_pieces_that_are_there(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(features_stage, "PART", 50)
    original, passes = features_stage.pair_features, []

    def dies(rm, pairs):
        passes.append(len(pairs))
        if len(passes) == 2:
            raise KeyboardInterrupt
        return original(rm, pairs)

    monkeypatch.setattr(features_stage, "pair_features", dies)
    with pytest.raises(KeyboardInterrupt):
        run_stage("features", FeaturesSettings.of(CONFIG), {"prepare": chain["prepare"]}, tmp_path)
    run_stage("features", FeaturesSettings.of(CONFIG), {"prepare": chain["prepare"]}, tmp_path)
    assert passes == [50, 50, 50, 20]
    whole = np.load(chain["features"] / "differences.npy")
    assert np.load(tmp_path / "differences.npy") == pytest.approx(whole, abs=1e-5)


def test_the_study_writes_curves_savings_verdicts_and_figures(chain, found):
    assert [level["noise"] for level in found["noise"]] == [0.0, 0.25]
    assert found["num_seeds"] == 2
    assert [claim["name"] for claim in found["claims"]] == [claim.name for claim in claims_of(CONFIG.active)]
    for name in ("label_efficiency", "label_savings"):
        assert (chain["active"] / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    table = pd.read_csv(chain["active"] / "tables" / "savings.csv")
    assert len(table) == 2 * 4 * 4  # noise levels, functions, targets
    history = read_json_lines(chain["active"] / METRICS_FILE)
    assert [row["step"] for row in history] == found["noise"][0]["num_labels"]
    assert set(history[0]["metrics"]) == {
        f"eval/accuracy_{name}" for name in ("random", "entropy", "variance", "bald", "d_optimal")
    }


@pytest.mark.slow
def test_seeds_that_are_done_are_not_run_again_and_the_outcome_is_the_same(chain, tmp_path):
    for place in sorted(chain["active"].glob("seed_*.json"))[:3]:
        shutil.copy(place, tmp_path)
    marked = tmp_path / "seed_0.25_1.json"
    before = marked.stat().st_mtime_ns
    run_stage("active", ActiveSettings.of(CONFIG), {"features": chain["features"]}, tmp_path)
    assert marked.stat().st_mtime_ns == before
    assert (tmp_path / "active.json").read_bytes() == (chain["active"] / "active.json").read_bytes()


@pytest.mark.slow
def test_hidden_labels_of_a_file_are_what_is_learned(chain, tmp_path):
    pairs = read_pairs(chain["features"] / "pairs.parquet")
    write_pairs(pairs, tmp_path / "pairs.parquet")
    config = PipelineConfig.model_validate(CONFIG.model_dump() | {"data": {"source": str(tmp_path / "pairs.parquet")}})
    (tmp_path / "out").mkdir()
    run_stage("active", ActiveSettings.of(config), {"features": chain["features"]}, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "active.json").read_text())
    assert found["num_pool"] == json.loads((chain["active"] / "active.json").read_text())["num_pool"]
    upstream = {"features": ArtifactRef("features", "0" * 64, "/nowhere", "0" * 64)}
    gold, file = (stage_call("active", one, upstream).key for one in (CONFIG, config))
    assert gold != file


def test_the_text_says_what_was_found(found):
    text = active_markdown(found | {"registration": {"number": 1, "hash": "a" * 64, "frozen_at": "2026"}})
    for said in (found["headline"], "2 paired seeds", "whole pool's accuracy", "Registration 1", "? inconclusive"):
        assert said in text.replace("\\", "")
    assert len(claim_rows(found)) == len(short_rows(found)) == 8


def test_a_config_without_a_study_or_without_pairs_for_one_is_refused(chain, tmp_path):
    with pytest.raises(ConfigError, match="no study in this config"):
        ActiveSettings.of(CONFIG.model_copy(update={"active": None}))
    large = CONFIG.active.model_copy(update={"seed_pairs": 500})
    settings = ActiveSettings.of(CONFIG.model_copy(update={"active": large}))
    with pytest.raises(ConfigError, match="leave no pool"):
        run_stage("active", settings, {"features": chain["features"]}, tmp_path)
