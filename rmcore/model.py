"""The reward model: a Hugging Face backbone, its class's own pooling and a head with one label.

`BradleyTerryRM` bundles the three things a reward needs: weights, tokenizer and rendering. It saves and loads plain
Hugging Face folders, so `AutoModelForSequenceClassification.from_pretrained` gives the same rewards anywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rmcore import lora
from rmcore.batching import pad_rows
from rmcore.config import ModelConfig
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.render_fn import RenderFn, load_render_fn
from rmcore.data.rendering import Renderer, Rendering, TokenizedSide, choose_rendering
from rmcore.errors import ModelError
from rmcore.heads import float32_head
from rmcore.loading import load_backbone, num_positions, pick_device, read_config, resolve_model

if TYPE_CHECKING:
    from peft import LoraConfig

SCORING_TOKEN_BUDGET = 8192
LONGEST_UNRECORDED = 2048
"""Tokens a side of a model trained elsewhere, which does not say how long its sides were."""


class BradleyTerryRM:
    """A scalar reward for (prompt, response), trained on preference pairs.

    Example:
        >>> rm = BradleyTerryRM.from_pretrained("checkpoints/best")           # doctest: +SKIP
        >>> rm.score_pair("What is 2 + 2?", "4", "5")                         # doctest: +SKIP
        1.37
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rendering: Rendering,
        *,
        render_fn: RenderFn | None = None,
        base: lora.AdapterBase | None = None,
    ) -> None:
        self.model: Any = model  # a PeftModel once it has adapters
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, rendering, render_fn)
        self._base = base

    @classmethod
    def new(cls, config: ModelConfig, *, seed: int, device: torch.device) -> "BradleyTerryRM":
        """Load the backbone named in `config`; a missing reward head, and adapters, are initialised under `seed`.

        Raises:
            ModelError: the folder or hub model cannot be read, or has more than one label.
            ConfigError: max_seq_len exceeds the model's positions, or LoRA targets match nothing.
        """
        render_fn = load_render_fn(config.render_fn) if config.render_fn else None
        loaded = load_backbone(
            config.name,
            seed=seed,
            max_seq_len=config.max_seq_len,
            trust_remote_code=config.trust_remote_code,
            reward_model=False,
        )
        rendering = choose_rendering(
            loaded.tokenizer,
            use_chat_template=config.use_chat_template,
            max_seq_len=config.max_seq_len,
            render_fn=config.render_fn,
        )
        base = lora.AdapterBase(_absolute(config.name), seed)
        rm = cls(loaded.model, loaded.tokenizer, rendering, render_fn=render_fn, base=base)
        if config.lora is not None:
            rm.add_lora(lora.settings_to_config(config.lora, rm.model))
        rm.model.to(device).eval()
        return rm

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str = "auto",
        max_seq_len: int | None = None,
        trust_remote_code: bool = False,
        render_fn: str | None = None,
    ) -> "BradleyTerryRM":
        """Load a trained reward model: a checkpoint of this platform, an adapter, or any Hugging Face reward model.

        A checkpoint's own rendering is used; a model trained elsewhere gets its chat template, or the plain format,
        and as many tokens a side as it has positions (at most 2048). A checkpoint that was trained with a rendering
        function of its user wants it named again, as `module:function`: a file never decides what code is run.

        Raises:
            ModelError: there is no reward model, or its rendering function was not named.
        """
        source = resolve_model(str(name_or_path))
        if source == "tiny":
            raise ModelError("`tiny` is an untrained model; train it first: rm-opt train --model tiny.")
        adapter = Path(source) if lora.is_adapter(Path(source)) else None
        base = lora.AdapterBase.load(adapter) if adapter else lora.AdapterBase(source, 0)
        recorded = Rendering.load(Path(source))
        limit = max_seq_len or (recorded.max_seq_len if recorded else None) or _longest(base, trust_remote_code)
        loaded = load_backbone(
            base.name,
            seed=base.seed,
            max_seq_len=limit,
            trust_remote_code=trust_remote_code,
            reward_model=adapter is None,
        )
        model = loaded.model if adapter is None else lora.load_adapter(loaded.model, adapter)
        rendering = (
            replace(recorded, max_seq_len=limit)
            if recorded
            else choose_rendering(loaded.tokenizer, use_chat_template=True, max_seq_len=limit, render_fn=render_fn)
        )
        function = load_render_fn(render_fn) if render_fn else None
        rm = cls(model, loaded.tokenizer, rendering, render_fn=function, base=base)
        rm.model.to(pick_device(device)).eval()
        return rm

    def add_lora(self, config: "LoraConfig") -> None:
        """Train adapters from now on, as a full PEFT configuration says; see `rmcore.lora.add_adapters`.

        Raises:
            ConfigError: the targets match no linear layer.
            ModelError: it has adapters already.
        """
        if self.has_adapters:
            raise ModelError("this reward model has adapters already; load its base anew to give it others.")
        seed = self._base.seed if self._base else 0
        self.model = lora.add_adapters(self.model, config, seed=seed)

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained in place of all weights."""
        return hasattr(self.model, "peft_config")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def num_parameters(self) -> int:
        """Parameters in all."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that training changes: all, or with adapters those and the reward head's."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def pad_id(self) -> int:
        """Token id of padding."""
        return int(self.tokenizer.pad_token_id)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass; the non-reentrant way, which frozen inputs do not break."""
        inner = self.model.get_base_model() if self.has_adapters else self.model
        kwargs = {"use_reentrant": False}
        if hasattr(inner, "activation_checkpointing_enable"):
            inner.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:  # transformers before 5.23
            inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> np.ndarray:
        """Rewards of N responses to their prompts: (N,) float32, in logits. A prompt may be a dialogue of turns.

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

    def score_sides(
        self,
        sides: Sequence[TokenizedSide],
        *,
        token_budget: int = SCORING_TOKEN_BUDGET,
        precision: str = "fp32",
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Rewards of N tokenized sides: (N,) float32. Sorted by length inside; order of the result is the input's.

        `progress` is called with the number of sides done so far.
        """
        rewards = np.zeros(len(sides), dtype=np.float32)
        was_training = self.model.training
        self.model.eval()
        done = 0
        for chunk in scoring_chunks([len(side.ids) for side in sides], token_budget):
            rewards[chunk] = self.score_chunk([sides[index] for index in chunk], precision=precision).cpu().numpy()
            done += len(chunk)
            if progress is not None:
                progress(done)
        self.model.train(was_training)
        return rewards

    @torch.no_grad()
    def score_chunk(self, sides: Sequence[TokenizedSide], *, precision: str = "fp32") -> Tensor:
        """Rewards of the sides of one micro-batch, as the model's mode says: (N,) float32 on the device.

        `bf16` runs the backbone under autocast and the head in float32, as training does.
        """
        ids, mask = pad_rows([side.ids for side in sides], pad_id=self.pad_id)
        with ExitStack() as stack:
            if precision == "bf16":
                stack.enter_context(float32_head(self.model))
                stack.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
            logits = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        return logits[:, 0].float()

    def save(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a plain Hugging Face folder (safetensors, tokenizer) plus the rendering record.

        With adapters that is the merged model, and `adapter/` beside it holds the adapters and the head alone.

        Args:
            folder: exists; files in it are replaced.
            state: the whole state dict, where the model itself holds only a share of it.
        """
        if not self.has_adapters:
            self.model.save_pretrained(folder, state_dict=state)
            self._save_text(folder)
            return
        whole = self.model.state_dict() if state is None else state
        merged = lora.merged_weights(self.model, whole)
        lora.save_plain(self.model, merged, folder)
        self._save_text(folder)
        adapter = folder / lora.ADAPTER_FOLDER
        self.model.save_pretrained(adapter, state_dict=dict(whole), save_embedding_layers=False)
        self._save_text(adapter)
        if self._base is not None:
            self._base.save(adapter)

    def _save_text(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        self.renderer.rendering.save(folder)


def scoring_chunks(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cut N sides, longest first, into micro-batches of at most `token_budget` padded tokens (at least one side)."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    chunks, done = [], 0
    while done < len(order):
        chunk = order[done : done + max(1, token_budget // lengths[order[done]])]
        chunks.append(chunk)
        done += len(chunk)
    return chunks


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _longest(base: lora.AdapterBase, trust_remote_code: bool) -> int:
    found = read_config(resolve_model(base.name), trust_remote_code=trust_remote_code)
    return min(LONGEST_UNRECORDED, num_positions(found) or LONGEST_UNRECORDED)
