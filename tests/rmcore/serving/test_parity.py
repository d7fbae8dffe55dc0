"""The parity gate: rounding passes, everything else shows its worst rows."""

import math

import pytest
import torch

from rmcore.config.model import ModelConfig
from rmcore.core.errors import ServingError
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.parity import BF16_TOLERANCE, FLOAT32_TOLERANCE, check_probe, make_probe


@pytest.fixture(scope="module")
def rm():
    return BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device=torch.device("cpu"))


def test_the_probe_holds_the_models_rewards_at_every_length(rm):
    rm.model.train()
    state = torch.random.get_rng_state()
    probe = make_probe(rm, bf16=False)
    assert rm.model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    lengths = [len(ids) for ids in probe.token_ids]
    assert max(lengths) == 64
    assert min(lengths) < 30
    again = make_probe(rm, bf16=False, token_ids=probe.token_ids[::-1])
    assert again.rewards == pytest.approx(probe.rewards[::-1], abs=1e-6)
    check_probe(probe, probe.rewards)


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, FLOAT32_TOLERANCE), (True, BF16_TOLERANCE)])
def test_the_worst_rows_are_shown_first(rm, bf16, tolerance):
    probe = make_probe(rm, bf16=bf16)
    assert probe.tolerance == pytest.approx(tolerance, rel=2)
    served = [reward + 0.99 * probe.tolerance for reward in probe.rewards]
    check_probe(probe, served)
    served[3] = probe.rewards[3] + 2 * probe.tolerance
    served[5] = probe.rewards[5] - 3 * probe.tolerance
    with pytest.raises(ServingError, match="not served") as caught:
        check_probe(probe, served)
    lines = str(caught.value).splitlines()[1:]
    assert [int(line.split()[1].rstrip(",")) for line in lines[:2]] == [5, 3]
    assert f"{served[5]:+.6f}" in lines[0]


def test_a_reward_that_is_no_number_never_passes(rm):
    probe = make_probe(rm, bf16=True)
    served = list(probe.rewards)
    served[2] = math.nan
    with pytest.raises(ServingError, match="row 2"):
        check_probe(probe, served)


def test_weights_that_are_not_finite_make_no_probe():
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=64), seed=0, device=torch.device("cpu"))
    with torch.no_grad():
        rm.model.score.weight[0, 0] = math.nan
    with pytest.raises(ServingError, match="not finite"):
        make_probe(rm, bf16=False)
