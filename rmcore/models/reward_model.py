"""The reward model: a Hugging Face backbone, its class's own pooling and a head with one label.

`BradleyTerryRM` bundles the three things a reward needs: weights, tokenizer and rendering. It saves and loads plain
Hugging Face folders, so `AutoModelForSequenceClassification.from_pretrained` gives the same rewards anywhere.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rmcore.config.model import TINY_SIZES, ModelConfig, WeightDtype
from rmcore.core.errors import ConfigError, ModelError
from rmcore.core.progress import Report, silent
from rmcore.core.saving import save_pretrained
from rmcore.data.pair import PreferencePair, Prompt, as_rows
from rmcore.data.render_fn import RenderFn, load_render_fn
from rmcore.data.rendering import Renderer, Rendering, choose_rendering
from rmcore.data.tokenizers import FIXED_DATE, fix_date
from rmcore.models import lora
from rmcore.models.checks import refuse_not_finite
from rmcore.models.device import pick_device
from rmcore.models.layers import is_reward_head
from rmcore.models.loading import Origin, check_positions, load_backbone, quiet_libraries
from rmcore.models.lora import make_lora_config
from rmcore.models.packing.forward import outputs_of
from rmcore.models.packing.layout import PaddedRows, pad_rows
from rmcore.models.precision import exact_in_bfloat16, narrow_floats, reward_heads
from rmcore.models.scoring import SideScorer
from rmcore.models.seal import checked_beta, write_beta, write_seal
from rmcore.models.trained import load_trained, warn_of_date, warn_of_random_weights
from rmcore.models.weight_files import Deferred

if TYPE_CHECKING:
    from peft import LoraConfig


class TrainingOnlyModule(Protocol):
    """A part of `BradleyTerryRM.model` that is trained with it and is no part of the plain model that is saved."""

    def plain_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give the state of the plain model: the same rewards, the usual names."""
        ...

    def plain_form(self, model: Any) -> AbstractContextManager[None]:
        """Inside the block `model` has the modules of the plain model; what is in them means nothing."""
        ...

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write what the plain state lacks into the checkpoint's folder."""
        ...


class BradleyTerryRM(SideScorer):
    """A scalar reward for (prompt, response), trained on preference pairs.

    Called with a name it is a new one, whose reward head is not trained yet; `new` makes one of all settings, `of` one
    of loaded parts.

    Example:
        >>> rm = BradleyTerryRM.from_pretrained("checkpoints/best")           # doctest: +SKIP
        >>> rm.score_pair("What is 2 + 2?", "4", "5")                         # doctest: +SKIP
        1.37

    Args:
        model_name: the backbone: a folder, a hub name, `minilm` or `tiny`.
        seed: of the reward head.
        device: auto, cpu, cuda or cuda:1.
        settings: further fields of `ModelConfig`, such as max_seq_len.

    Raises:
        ModelError, ConfigError: see `new`.
    """

    def __init__(self, model_name: str | Path, *, seed: int = 0, device: str = "auto", **settings: Any) -> None:
        config = ModelConfig.model_validate({"name": str(model_name)} | settings)
        self._begin(config, seed=seed, device=pick_device(device))

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        rendering: Rendering,
        *,
        render_fn: RenderFn | None = None,
        origin: Origin | None = None,
        adapter_base: lora.AdapterBase | None = None,
        beta: float = 1.0,
    ) -> "BradleyTerryRM":
        """Make a reward model of its loaded parts.

        Args:
            model: a sequence-classification model with one label, or PEFT's wrapper around one.
            tokenizer: its tokenizer, with a pad token.
            rendering: how text becomes tokens.
            render_fn: the function of the custom format; see `rmcore.data.rendering`.
            origin: where the weights came from, which adapters record; left out: `model.name_or_path`.
            adapter_base: what the model's adapters were put on, where it has some.
            beta: scale of the margins, see `beta`.

        Raises:
            ModelError: beta is no finite number above 0.
        """
        rm = cls.__new__(cls)
        rm._set_up(model, tokenizer, Renderer(tokenizer, rendering, render_fn), origin or Origin(model.name_or_path))
        rm._adapter_base = adapter_base
        rm.beta = checked_beta(beta, "BradleyTerryRM")
        return rm

    def _set_up(self, model: Any, tokenizer: PreTrainedTokenizerBase, renderer: Renderer, origin: Origin) -> None:
        super().__init__(model, tokenizer, renderer)
        self._origin = origin
        self._adapter_base: lora.AdapterBase | None = None
        self.beta = 1.0
        """Scale of the margins: P(first preferred) = sigmoid(beta * margin). What the loss was trained with; 1 unless a
        training set it, and for checkpoints without a record."""
        self.recomputed_share = 1.0
        """Share of the layers that recompute their activations in a training that has them do so."""
        self.companion: TrainingOnlyModule | None = None
        """See `TrainingOnlyModule`; None: the model is a plain Hugging Face one."""
        self.deferred: Deferred | None = None
        """Weights that are read when the model is sharded (`rmcore.training.sharding.shard`), before which it computes
        nothing; None: it has all."""

    @classmethod
    def new(cls, config: ModelConfig, *, seed: int, device: torch.device, defer: bool = False) -> "BradleyTerryRM":
        """Load the backbone named in `config`; a missing reward head, and adapters, are initialised under `seed`.

        With `defer` its weights are left in their files, see `deferred`, and nothing is moved to `device`.

        Raises:
            ModelError: the folder or hub model cannot be read, or has more than one label.
            ConfigError: max_seq_len exceeds the model's positions, a LoRA target matches nothing, or render_fn cannot
                be imported.
        """
        rm = cls.__new__(cls)
        rm._begin(config, seed=seed, device=device, defer=defer)
        return rm

    def _begin(self, config: ModelConfig, *, seed: int, device: torch.device, defer: bool = False) -> None:
        render_fn = load_render_fn(config.render_fn) if config.render_fn else None
        loaded = load_backbone(config.name, seed=seed, trust_remote_code=config.trust_remote_code, defer=defer)
        check_positions(loaded.model.config, config.max_seq_len, name=config.name)
        rendering = choose_rendering(
            loaded.tokenizer,
            use_chat_template=config.use_chat_template,
            max_seq_len=config.max_seq_len,
            render_fn=config.render_fn,
        )
        if rendering.format == "chat" and fix_date(loaded.tokenizer):
            print(
                f"note: the chat template of {config.name} writes the day's date; {FIXED_DATE:%d %b %Y} replaces "
                "it here and in the checkpoints, so that tokens and rewards do not depend on the day.",
                file=sys.stderr,
            )
        warn_of_date(loaded.tokenizer, rendering, config.name)
        warn_of_random_weights(loaded, config.name)
        renderer = Renderer(loaded.tokenizer, rendering, render_fn)
        self._set_up(loaded.model, loaded.tokenizer, renderer, loaded.origin)
        self.deferred = loaded.deferred
        if config.lora is not None:
            self.add_lora(make_lora_config(config.lora), seed=seed)
        if config.head_only:
            self.freeze_backbone()
        if self.deferred is None:
            self.model.to(device)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        device: str = "auto",
        max_seq_len: int | None = None,
        trust_remote_code: bool = False,
        render_fn: str | None = None,
        dtype: WeightDtype = "float32",
    ) -> "BradleyTerryRM":
        """Load a trained reward model: a checkpoint of this platform, a LoRA adapter, any Hugging Face reward model.

        A checkpoint's own rendering is used; a model trained elsewhere gets its chat template, or the plain format,
        and as many tokens a side as it has positions (at most 2048). An adapter's base is loaded from where it was.
        Beta is 1 if none is recorded, as in checkpoints of other tools. A checkpoint trained with
        a custom rendering function requires its name again, as `module:function`: a file never decides what code is
        run.

        With `dtype="bfloat16"` all weights but the reward head's are rounded as they are read: half the memory, for
        scoring only. Such a model can be neither trained nor saved, and has no second derivatives.

        Raises:
            ModelError: it cannot be read, has no trained reward head, an adapter's base is missing or another one, its
                rendering function was not named, or its recorded beta is no finite number above 0.
            ConfigError: max_seq_len exceeds the model's positions, or render_fn cannot be imported.
        """
        quiet_libraries()
        if str(name_or_path) in TINY_SIZES:
            raise ModelError(f"`{name_or_path}` is an untrained model; train it first: rm-opt train --model tiny.")
        loaded = load_trained(
            str(name_or_path),
            max_seq_len=max_seq_len,
            trust_remote_code=trust_remote_code,
            render_fn=render_fn,
            dtype=dtype,
        )
        return cls.of(
            loaded.model.to(pick_device(device)),
            loaded.tokenizer,
            loaded.rendering,
            render_fn=load_render_fn(render_fn) if render_fn else None,
            origin=loaded.origin,
            adapter_base=loaded.adapter_base,
            beta=loaded.beta,
        )

    def add_lora(self, config: "LoraConfig", *, seed: int = 0) -> None:
        """Put LoRA adapters on the model: they and the reward head are then what is trained.

        Every attribute of `config` is kept; see `rmcore.models.lora.attach` for what is filled in where it is unset.
        Random states are left as they were.

        Raises:
            ConfigError: there are adapters already, the targets match nothing, or the configuration cannot be used.
        """
        if self.has_adapters:
            raise ConfigError("this model has LoRA adapters already; load the merged model and add new ones to that.")
        if not self._origin.name:
            raise ConfigError(
                "this model was made in memory, so nothing could say what its adapter belongs to; save it and load it "
                "with BradleyTerryRM.from_pretrained first."
            )
        self.compiled = None
        self._adapter_base = lora.AdapterBase.of(self.model, self._origin, self.deferred)
        self.model = lora.attach(self.model, config, seed=seed, origin=self._origin)

    def merge_adapters(self) -> None:
        """Merge the adapters, if there are any, into the weights in place; all weights are trainable afterwards.

        Not for a training that continues: see `rmcore.models.lora`.
        """
        if self._adapter_base is not None:
            self.model = self.model.merge_and_unload(safe_merge=True).requires_grad_(True)
            self._adapter_base = self.compiled = None
            self._packing.clear()

    def freeze_backbone(self) -> None:
        """Freeze all weights but the reward head's; autograd then records nothing of the backbone.

        Raises:
            ModelError: no module of the model is known to be its reward head.
        """
        reward_heads(self.model)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(is_reward_head(name))
        drawn = sorted(name for name in self._origin.fresh if not is_reward_head(name))
        if drawn:
            print(
                f"note: {len(drawn)} parameters between backbone and head are not in {self._origin.name} (first "
                f"{drawn[0]}); with the head alone trained they stay as they were drawn.",
                file=sys.stderr,
            )

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters and the head are trained in place of all weights; then `model` is PEFT's wrapper."""
        return self._adapter_base is not None

    @property
    def is_rewritten(self) -> bool:
        """Whether weights were converted on loading: Hugging Face's class would read another model from the files."""
        return self._origin.is_rewritten

    @property
    def num_parameters(self) -> int:
        """Parameters in all."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that training changes: all, those of the reward head, or those of adapters and head."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def narrow_base(self) -> int:
        """Keep the base of adapters in bfloat16 where that rounds nothing; training in bf16 then needs half its memory.

        What a training computes under autocast, and what is saved, stay the same to the bit; see `exact_in_bfloat16`.

        Returns:
            Weights that are held so from now on.
        """
        layers = exact_in_bfloat16(self.model) if self.has_adapters else []
        for layer in layers:
            layer.weight.data = layer.weight.data.bfloat16()
        self._narrowed += layers
        return sum(layer.weight.numel() for layer in layers)

    def widen(self) -> None:
        """Make every weight float32 again, after `narrow_base` and where they are split: no number changes by it."""
        self.join()
        for layer in self._narrowed:
            layer.weight.data = layer.weight.data.float()
        self._narrowed.clear()

    def join(self) -> None:
        """Make split weights float32 again; the optimizer that has the other halves is of no use afterwards."""
        if self.split is not None:
            self.split.widen()
            self.split = None

    def whole_state(self) -> dict[str, Tensor]:
        """The state of `model`, with split weights joined to float32, on the CPU."""
        state = self.model.state_dict()
        return state if self.split is None else {**state, **self.split.whole_weights(self.model)}

    def tokenize(self, prompts: Prompt | Sequence[Prompt], responses: str | Sequence[str]) -> dict[str, Tensor]:
        """Render and tokenize N responses to their prompts: right-padded `input_ids`, `attention_mask`, (N, L) long.

        One prompt and one response, each given as it is and not in a list, are one row.

        Raises:
            ValueError: the lists differ in length.
            DataError: a side cannot be read; see `Renderer.tokenize_sides`.
        """
        sides = self.renderer.tokenize_sides(list(zip(*as_rows(prompts, responses), strict=True)))
        rows = pad_rows([side.ids for side in sides], pad_id=self.pad_id)
        return {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the rewards of R rows (R, L), with gradients: (R,) float32, in logits."""
        rows = PaddedRows(input_ids, attention_mask, int(attention_mask.sum()))
        return outputs_of(self.model, rows.to(self.device)).float()[:, 0]

    def compute_loss(
        self, chosen_ids: Tensor, chosen_mask: Tensor, rejected_ids: Tensor, rejected_mask: Tensor
    ) -> Tensor:
        """Return the mean Bradley-Terry loss of P pairs, softplus(-beta * margin), with gradients: 0-d, in nats.

        The rows of each side are (P, L), as `tokenize` and `rmcore.create_dataloader` make them; both sides may differ
        in L. The trainer's loss has more terms; see `rmcore.training.losses.PairLoss`.
        """
        margins = self.forward(chosen_ids, chosen_mask) - self.forward(rejected_ids, rejected_mask)  # (P,)
        return torch.nn.functional.softplus(-self.beta * margins).mean()

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> np.ndarray:
        """Rewards of N responses to their prompts: (N,) float32, in logits. A prompt may be a dialogue of turns.

        One prompt and one response, each given as it is and not in a list, are one row.

        Raises:
            ValueError: the lists differ in length.
            DataError: a side cannot be read; see `Renderer.tokenize_sides`.
            ModelError: a reward is not finite; the message names the places.
        """
        rewards = self.score_sides(self.renderer.tokenize_sides(list(zip(*as_rows(prompts, responses), strict=True))))
        refuse_not_finite(rewards, lambda place: f"response {place}")
        return rewards

    def score_pair(self, prompt: Prompt, a: str, b: str) -> float:
        """Reward of `a` minus reward of `b`: `beta` times it are the log-odds that `a` is preferred."""
        rewards = self.score([prompt, prompt], [a, b])
        return float(rewards[0] - rewards[1])

    def score_pairs(self, pairs: Sequence[PreferencePair], *, report: Report = silent) -> np.ndarray:
        """Rewards of both sides of P pairs: (P, 2) float32, chosen first.

        Raises:
            DataError, ModelError: as `score`.
        """
        sides = [side for pair in self.renderer.tokenize_pairs(pairs) for side in (pair.chosen, pair.rejected)]
        rewards = self.score_sides(sides, report=report)
        refuse_not_finite(rewards, lambda place: f"pair {pairs[place // 2].pair_id}")
        return rewards.reshape(-1, 2)

    def save(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a plain Hugging Face folder (safetensors, tokenizer) plus the records of rendering and beta.

        With LoRA that is the merged model, and `folder/adapter` is the adapter alone, head included, which
        `from_pretrained` takes as well. The live weights are not touched.

        Args:
            folder: where; files in it are replaced.
            state: the whole weights by the names of `model.state_dict()`, where the live ones are sharded.

        Raises:
            ModelError: the weights are narrower than float32.
        """
        self.require_float32("saved: the file would hold rounded weights and not say so")
        if self.split is not None:
            state = self.whole_state()  # what is split is not sharded
        if self.companion is None:
            self._save_plain(folder, state)
            return
        whole = self.model.state_dict() if state is None else state
        with self.companion.plain_form(self.model):
            self._save_plain(folder, self.companion.plain_state(whole))
        self.companion.save(whole, folder)

    def require_float32(self, what: str) -> None:
        """Refuse a model whose weights were rounded, as they are when it is loaded with dtype="bfloat16".

        Args:
            what: what it cannot be, and why, as the end of a sentence.

        Raises:
            ModelError: the weights are narrower than float32.
        """
        is_exact = self._narrowed or self.split is not None  # more of them is known than the model holds
        if not is_exact and (narrow := narrow_floats(self.model)):
            raise ModelError(
                f"the weights of {self._origin.name} are {', '.join(narrow)} here, and such a model cannot be {what}. "
                "Load it in float32; a file of bfloat16 weights is made by rm-opt export --dtype bfloat16, which "
                "compares its rewards."
            )

    def _save_plain(self, folder: Path, state: Mapping[str, Tensor] | None) -> None:
        if self._adapter_base is None:
            self._save_model(self.model, folder, None if state is None else dict(state))
            self.save_records(folder)
            return
        self._save_model(self.model.get_base_model(), folder, lora.merged_state(self.model, state))
        self.save_records(folder)
        adapter = folder / lora.ADAPTER_FOLDER
        lora.save_adapter(self.model, adapter, self._adapter_base, state)
        self.save_records(adapter)

    def _save_model(self, model: Any, folder: Path, state: dict[str, Tensor] | None) -> None:
        """Write weights and configuration; the latter names the type of the weights that are written."""
        dtype = model.config.dtype
        save_pretrained(model, folder, state_dict=state)  # which names the type of the model's first parameter
        if self.split is not None:
            model.config.dtype = torch.float32
            save_pretrained(model.config, folder)
        model.config.dtype = dtype

    def save_records(self, folder: Path) -> None:
        """Write what a checkpoint holds besides its weights: tokenizer, rendering record, beta, and the seal of all."""
        # Several templates stay in tokenizer_config.json: tools that copy the files of a model copy no folders in it.
        several = isinstance(self.tokenizer.chat_template, dict)
        save_pretrained(self.tokenizer, folder, **({"save_jinja_files": False} if several else {}))
        self.renderer.rendering.save(folder)
        write_beta(folder, self.beta)
        write_seal(folder)
