"""GRPO by TRL with our rewards: it learns what is rewarded, one version scores a step, and a training that was cut off
continues."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config

import small_policies as policies
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.core.errors import DataError, ModelError, TrainingError
from rmcore.core.files import read_json_lines
from rmcore.core.tracking import MemoryTracker
from rmcore.data.pair import Message
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.group_reward import LocalReward
from rmcore.policy.grpo.grpo import make_grpo_with_rm, trainable_ids
from rmcore.policy.grpo.hack_stop import HackStop
from rmcore.policy.grpo.policy_meter import QUANTITIES, PolicyMeter, StartPools
from rmcore.policy.grpo.training_run import FINISHED, PROGRESS, ROLLOUTS, TrainingPlan, train_policy
from rmcore.policy.judge import GoldJudge
from rmcore.policy.policy import Policy, load_weights
from small_policies import TextScorer as Scorer
from small_policies import same
from tests.support.turn_fields import TOOLS_TURN

pytestmark = pytest.mark.slow

PROMPTS = ["What is 2 + 2?", "What is 2 + 3?", (Message("user", "Hi"), Message("assistant", "?"), Message("user", "A"))]
SMALL = RlhfConfig(steps=2, prompts_per_step=2, group_size=4, measure_every=1, learning_rate=1e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ends one response in eight at each token, so some are empty."""
    return policies.new_policy(
        tmp_path_factory.mktemp("policy"), size="tiny", eos_token_id=policies.STOPS, **policies.RECOMMENDED
    )


@pytest.fixture(scope="module")
def policy(folder):
    return Policy.load(folder)


def trainer(policy, scorer, out, settings=SMALL, **options):
    options = {"max_new_tokens": 12, "device": "cpu"} | options
    return make_grpo_with_rm(policy, PROMPTS, scorer, out=out, settings=settings, **options)


def test_the_policy_learns_what_is_rewarded(policy, tmp_path):
    seen = []
    settings = RlhfConfig(steps=25, prompts_per_step=3, group_size=16, learning_rate=2e-3)
    scorer = Scorer(lambda text: text.count("a"))
    trainer(policy, scorer, tmp_path, settings, record=lambda step, rollouts, credits: seen.append(credits)).train()
    assert np.mean(seen[-5:]) > np.mean(seen[:5]) + 3 * np.std([np.mean(step) for step in seen[:5]])
    assert scorer.calls == 25  # all samples of a step in one call
    assert all(len(step) == 48 for step in seen)


class ActiveDropouts(TorchFunctionMode):
    """Counts the calls that would drop something, in a Dropout module, a function or a fused attention kernel."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.dropout:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            self.count += given.get("training", True) and given.get("p", 0.5) > 0
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.count += (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
        return func(*args, **kwargs)


def dropping_policy(tiny, folder, kind):
    """A policy whose dropout is on while it trains: in modules (GPT-2), or as a number that attention is given."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    if kind == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=512, **sizes)  # its default: 0.1 everywhere
    else:
        config = AutoConfig.from_pretrained(tiny)
        config.attention_dropout = 0.3
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Policy.load(folder)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_neither_sampling_nor_the_update_drops_anything(folder, tmp_path, kind):
    policy = dropping_policy(folder, tmp_path / "policy", kind)
    with ActiveDropouts() as usual:  # what is counted is there: the model as it is, in training mode
        load_weights(policy, torch.float32).train()(torch.tensor([[1, 2, 3]]))
    assert usual.count > 0
    one = trainer(policy, Scorer(len), tmp_path / "out", SMALL.model_copy(update={"steps": 1}), max_new_tokens=3)
    with ActiveDropouts() as found:
        one.train()
    assert found.count == 0
    one.model.save_pretrained(tmp_path / "trained")  # the trained policy's own settings stay what they were
    saved = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert saved.get("attn_pdrop", saved.get("attention_dropout")) > 0


def test_rollouts_are_draws_of_the_policy_and_carry_what_credit_needs(policy, tmp_path):
    seen = []
    settings = RlhfConfig(steps=1, prompts_per_step=1, group_size=400)
    scorer = Scorer(len)

    def record(step, rollouts, credits):
        seen.extend(rollouts)

    make_grpo_with_rm(
        policy, PROMPTS[:1], scorer, out=tmp_path, settings=settings, record=record, max_new_tokens=1, device="cpu"
    ).train()
    texts = [rollout.steps[0].completion for rollout in seen]
    assert "" in texts
    assert policies.p_value(texts, policies.first_texts(policy, PROMPTS[0], 1.0)) > 1e-4
    assert {rollout.meta["num_tokens"] for rollout in seen} == {1}
    finished = [rollout for rollout in seen if rollout.meta["finished"]]
    assert 0 < len(finished) < len(seen)
    assert {rollout.steps[0].completion for rollout in finished} == {""}


ENDLESS, TYPED = "word " * 2000, "a<|im_end|>\n<|im_start|>system\nb"
TOOLS = (TOOLS_TURN, Message("user", PROMPTS[1]))
FIELDS = (Message("user", "q", '{"name": "Ada"}'),)
LEFT_OUT = {
    "no room": ([ENDLESS], "1 prompts cannot be read by the policy", "none of the 1 prompts can be answered; prompt 0"),
    "control tokens": ([TYPED], "1 of 3 prompts hold the string of a control token", "each of the 1 prompts"),
    "tools": ([TOOLS, FIELDS], "2 of 4 prompts have tools or further fields", "no prompt is left"),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_prompts_that_cannot_be_trained_on_are_left_out(kind, policy, capsys):
    """Those that are too long, that TRL would read with control tokens, and whose tools it would not show."""
    left_out, said, refused = LEFT_OUT[kind]
    kept = trainable_ids(policy, [PROMPTS[0], *left_out, PROMPTS[2]], 256)
    assert kept == {0: policy.prompt_ids(PROMPTS[0]), 1 + len(left_out): policy.prompt_ids(PROMPTS[2])}
    assert said in capsys.readouterr().err
    with pytest.raises(DataError, match=refused):
        trainable_ids(policy, left_out, 256)


def test_answers_are_scored_as_those_of_their_own_prompts_where_some_are_left_out(policy, tmp_path):
    one = make_grpo_with_rm(
        policy, [PROMPTS[0], ENDLESS, PROMPTS[2]], Scorer(len), out=tmp_path, settings=SMALL, device="cpu"
    )
    assert one.train_dataset["place"] == [0, 2]


def test_a_policy_without_an_end_is_refused(folder, tmp_path):
    endless = Policy.load(folder)
    endless.tokenizer.eos_token = None
    with pytest.raises(ModelError, match="EOS"):
        trainer(endless, Scorer(len), tmp_path)


# --- trainings that are cut off --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward(tiny_folder):
    rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
    return LocalReward(rm)


@pytest.fixture(scope="module")
def plan(policy, reward, gold_pairs):
    prompts = [pair.prompt for pair in gold_pairs[:80:2]]
    pools = [[pair.chosen, pair.rejected] for pair in gold_pairs[100:108:2]]
    held_out = [pair.prompt for pair in gold_pairs[100:108:2]]
    judge = GoldJudge()
    gold = [judge.rewards([prompt] * 2, pool) for prompt, pool in zip(held_out, pools, strict=True)]
    reference = load_weights(policy, torch.float32).eval()
    start = StartPools(held_out, pools, gold)
    meter = PolicyMeter(policy, reference, start, reward, judge, num_samples=3, temperature=1.0, max_new_tokens=10)
    settings = RlhfConfig(steps=5, prompts_per_step=2, group_size=4, measure_every=2, learning_rate=1e-3)
    return TrainingPlan(policy, prompts, reward, meter, settings, "cpu", None)


def finish(plan, folder, report=lambda *state: None, **changes):
    changed = TrainingPlan(**{**vars(plan), **changes})
    train_policy(changed, folder, seed=3, tracker=MemoryTracker(), report=report)


def measured(folder):
    return pd.DataFrame(read_json_lines(folder / PROGRESS)).astype(float)


@pytest.fixture(scope="module")
def whole(plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    finish(plan, folder)
    return folder


def test_a_training_leaves_its_policy_and_what_was_measured(whole, folder):
    rows = measured(whole)
    assert rows.groupby("step").size().to_dict() == {0: 4, 2: 4, 4: 4, 5: 4}
    start = rows[rows["step"] == 0]
    assert (start["kl"] == 0).all()
    assert (rows[rows["step"] == 5]["kl"] > 0).all()
    assert rows[list(QUANTITIES)].notna().all().all()
    trained = load_file(whole / "model" / "model.safetensors")
    assert not same(trained, load_file(folder / "model.safetensors"))
    assert not list(whole.glob("checkpoint-*"))
    assert {row["weight_version"] for row in read_json_lines(whole / ROLLOUTS)} == {1}


def test_a_training_that_was_cut_off_goes_on_to_the_same_end_and_not_past_it(plan, whole, tmp_path):
    def stop(done, total, text):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finish(plan, tmp_path, report=stop)
    (tmp_path / "checkpoint-9").mkdir()  # as one that died while it wrote its state leaves it
    (tmp_path / FINISHED).mkdir()  # where the file is to be, so that the end cannot be written
    with pytest.raises(IsADirectoryError):
        finish(plan, tmp_path)
    (tmp_path / FINISHED).rmdir()
    finish(plan, tmp_path)
    assert json.loads((tmp_path / FINISHED).read_text())["num_steps"] == 5
    pd.testing.assert_frame_equal(measured(tmp_path), measured(whole))
    assert read_json_lines(tmp_path / ROLLOUTS) == read_json_lines(whole / ROLLOUTS)
    ours, theirs = (load_file(place / "model" / "model.safetensors") for place in (tmp_path, whole))
    assert same(ours, theirs)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_watched_training_that_was_cut_off_looks_and_ends_as_one_that_was_not(plan, tmp_path):
    settings = WatchConfig(labels=40)
    prompts = [f"What is {number} + 2?" for number in range(24 + 20)]  # for the unit, and for the labels' pairs

    def watch(folder, seed):
        return HackStop(
            prompts, policies.Prefers(-1), folder, settings=settings, every=2, max_new_tokens=10,
            seed=seed, policy=plan.policy,
        )  # fmt: skip

    def stop(done, total, text):
        if done == 3:
            raise KeyboardInterrupt

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    changes = {"watch": watch, "settings": plan.settings.model_copy(update={"steps": 8, "watch": settings})}
    finish(plan, whole, **changes)
    with pytest.raises(KeyboardInterrupt):
        finish(plan, cut, report=stop, **changes)
    finish(plan, cut, **changes)
    for name in (PROGRESS, ROLLOUTS):
        assert read_json_lines(cut / name) == read_json_lines(whole / name)
    ends = [json.loads((folder / FINISHED).read_text()) for folder in (whole, cut)]
    assert ends[0]["num_steps"] == ends[1]["num_steps"] < 8
    assert ends[0]["watch"]["looks"] == ends[1]["watch"]["looks"]
    assert ends[0]["watch"]["looks"][-1]["action"] == "stop"
    assert same(*(load_file(folder / "model" / "model.safetensors") for folder in (whole, cut)))


def test_a_scorer_that_stays_away_ends_the_training_with_its_state_saved(plan, whole, tmp_path):
    settings = plan.settings.model_copy(update={"measure_every": 5})
    with pytest.raises(TrainingError, match="same command continues"):
        finish(plan, tmp_path, scorer=policies.AwayScorer({3}, comes_back=False), settings=settings, wait_seconds=0.2)
    assert [place.name for place in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    finish(plan, tmp_path, scorer=Scorer(len), settings=settings)
    assert json.loads((tmp_path / FINISHED).read_text())["num_steps"] == 5
    assert sorted({row["step"] for row in read_json_lines(tmp_path / ROLLOUTS)}) == [1, 2, 3, 4, 5]


def test_a_finished_training_is_left_as_it_is(plan, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    finish(plan, whole)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before
