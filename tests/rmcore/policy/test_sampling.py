"""Samples are draws of the policy's own distribution, and an interrupted call continues as if it had not been."""

import contextlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import small_policies as policies
from rmcore.core.errors import ConfigError, DataError, ModelError, ServingError
from rmcore.data.pair import Message
from rmcore.policy.policy import Policy
from rmcore.policy.sampling import sampler as generate_sampler
from rmcore.policy.sampling.sampler import SamplingSettings
from rmcore.policy.sampling.sampling import choose_sampler, draw_samples
from rmcore.serving.vllm_process import find_vllm

FEW = SamplingSettings(num_samples=3, max_new_tokens=6, seed=5)
PROMPTS = ["What is 2 + 2?", "What is 2 + 3?", (Message("user", "Hi"), Message("assistant", "?"), Message("user", "A"))]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Ends one response in eight at each token."""
    return Policy.load(policies.new_policy(tmp_path_factory.mktemp("policy"), size="tiny", eos_token_id=policies.STOPS))


def draw(policy, out, prompts=PROMPTS, settings=FEW, **options):
    return draw_samples(policy, prompts, settings, out, engine="generate", device="cpu", **options)


@pytest.fixture(scope="module")
def uninterrupted(policy, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "samples.jsonl"
    return draw(policy, out).rows, out.read_bytes()


def test_every_prompt_has_its_samples(policy, tmp_path):
    told = []
    found = draw(policy, tmp_path / "s.jsonl", report=lambda *state: told.append(state))
    assert found.engine == "generate"
    assert found.rows[["prompt_index", "sample"]].to_numpy().tolist() == [[p, s] for p in range(3) for s in range(3)]
    assert [done for done, _, _ in told] == [0, 1, 2, 3]
    again = draw(policy, tmp_path / "s.jsonl", report=lambda *state: told.append(state))
    assert again.rows.equals(found.rows)
    assert told[4:] == [(3, 3, "prompts sampled")]


def test_a_prompt_that_cannot_be_answered_is_left_out_and_said_and_the_others_keep_their_samples(
    policy, uninterrupted, tmp_path, capfd
):
    long = "one " * 2000
    found = draw(policy, tmp_path / "s.jsonl", prompts=[*PROMPTS, long])
    assert found.rows.equals(uninterrupted[0])
    assert "1 prompts cannot be read by the policy" in (said := capfd.readouterr().err)
    assert "prompt 3: 'one one" in said
    for prompts, words in (([long], "none of the 1 prompts can be answered; prompt 0: 'one one"), ([], "no prompts")):
        with pytest.raises(DataError, match=words):
            draw(policy, tmp_path / "t.jsonl", prompts=prompts)
    assert not (tmp_path / "t.jsonl").exists()


def rows_of(content):
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=15)
def test_a_file_cut_anywhere_goes_on_to_the_same_samples(policy, uninterrupted, tmp_path_factory, data):
    rows, content = uninterrupted
    out = tmp_path_factory.mktemp("cut") / "samples.jsonl"
    out.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    assert draw(policy, out).rows.equals(rows)
    assert rows_of(out.read_bytes()) == rows_of(content)


def test_what_is_drawn_for_a_prompt_does_not_depend_on_the_others_or_on_other_draws(policy, uninterrupted):
    drawn = {}
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    sampler = choose_sampler("auto", CPU)
    for order in ([2], [0, 1]):
        wanted = {index: policy.prompt_ids(PROMPTS[index]) for index in order}
        sampler.draw(policy, wanted, FEW, lambda samples: drawn.update({samples[0].prompt_index: samples}))
    assert torch.equal(torch.random.get_rng_state(), before)
    texts = [sample.response for index in range(3) for sample in drawn[index]]
    assert texts == uninterrupted[0]["response"].tolist()
    assert len(set(texts)) > 6


@pytest.mark.slow
def test_the_first_token_has_the_policys_distribution(policy, tmp_path):
    temperature = 0.2
    many = SamplingSettings(num_samples=2000, temperature=temperature, max_new_tokens=1)
    rows = draw(policy, tmp_path / "s", [PROMPTS[0]], many).rows
    expected = policies.first_texts(policy, PROMPTS[0], temperature)
    assert policies.p_value(rows["response"], expected) > 1e-3
    # The test would see it: half or twice the temperature is another distribution.
    for other in (temperature / 2, temperature * 2):
        assert policies.p_value(rows["response"], policies.first_texts(policy, PROMPTS[0], other)) < 1e-6


def test_nothing_that_a_folder_recommends_is_heard(policy, uninterrupted, tmp_path):
    advice = policies.RECOMMENDED | {"eos_token_id": policies.STOPS, "suppress_tokens": list(range(100, 600))}
    advised = Policy.load(policies.new_policy(tmp_path / "policy", size="tiny", **advice))
    assert draw(advised, tmp_path / "s").rows.equals(uninterrupted[0])


@pytest.mark.slow
def test_a_response_ends_at_its_first_stop_token_and_empty_ones_are_kept_and_counted(policy, tmp_path):
    found = draw(policy, tmp_path / "s", settings=SamplingSettings(200, max_new_tokens=6))
    rows = found.rows
    assert (rows["num_tokens"] <= 6).all()
    assert (rows["finished"] | (rows["num_tokens"] == 6)).all()
    assert (rows["num_tokens"][rows["finished"]] >= 1).all()
    # Each token of an untrained model is a stop token about once in eight, wherever it comes.
    assert rows["finished"].mean() == pytest.approx(1 - (7 / 8) ** 6, abs=0.1)
    assert len(rows) == 600
    assert (rows["response"] == "").sum() > 10
    one = Policy.load(policies.new_policy(tmp_path / "one", size="tiny"))
    assert (~draw(one, tmp_path / "t").rows["finished"]).sum() >= 8


@pytest.mark.slow
def test_a_prompts_samples_come_in_chunks_that_memory_holds(policy, tmp_path, monkeypatch):
    one, three = SamplingSettings(50, max_new_tokens=1), SamplingSettings(50, max_new_tokens=3)
    whole = [draw(policy, tmp_path / f"whole-{n}", settings=s).rows for n, s in enumerate((one, three))]
    monkeypatch.setattr(generate_sampler, "TOKENS_AT_ONCE", 200)
    parts = [draw(policy, tmp_path / f"parts-{n}", settings=s).rows for n, s in enumerate((one, three))]
    assert parts[0].equals(whole[0])  # row by row under one seed
    assert not parts[1].equals(whole[1])
    assert parts[1][["prompt_index", "sample"]].equals(whole[1][["prompt_index", "sample"]])


def test_broken_weights_are_said_and_missing_ones_are_not_made_up(tmp_path):
    broken = policies.change_weights(policies.new_policy(tmp_path / "broken", size="tiny"), policies.break_weights)
    with pytest.raises(ModelError, match="NaN or infinite: its weights are broken"):
        draw(Policy.load(broken), tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == b""
    folder = policies.new_policy(tmp_path / "missing", size="tiny")
    policies.change_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks weights \(model.layers.1.mlp.up_proj.weight"):
        draw(Policy.load(folder), tmp_path / "t")


WRONG = [("num_samples", 0), ("max_new_tokens", 0)]
WRONG += [("temperature", value) for value in (float("nan"), float("inf"), 0.001)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_settings_that_draw_nothing_or_that_an_engine_would_change_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        SamplingSettings(**{"num_samples": 1, name: value})


def test_a_vllm_that_is_not_there_is_said_before_anything_is_drawn(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("RM_OPT_VLLM", "/no/such/python")
    with pytest.raises(ConfigError, match="/no/such/python is no program"):
        draw_samples(policy, PROMPTS, FEW, tmp_path / "s", engine="vllm", device="cpu")
    with pytest.raises(ConfigError, match="none of auto, vllm, generate"):
        choose_sampler("magic", CPU)
    assert choose_sampler("auto", torch.device("cuda")).name == "generate"
    assert not (tmp_path / "s").exists()


def test_a_vllm_of_the_current_folder_is_not_executed(tmp_path, monkeypatch):
    program = tmp_path / ".venv-vllm" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RM_OPT_VLLM", raising=False)
    with contextlib.suppress(ConfigError):  # where none of ours was made
        assert find_vllm() != program


def test_a_vllm_that_does_not_start_leaves_what_is_stored(policy, uninterrupted, tmp_path, monkeypatch):
    program, out = tmp_path / "python", tmp_path / "s.jsonl"
    program.write_text("#!/bin/sh\necho no such device; exit 7\n")
    program.chmod(0o755)
    monkeypatch.setenv("RM_OPT_VLLM", str(program))
    first = uninterrupted[1].splitlines(keepends=True)[0]
    out.write_bytes(first)
    with pytest.raises(
        ServingError, match=r"status 7(.*\n)+.*no such device\nThe samples of 1 of 3 prompts are stored"
    ):
        draw_samples(policy, PROMPTS, FEW, out, engine="vllm", device="cpu")
    assert rows_of(out.read_bytes()) == rows_of(first)
    with pytest.raises(ConfigError, match="refuses more than 2"):
        draw_samples(policy, PROMPTS, SamplingSettings(1, 2.5), tmp_path / "t", engine="vllm", device="cpu")
