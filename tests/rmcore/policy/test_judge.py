"""Another reward model or a function as the judge: its rewards, its audit, and what is refused."""

import json
import sys

import numpy as np
import pytest

from flows.requirements import require_judge
from rmcore.config.data import DataConfig
from rmcore.config.judging import JudgingConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.judge import (
    GoldJudge,
    audit_of,
    audited,
    judge_identity,
    judge_noise,
    judge_of,
    label_weight,
    require_named_judge,
)
from rmcore.stages.order import stage_of


@pytest.fixture(scope="module")
def judge(tiny_folder):
    return judge_of(str(tiny_folder), is_gold=True, device="cpu")


def test_its_rewards_are_those_of_the_model(judge, tiny_folder, gold_pairs):
    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu")
    prompts, texts = [pair.prompt for pair in gold_pairs[:8]], [pair.chosen for pair in gold_pairs[:8]]
    found = judge.rewards(prompts, texts)
    assert found.dtype == np.float64
    assert found.tolist() == rm.score(prompts, texts).astype(np.float64).tolist()
    assert judge.name == f"the reward model {tiny_folder.name}"


def test_who_is_named_comes_before_the_gold_world_and_nobody_is_nobody(judge):
    assert not isinstance(judge, GoldJudge)
    assert isinstance(judge_of(None, is_gold=True), GoldJudge)
    assert judge_of(None, is_gold=False) is None


@pytest.mark.parametrize("named", ["no/such/folder", "judge.py", "mine.judge"])
def test_a_folder_that_is_no_reward_models_is_refused(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text("")
    with pytest.raises(ConfigError, match="neither module:function nor the folder of a reward model"):
        require_named_judge(PolicyConfig(judge=named).judge)
    with pytest.raises(ConfigError, match="nowhere"):
        require_named_judge("nowhere:judge")
    with pytest.raises(ValueError, match="pattern"):
        PolicyConfig(judge="a:b:c")


def judge_that_returns(value, folder, monkeypatch, prefix="def"):
    """A function of the user's, as a judge."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_judge", raising=False)
    imports = "import numpy as np, torch\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
    (folder / "own_judge.py").write_text(f"{imports}{prefix} judge(prompt, response):\n    return {value}\n")
    return judge_of("own_judge:judge", is_gold=False)


NUMBERS = ["2.5", "np.array([[2.5]])", "torch.tensor([2.5], dtype=torch.bfloat16, requires_grad=True)"]
NUMBERS += ["Decimal('2.5')", "Fraction(5, 2)"]
NO_NUMBERS = ["np.bool_(True)", "np.array([1.0, 2.0])", "10**400", "Decimal('sNaN')", "1j", "'2.5'", "None"]


@pytest.mark.parametrize("value", [*NUMBERS, *NO_NUMBERS])
def test_numbers_of_other_libraries_are_numbers_and_what_is_none_is_refused_with_its_type(value, tmp_path, monkeypatch):
    judge = judge_that_returns(value, tmp_path, monkeypatch)
    if value in NUMBERS:
        assert judge.rewards(["p"], ["r"]).tolist() == [2.5]
    else:
        with pytest.raises(DataError, match=r"own_judge:judge gave .*, which is a \w+; a finite number"):
            judge.rewards(["p"], ["r"])


def test_a_coroutine_is_refused_before_it_is_called(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="asynchronous, so that it returns a coroutine"):
        judge_that_returns("1.0", tmp_path, monkeypatch, prefix="async def")


def write_audit(place, named, *, reliability, agreement=0.7, may_decide=True):
    """An audit as the command writes it, of a judge as it is now."""
    found = {"value": reliability, "ci_low": reliability - 0.098, "ci_high": reliability + 0.098}
    record = {
        "asked": judge_identity(named, JudgingConfig()),
        "verdict": {"may_decide": may_decide, "reasons": [] if may_decide else ["it is a coin"]},
        "metrics": {"agreement": {"value": agreement}, "reliability": found if reliability else {"value": None}},
    }
    place.write_text(json.dumps(record))
    return JudgingConfig(audit=str(place))


@pytest.fixture(params=["function", "reward model"])
def named(request, tiny_folder, tmp_path, monkeypatch):
    """Judges of single responses: a function in a file, and a checkpoint."""
    if request.param == "reward model":
        return str(tiny_folder)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "audited_judge.py").write_text("def judge(prompt, response): return len(response)")
    return "audited_judge:judge"


def test_an_audit_of_any_judge_is_honoured(named, tmp_path):
    judging = write_audit(tmp_path / "audit.json", named, reliability=0.8, may_decide=False)
    require_named_judge(named, judging)
    verdict = {"status": "rose", "headline": "Gained", "reasons": []}
    assert audited(verdict, "it", named, judging)["status"] == "unclear"
    assert "it is a coin" in audited(verdict, "it", named, judging)["reasons"]
    assert judge_noise(named, judging) == (0.8, pytest.approx(0.05))
    assert label_weight(named, judging) == pytest.approx(0.6)


def test_without_a_reliability_nothing_is_corrected_and_labels_count_by_agreement(named, tmp_path):
    judging = write_audit(tmp_path / "audit.json", named, reliability=0)
    assert judge_noise(named, judging) == (1, 0)
    assert label_weight(named, judging) == pytest.approx(0.4)
    assert (judge_noise(named, JudgingConfig()), label_weight(named, JudgingConfig())) == ((1, 0), None)
    coin = write_audit(tmp_path / "coin.json", named, reliability=0, agreement=0.49)
    with pytest.raises(ConfigError, match="no more often than a coin"):
        label_weight(named, coin)


def of_samples(place, named, judging):
    """A run on samples that this judge has judged before."""
    place.write_text("prompt,response,judge\n")
    policy = PolicyConfig(samples=str(place), judge=named, judging=judging)
    return PipelineConfig(data=DataConfig(source="pairs.csv"), policy=policy)


@pytest.mark.parametrize("endpoint", [None, "openai:m@http://127.0.0.1:1/v1"])
def test_an_audit_of_who_judged_given_samples_is_honoured(named, endpoint, tmp_path):
    judge = endpoint or named
    judging = write_audit(tmp_path / "audit.json", judge, reliability=0.8, may_decide=False)
    config = of_samples(tmp_path / "samples.csv", judge, judging)
    require_judge(config)
    asked = config.policy.verdict_judge, config.policy.verdict_judging
    assert judge_noise(*asked) == (0.8, pytest.approx(0.05))
    verdict = {"status": "ready", "headline": "good", "reasons": []}
    assert audited(verdict, "it", *asked)["status"] == "unclear"
    (tmp_path / "audit.json").unlink()
    with pytest.raises(ConfigError, match="is no audit"):
        require_judge(config)


def test_samples_that_were_judged_do_not_depend_on_how_their_judge_is_asked(tmp_path):
    named = "openai:m@http://127.0.0.1:1/v1"
    config = of_samples(tmp_path / "samples.csv", named, JudgingConfig())
    require_judge(config)
    other = of_samples(tmp_path / "samples.csv", None, JudgingConfig(mode="pairwise"))
    for stage in ("samples", "readiness_v2"):
        assert stage_of(stage, config).settings == stage_of(stage, other).settings


def test_the_audit_of_a_judge_that_was_changed_since_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = tmp_path / "changing_judge.py"
    code.write_text("def judge(prompt, response): return 1")
    judging = write_audit(tmp_path / "audit.json", "changing_judge:judge", reliability=0.8)
    code.write_text("def judge(prompt, response): return 2")
    with pytest.raises(ConfigError, match="audit of another judge"):
        audit_of("changing_judge:judge", judging)
    with pytest.raises(ValueError, match="names none"):
        PolicyConfig(judging=judging)
