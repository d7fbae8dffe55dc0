"""Train, save, reload and score over the Hugging Face classes that reward models are made of, with and without LoRA.

Each architecture is built small from its own config class, saved as its makers publish it (without a reward head), and
from then on known by its folder alone.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import MemoryTracker
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import Rendering
from rmcore.models.loading import load_backbone
from rmcore.models.precision import float32_head
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer
from rmcore.training.loop import Trainer
from rmcore.training.sharding import shard_blocks
from tests.support.random_models import hugging_face_rewards

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MAX_SEQ_LEN = 96
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {"num_key_value_heads": 2}
WORDS = ("pear", "fig", "plum", "kiwi", "lemon", "peach", "grape", "melon")
PAIRS = [
    PreferencePair(pair_id=word, prompt=f"Name a {word}", chosen=f"Gladly: {word}", rejected=f"No, {word} is dull")
    for word in WORDS
]
PROMPTS = ["Name a pear", "Name a fig", "Name a fruit and say why it is good " * 4]
RESPONSES = ["Gladly: pear", "No, fig is a dull fruit", "plum"]


@cache
def qwen_tokenizer() -> hf.PreTrainedTokenizerBase:
    return tiny_tokenizer()


@cache
def causal_tokenizer() -> hf.PreTrainedTokenizerBase:
    """The tokenizer of `tiny` without Qwen2's class, which other model types do not load."""
    source = qwen_tokenizer()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=source.backend_tokenizer,
        pad_token=source.pad_token,
        eos_token=source.eos_token,
        chat_template=source.chat_template,
    )


@cache
def encoder_tokenizer() -> hf.PreTrainedTokenizerBase:
    """A WordPiece vocabulary of these texts, which puts [CLS] before a text and [SEP] after it."""
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    inner.train_from_iterator([*PROMPTS, *RESPONSES, "Prompt: Response: the quick brown fox jumps"], trainer)
    ends = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


@dataclass(frozen=True)
class Architecture:
    """How to build the published model: config class, settings, model class, tokenizer."""

    config: type[hf.PretrainedConfig]
    settings: dict[str, Any]
    published: type[hf.PreTrainedModel]
    tokenizer: Callable[[], hf.PreTrainedTokenizerBase]
    gradient_checkpointing: bool = False

    def build(self, folder: Path) -> None:
        tokenizer = self.tokenizer()
        config = self.config(
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            max_position_embeddings=MAX_SEQ_LEN,
            **SMALL,
            **self.settings,
        )
        torch.manual_seed(0)
        self.published(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16}
DISENTANGLED |= {"max_relative_positions": -1, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
ARCHITECTURES = {
    "qwen2": Architecture(hf.Qwen2Config, GROUPED, hf.Qwen2ForCausalLM, qwen_tokenizer, True),
    "llama": Architecture(hf.LlamaConfig, GROUPED, hf.LlamaForCausalLM, causal_tokenizer),
    "gpt_neox": Architecture(hf.GPTNeoXConfig, {}, hf.GPTNeoXForCausalLM, causal_tokenizer, True),
    "gemma": Architecture(hf.GemmaConfig, GROUPED | {"head_dim": 8}, hf.GemmaForCausalLM, causal_tokenizer),
    "bert": Architecture(hf.BertConfig, {}, hf.BertForMaskedLM, encoder_tokenizer, True),  # without a pooler
    "deberta_v2": Architecture(hf.DebertaV2Config, DISENTANGLED, hf.DebertaV2Model, encoder_tokenizer, True),
}


def frozen(rm: BradleyTerryRM) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in rm.model.named_parameters() if not p.requires_grad}


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_its_weights_can_stay_in_their_files_until_it_is_sharded(name, tmp_path, one_process):
    """Its values are the usual ones, drawn ones and buffers included; when it is sharded, rows are packed as ever."""
    ARCHITECTURES[name].build(tmp_path)
    usual, ours = (load_backbone(str(tmp_path), seed=1, defer=defer) for defer in (False, True))
    assert ours.origin == usual.origin
    expected, found = (dict(one.model.named_parameters()) | dict(one.model.named_buffers()) for one in (usual, ours))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(ours.deferred.values(tensor), expected[key]), key
    rm = BradleyTerryRM.of(usual.model, usual.tokenizer, Rendering("plain", MAX_SEQ_LEN))
    sharded = BradleyTerryRM.of(copy.deepcopy(usual.model), usual.tokenizer, Rendering("plain", MAX_SEQ_LEN))
    shard_blocks(sharded.model)
    assert sharded.packing() == rm.packing()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharded_in_bf16_it_sums_the_gradient_of_a_frequent_token_in_float32(name, tmp_path, one_process):
    """In bfloat16 what comes late to a sum over hundreds of places is lost, a quarter of it here."""
    ARCHITECTURES[name].build(tmp_path)
    loaded = load_backbone(str(tmp_path), seed=1)
    ids = torch.full((64, 12), 7)
    ids[:, ::3] = torch.randint(3, 20, (64, 4), generator=torch.Generator().manual_seed(0))
    found = []
    for is_sharded in (False, True):
        model = copy.deepcopy(loaded.model).eval()
        if is_sharded:
            shard_blocks(model, "bf16")
        with float32_head(model) if is_sharded else nullcontext():
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
        gradient = model.get_input_embeddings().weight.grad
        found.append(gradient.full_tensor()[7] if is_sharded else gradient[7])
    exact, summed = found
    assert summed.dtype == torch.float32
    assert (summed - exact).norm() < 0.1 * exact.norm()


LORA = LoraSettings(rank=4)


@pytest.mark.parametrize(
    ("name", "lora"), [*((name, LORA) for name in ARCHITECTURES), ("qwen2", None), ("deberta_v2", None)]
)
def test_trained_saved_and_reloaded_it_gives_the_same_rewards(name, lora, tmp_path):
    architecture = ARCHITECTURES[name]
    architecture.build(tmp_path / "base")
    config = ModelConfig(name=str(tmp_path / "base"), max_seq_len=MAX_SEQ_LEN, lora=lora)
    rm = BradleyTerryRM.new(config, seed=0, device=CPU)
    before = frozen(rm)
    assert bool(before) == (lora is not None)
    tracker = MemoryTracker()
    settings = {"steps": 20, "lr": 3e-3, "pairs_per_step": 8, "warmup_steps": 0, "log_every": 1, "schedule": "constant"}
    Trainer(
        rm,
        TrainConfig(**settings, gradient_checkpointing=architecture.gradient_checkpointing),
        train=rm.renderer.tokenize_pairs(PAIRS),
        validation=[],
        folder=tmp_path / "run",
        tracker=tracker,
        seed=0,
    ).run()
    losses = [values["train/loss"] for _, values in tracker.rows]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(value, before[key]) for key, value in frozen(rm).items())

    live = rm.score(PROMPTS, RESPONSES)
    assert np.ptp(live) > 1e-3
    best = tmp_path / "run" / "best"
    reloaded = BradleyTerryRM.from_pretrained(best, device="cpu")
    assert not reloaded.has_adapters
    np.testing.assert_allclose(reloaded.score(PROMPTS, RESPONSES), live, atol=1e-6 if lora is None else 1e-5, rtol=1e-5)
    sides = rm.renderer.tokenize_sides(list(zip(PROMPTS, RESPONSES, strict=True)))
    assert len({len(side.ids) for side in sides}) == len(sides)
    np.testing.assert_allclose(hugging_face_rewards(best, sides), live, atol=1e-5, rtol=1e-5)
    assert (best / "adapter").is_dir() == (lora is not None)
    if lora is not None:
        adapted = BradleyTerryRM.from_pretrained(best / "adapter", device="cpu")
        assert adapted.has_adapters
        assert np.array_equal(adapted.score(PROMPTS, RESPONSES), live)
