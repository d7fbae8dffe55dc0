"""A pair or a sample that a reward model cannot read is left out with its reason, and is in the way of no other."""

import numpy as np
import pandas as pd
import pytest

from rmcore.core.errors import DataError
from rmcore.core.progress import silent
from rmcore.data.pair import Message, PreferencePair, prompt_key
from rmcore.data.rendering import Renderer, Rendering
from rmcore.ensembles.ensemble import Members
from rmcore.ensembles.score import readable_pairs
from rmcore.policy.grpo.group_reward import LocalReward
from rmcore.policy.sampling.samples import score_samples

SYSTEM = (Message("system", "be brief"), Message("user", "hi"))
BAD = PreferencePair(SYSTEM, "c", "d", pair_id="bad")


@pytest.fixture
def strict(rm):
    """Its template refuses a system turn, and loses what a response thinks aloud."""
    rm.tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "{{ m['role'] + ': ' + m['content'] | replace('THOUGHT', '') }}\n{% endfor %}"
    )
    rm.renderer = Renderer(rm.tokenizer, Rendering("chat", 128))
    return rm


def test_pairs_are_left_out_with_a_count_and_a_reason(strict, gold_pairs, capfd):
    good = gold_pairs[:4]
    assert readable_pairs(strict, [*good, BAD]) == good
    assert capfd.readouterr().err.startswith("warning: 1 pairs cannot be read by this model and are left out; pair bad")
    members = Members()
    members.add(strict, "one")
    assert members.readable([BAD, *good]) == good
    with pytest.raises(DataError, match="1 of 2 sides cannot be read; side 1, from 0: the chat template refuses"):
        LocalReward(strict)(["hi", SYSTEM], ["a", "b"])


def test_a_sample_without_a_reward_takes_its_prompt_out_aloud(strict, capfd):
    prompts = ["one", "two", "three"]
    table = pd.DataFrame([(prompt_key(p), p, f"{p} {n}") for p in prompts for n in range(4)])
    table.columns = ["prompt_id", "prompt", "response"]
    whole = score_samples(strict, table, silent)
    assert whole.samples.equals(table)
    assert whole.num_unreadable == 0
    table.loc[5, "response"] = "THOUGHT of two"
    found = score_samples(strict, table, silent)
    kept = table["prompt"] != "two"
    assert found.num_unreadable == 1
    assert found.samples.equals(table[kept].reset_index(drop=True))
    np.testing.assert_allclose(found.rewards, whole.rewards[kept], rtol=1e-6)
    said = capfd.readouterr().err
    assert "1 samples, with all others of their 1 prompts, cannot be read by this model" in said
    assert "that 'two' is answered with: the chat template dropped or rewrote" in said
    with pytest.raises(DataError, match=r"4 of 4 samples cannot be read .*at least one of each prompt"):
        score_samples(strict, table.iloc[4:8].assign(response="THOUGHT"), silent)
