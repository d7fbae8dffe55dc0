"""A reward head that another trainer saved gives that trainer's rewards: computed here by the backbone and the head.

Whether a checkpoint has one is read from its weights; its configuration may say little of it.
"""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from rmcore.cli.export import export
from rmcore.config.model import ModelConfig
from rmcore.core.errors import ModelError
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer
from tests.support.random_models import hugging_face_rewards

PROMPTS, RESPONSES = ["What is 2 + 2?", "Hello", "Sort: pear, fig"], ["It is 4.", "no", "fig, pear. Gladly."]
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
KINDS = {
    "qwen2": lambda **more: hf.Qwen2Config(**SHAPE, num_key_value_heads=1, **more),
    "llama": lambda **more: hf.LlamaConfig(**SHAPE, num_key_value_heads=1, **more),
    "gpt2": lambda **more: hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, **more),
    "roberta": lambda **more: hf.RobertaConfig(**SHAPE, max_position_embeddings=140, initializer_range=0.2, **more),
}
CAUSAL = ["qwen2", "llama", "gpt2"]
BIAS, MEAN, STD = 0.75, -1.5, 2.5


def language_model(folder, kind="qwen2"):
    """A causal language model on disk, with its tokenizer, and a head of one output."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = KINDS[kind](vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, torch.randn(1, 16)


def add_tensors(folder, tensors, **changes):
    """Put tensors into the model's own file, and entries into its configuration."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def llama_factory(folder, weight):
    tensors = {"v_head.summary.weight": weight, "v_head.summary.bias": torch.tensor([BIAS])}
    save_file(tensors, folder / "value_head.safetensors")


def trl(folder, weight):
    add_tensors(folder, {"v_head.summary.weight": weight, "v_head.summary.bias": torch.tensor([BIAS])})


def openrlhf(folder, weight, name, is_normalised):
    changes = {"architectures": ["LLMForSequenceRegression"], "value_head_prefix": name}
    add_tensors(folder, {f"{name}.weight": weight}, **changes, normalize_reward=is_normalised, mean=MEAN, std=STD)


def token_classifier(folder, weight):
    add_tensors(
        folder,
        {"score.weight": weight, "score.bias": torch.tensor([BIAS])},
        architectures=["Qwen2ForTokenClassification"],
    )


# What writes the head, and the trainer's rewards of the head's product with the last state.
TRAINERS = {
    "LLaMA-Factory": (llama_factory, lambda r: r + BIAS),
    "TRL": (trl, lambda r: r + BIAS),
    "trlX": (lambda folder, weight: add_tensors(folder, {"v_head.weight": weight}), lambda r: r),
    "OpenRLHF": (lambda *it: openrlhf(*it, "value_head", False), lambda r: r),
    "OpenRLHF, normalised": (lambda *it: openrlhf(*it, "value_head", True), lambda r: (r - MEAN) / STD),
    "OpenRLHF's score, normalised": (lambda *it: openrlhf(*it, "score", True), lambda r: (r - MEAN) / STD),
    "UltraRM": (lambda folder, weight: add_tensors(folder, {"regression_head.weight": weight}), lambda r: r),
    "token classifier": (token_classifier, lambda r: r + BIAS),
}


def products(rm, model, weight):
    """The head's product with the last token's last hidden state, in float64."""
    sides = rm.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))
    with torch.inference_mode():
        states = [
            model.double()(torch.tensor([side.ids]), output_hidden_states=True).hidden_states[-1] for side in sides
        ]
    return np.array([float(state[0, -1] @ weight[0].double()) for state in states])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_rewards_are_those_of_the_trainer_but_for_a_named_constant(trainer, tmp_path, capsys):
    write, rewards_of = TRAINERS[trainer]
    model, weight = language_model(tmp_path / "rm")
    write(tmp_path / "rm", weight)
    rm = BradleyTerryRM.from_pretrained(tmp_path / "rm", device="cpu", max_seq_len=64)
    said = capsys.readouterr().err
    expected = rewards_of(products(rm, model, weight))
    constant = float(rewards_of(0.0))
    found = rm.score(PROMPTS, RESPONSES)
    np.testing.assert_allclose(found + constant, expected, atol=1e-5)
    assert (f"{constant:+.6g}" in said) == (constant != 0)
    export(str(tmp_path / "rm"), tmp_path / "plain")  # and the same from a plain folder, by transformers' own class
    assert not {"mean", "std"} & set(hf.AutoConfig.from_pretrained(tmp_path / "plain").to_dict())
    sides = rm.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))
    np.testing.assert_allclose(hugging_face_rewards(tmp_path / "plain", sides), found, atol=1e-5)
    again = BradleyTerryRM.from_pretrained(tmp_path / "plain", device="cpu").score(PROMPTS, RESPONSES)
    np.testing.assert_allclose(again, found, atol=1e-6)


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("defer", [False, True])
def test_training_starts_from_the_foreign_head(kind, defer, tmp_path):
    model, weight = language_model(tmp_path, kind)
    trl(tmp_path, weight)
    rm = BradleyTerryRM.new(
        ModelConfig(name=str(tmp_path), max_seq_len=64), seed=3, device=torch.device("cpu"), defer=defer
    )
    assert not rm._origin.fresh
    np.testing.assert_allclose(rm.score(PROMPTS, RESPONSES), products(rm, model, weight), atol=1e-5)


@pytest.mark.slow
def test_an_adapter_of_a_language_model_with_a_head_file_is_read(tmp_path):
    """As LLaMA-Factory saves LoRA: adapters of the language model, the head in a file next to them."""
    model, weight = language_model(tmp_path / "base")
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    llama_factory(tmp_path / "adapter", weight)
    rm = BradleyTerryRM.from_pretrained(tmp_path / "adapter", device="cpu", max_seq_len=64)
    expected = products(rm, adapted.eval(), weight)
    np.testing.assert_allclose(rm.score(PROMPTS, RESPONSES), expected, atol=1e-5)
    rm.save(tmp_path / "merged")
    for saved in ("merged", "merged/adapter"):
        again = BradleyTerryRM.from_pretrained(tmp_path / saved, device="cpu")
        np.testing.assert_allclose(again.score(PROMPTS, RESPONSES), expected, atol=1e-5)
    trained = [name for name, parameter in rm.model.named_parameters() if parameter.requires_grad]
    assert any("score" in name for name in trained)
    assert any("lora_" in name for name in trained)


class Planted:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a checkpoint ran')",))


def tensors(**named):
    return lambda folder, weight: add_tensors(
        folder, {name.replace("__", "."): one.clone() for name, one in named.items()}
    )


def pickled(folder, weight):
    torch.save({"v_head.summary.weight": Planted()}, folder / "value_head.bin")


def normalised(**changes):
    return lambda folder, weight: (openrlhf(folder, weight, "value_head", True), add_tensors(folder, {}, **changes))


ONE = torch.ones(1, 16)
REFUSED = {
    "two outputs": (tensors(v_head__summary__weight=torch.ones(2, 16)), ""),
    "several layers": (tensors(v_head__0__weight=torch.ones(16, 16), v_head__2__weight=ONE), ""),
    "two heads": (tensors(v_head__weight=ONE, value_head__weight=ONE), ""),
    "a score and a head": (tensors(v_head__weight=ONE, score__weight=ONE), ""),
    "not finite": (tensors(value_head__weight=torch.full((1, 16), float("nan"))), ""),
    "another width": (tensors(value_head__weight=torch.ones(1, 8)), ""),
    "a spread of 0": (normalised(std=0.0), "std"),
    "a spread that is none": (normalised(std=float("nan")), "std"),
    "a mean that is a text": (normalised(mean="x"), "std"),
    "no spread": (normalised(std=None), "std"),
    "a pickle": (pickled, r"value_head\.bin"),
}


@pytest.mark.parametrize(("write", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_one_linear_head_is_refused_and_no_code_is_run(write, named, tmp_path):
    _, weight = language_model(tmp_path)
    write(tmp_path, weight)
    with pytest.raises(ModelError, match=named):
        BradleyTerryRM.from_pretrained(tmp_path, device="cpu")


def test_a_head_that_is_put_next_to_a_sealed_model_is_not_its_head(tmp_path):
    """Neither one that was added, nor the one of the folder that it was saved into."""
    _, weight = language_model(tmp_path)
    llama_factory(tmp_path, weight)
    rm = BradleyTerryRM.from_pretrained(tmp_path, device="cpu", max_seq_len=64)
    expected = rm.score(PROMPTS, RESPONSES)
    rm.model.score.weight.data.mul_(-3)
    rm.save(tmp_path)
    again = BradleyTerryRM.from_pretrained(tmp_path, device="cpu").score(PROMPTS, RESPONSES)
    np.testing.assert_allclose(again, -3 * expected, atol=1e-5)


NAMES = {
    "its own class, without num_labels": {},
    "a language model": {"architectures": ["XForCausalLM"]},
    "a backbone": {"architectures": ["XModel"]},
    "OpenRLHF": {"architectures": ["LLMForSequenceRegression"], "value_head_prefix": "score"},
    "no class": {"architectures": None},
}


def make(folder, kind, labels=1):
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = KINDS[kind](vocab_size=len(tokenizer), num_labels=labels, pad_token_id=tokenizer.pad_token_id)
    hf.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rename(folder, changes):
    """Leave out all that the configuration says of labels, and make the changes."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_labels", "id2label", "label2id", "problem_type"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config | changes))


def rewards_of(folder):
    return BradleyTerryRM.from_pretrained(folder, device="cpu", max_seq_len=64).score(PROMPTS, RESPONSES)


CALLED = [
    *(("qwen2", name) for name in NAMES),
    ("llama", "a backbone"),
    ("roberta", "a backbone"),
    ("roberta", "no class"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CALLED)
def test_a_head_of_one_row_is_a_reward_head_whatever_the_configuration_calls_it(tmp_path, kind, name):
    folder = make(tmp_path, kind)
    expected = rewards_of(folder)
    rename(folder, NAMES[name])
    assert np.array_equal(rewards_of(folder), expected)
    config = ModelConfig(name=str(folder), max_seq_len=64)
    for defer in (False, True):  # the same head is trained on, and none is drawn
        rm = BradleyTerryRM.new(config, seed=1, device=torch.device("cpu"), defer=defer)
        assert not rm._origin.fresh


@pytest.mark.parametrize(("kind", "name"), CALLED)
def test_a_head_of_several_rows_is_refused_by_their_number(tmp_path, kind, name):
    folder = make(tmp_path, kind, labels=5)
    rename(folder, NAMES[name])
    with pytest.raises(ModelError, match="5 labels"):
        rewards_of(folder)


@pytest.mark.parametrize("name", NAMES)
def test_weights_without_a_head_are_refused(tmp_path, name):
    folder = make(tmp_path, "qwen2")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("score.weight").repeat(4, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rename(folder, NAMES[name])
    with pytest.raises(ModelError, match=r"no reward head|lacks the weights score|2 labels"):
        rewards_of(folder)


def test_a_classifier_of_tokens_is_no_reward_model(tmp_path):
    tokenizer = tiny_tokenizer()
    config = KINDS["roberta"](vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id)
    hf.AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no reward head"):
        rewards_of(tmp_path)
