"""What comes from outside: samples judged elsewhere, a policy of another kind, a reward model trained elsewhere."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import policy_chain
from rmcore.config.data import DataConfig
from rmcore.core.errors import DataError, ModelError
from rmcore.core.store import Store
from rmcore.data.pair import Message, prompt_key
from rmcore.data.table import read_pairs, write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import build_tiny
from rmcore.stages.order import stage_of
from rmcore.stages.policy import _responses
from single_stage import run_stage
from tasks.checkpoints import given_checkpoint

Chain, changed = policy_chain.Chain, policy_chain.changed


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory, gold_pairs):
    """Pairs of unknown truth; every other prompt is a dialogue."""
    pairs = [
        replace(pair, prompt=(Message("system", "be brief"), Message("user", str(pair.prompt))), pair_id="")
        if len(str(pair.prompt)) % 2
        else pair
        for pair in gold_pairs[:80]
    ]
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    write_pairs(pairs, path)
    return path


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A reward model that was not trained here."""
    return build_tiny(tmp_path_factory.mktemp("elsewhere") / "reward_model", seed=3)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A causal model with learned positions, a vocabulary of its own and no chat template."""
    folder = tmp_path_factory.mktemp("gpt") / "policy"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(["the answer is four and the other one is not"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=len(tokenizer), n_positions=512, n_embd=32, n_layer=1, n_head=2, eos_token_id=0, bos_token_id=0
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chain(tmp_path_factory, pairs_file, reward_model, policy):
    folder = tmp_path_factory.mktemp("outside")
    config = changed(
        data=DataConfig(source=str(pairs_file), test_fraction=0.2),
        policy={"name": str(policy), "num_prompts": 5, "samples_per_prompt": 5, "max_new_tokens": 12},
    )
    return Chain(Store(folder / "store"), config, {"train": given_checkpoint(str(reward_model), folder / "given")})


@pytest.mark.slow
def test_between_policy_and_reward_model_only_text_travels(chain, policy, reward_model):
    samples = pd.read_parquet(chain.folder("samples") / "samples.parquet")
    assert len(samples) == 25
    tokenizer = AutoTokenizer.from_pretrained(policy)
    for text, num_tokens, finished in samples[["response", "num_tokens", "finished"]].itertuples(index=False):
        assert len(tokenizer(text)["input_ids"]) <= num_tokens or "�" in text
        assert finished or num_tokens == 12
    rewards = pd.read_parquet(chain.folder("overoptimization") / "rewards.parquet")["reward"].to_numpy()
    rm = BradleyTerryRM.from_pretrained(reward_model, device="cpu")
    test = {prompt_key(pair.prompt): pair.prompt for pair in read_pairs(chain.folder("prepare") / "test.parquet")}
    prompts = [test[key] for key in samples["prompt_id"]]
    assert {type(prompt) for prompt in prompts} == {str, tuple}  # a dialogue is scored with its turns
    assert rewards == pytest.approx(rm.score(prompts, samples["response"]), abs=1e-4)


@pytest.mark.slow
def test_where_nobody_judges_there_is_what_needs_no_judge_and_nothing_else(chain):
    record = json.loads((chain.folder("overoptimization") / "overoptimization.json").read_text())
    assert record["judge"] == "nobody"
    assert [row["n"] for row in record["best_of_n"]] == [1, 2, 4]
    assert not {"parts", "curves"} & record.keys()
    assert not (chain.folder("overoptimization") / "figures").exists()
    sampling = json.loads((chain.folder("samples") / "sampling.json").read_text())
    assert (sampling["num_judged"], sampling["mean_gold"]) == (0, None)
    judged = json.loads((chain.folder("readiness_v2") / "readiness.json").read_text())
    assert judged["verdict"]["status"] == "unclear"
    failed = {check["name"]: check["text"] for check in judged["gate"] if not check["passed"]}
    for name in ("planned_gain", "win_rate_16", "worthwhile_gain", "fall"):
        assert "not measured" in failed[name]


def test_a_reward_model_that_was_moved_is_the_same_one_and_another_is_not(reward_model, tmp_path):
    first = given_checkpoint(str(reward_model), tmp_path / "given")
    best = Path(first.path) / "best"
    assert best.resolve() == reward_model.resolve()
    moved = tmp_path / "moved"
    moved.symlink_to(reward_model)
    copied = build_tiny(tmp_path / "copied", seed=3)
    for place in (reward_model, moved, copied):
        again = given_checkpoint(str(place), tmp_path / "given")
        assert again == first
        assert best.resolve() == place.resolve()
    other = given_checkpoint(str(build_tiny(tmp_path / "other", seed=4)), tmp_path / "given")
    assert other.key != first.key
    assert other.digest != first.digest


@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_what_is_no_checkpoint_folder_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no checkpoint folder"):
        given_checkpoint(str(tmp_path / name), tmp_path / "given")
    assert not (tmp_path / "given").exists()


def test_a_policy_of_ones_own_pairs_learns_both_responses_of_the_training_pairs(chain):
    training = read_pairs(chain.folder("prepare") / "train.parquet")

    def wanted(**settings):
        return stage_of("policy", changed(chain.config, policy={"name": "sft"} | settings))

    rows = _responses(wanted(), chain.folder("prepare"))
    assert set(rows) == {(pair.prompt, side) for pair in training for side in (pair.chosen, pair.rejected)}
    assert len(rows) == len(set(rows))
    assert _responses(wanted(sft_examples=10), chain.folder("prepare")) == rows[:10]


@pytest.mark.slow
def test_a_policy_is_trained_and_kept_in_float32_whatever_its_base_is_stored_in(chain, tmp_path):
    base = build_tiny(tmp_path / "base", seed=0)
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    assert AutoModelForCausalLM.from_pretrained(base).dtype == torch.bfloat16
    config = changed(chain.config, policy={"name": "sft", "base": str(base), "sft_examples": 10})
    out = tmp_path / "out"
    out.mkdir()
    run_stage("policy", config, {"prepare": chain.folder("prepare")}, out)
    assert AutoModelForCausalLM.from_pretrained(out / "model").dtype == torch.float32


def judged_rows():
    """Six samples of three prompts in mixed order, their judge's reward, and a reward that grows with it."""
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": f"question {number % 3}?", "response": f"answer {number} " + "so " * int(rng.integers(9)),
         "score": float(rng.normal()), "other": 1.0}
        for number in range(18)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def with_file(chain, table, path, **policy):
    """The chain under a config that names a file of samples."""
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_json(path, orient="records", lines=True)
    settings = {"samples": str(path), "judge_column": "score"} | policy
    return chain.with_config(policy=settings, readiness={"planned_kl": 0.3})


@pytest.mark.slow
def test_judged_samples_of_a_file_take_the_place_of_sampling(chain, tmp_path):
    table = judged_rows()
    other = with_file(chain, table, tmp_path / "judged.jsonl")
    found = pd.read_parquet(other.folder("samples") / "samples.parquet")
    assert list(found.groupby("prompt", sort=False).size()) == [6, 6, 6]
    expected = table.sort_values("prompt", kind="stable")
    assert found["gold"].tolist() == pytest.approx(expected["score"].tolist())
    assert found["prompt"].tolist() == expected["prompt"].tolist()
    assert [text.strip() for text in found["response"]] == [text.strip() for text in expected["response"]]
    record = json.loads((other.folder("overoptimization") / "overoptimization.json").read_text())
    assert record["judge"] == "column score of the given samples"
    assert "on_policy_accuracy" in record["parts"]
    assert not (other.folder("policy") / "model").exists()  # nothing is done with a policy, so none is trained


def test_rows_without_a_judge_are_left_out_and_prompts_with_fewer_than_four(chain, tmp_path):
    table = judged_rows()
    rows = {number: table.index[table["prompt"] == f"question {number}?"] for number in range(3)}
    table.loc[rows[0][:2], "score"] = np.nan  # four are left
    table.loc[rows[1][:3], "score"] = [np.inf, np.nan, -np.inf]  # three
    texts = table.assign(score=table["score"].astype(object).where(table["score"].notna(), "not judged"))
    for name, one in (("numbers.parquet", table), ("texts.csv", texts)):
        found = pd.read_parquet(with_file(chain, one, tmp_path / name).folder("samples") / "samples.parquet")
        assert found.groupby("prompt").size().to_dict() == {"question 0?": 4, "question 2?": 6}
        assert np.isfinite(found["gold"]).all()


@pytest.mark.slow
def test_what_has_no_judgement_is_said_in_the_verdict_and_counts_as_lost(chain, tmp_path, capsys):
    table = judged_rows()
    rows = {number: table.index[table["prompt"] == f"question {number}?"] for number in range(3)}
    table.loc[[*rows[0][:2], *rows[1][:3]], "score"] = np.nan
    other = with_file(chain, table, tmp_path / "some.parquet")
    judged = json.loads((other.folder("readiness_v2") / "readiness.json").read_text())
    said = [reason for reason in judged["verdict"]["reasons"] if "left out" in reason]
    assert [text[:8] for text in said] == ["5 of 18 ", "1 of 3 p"]
    assert "5 of 18" not in (told := capsys.readouterr().err)  # of the others one prompt goes with all of its samples
    assert "8 of 18 samples are left out, 1 of 3 prompts with all of theirs" in told
    found = json.loads((other.folder("overoptimization") / "overoptimization.json").read_text())
    assert said == found["left_out"][1:3]  # the first says that nothing is known of the reward model's training
    assert found["left_out"][3].startswith("the judged samples are ")
    assert found["left_out"][3] in judged["verdict"]["reasons"]
    [check] = [one for one in judged["gate"] if one["name"] == "unseen_prompts"]
    assert check["unclear"]
    assert not check["passed"]


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda table: table, {"judge_column": "gold"}, "has no column gold among prompt, response, score, other"),
        (lambda table: table.drop(columns="response"), {}, "has no column response"),
        (lambda table: table.assign(score=np.nan), {}, "has no number in 'score' of 4 samples of any prompt"),
        (lambda table: table.groupby("prompt").head(3), {}, "of 4 samples of any prompt"),
        (lambda table: table.assign(prompt=[["a", "dialogue"]] * len(table)), {}, "prompts that are no text"),
    ],
)
def test_files_that_cannot_be_used_are_refused(chain, tmp_path, change, settings, words):
    other = with_file(chain, change(judged_rows()), tmp_path / "samples.jsonl", **settings)
    with pytest.raises(DataError, match=words):
        other.ref("samples")
