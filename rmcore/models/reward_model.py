"""The reward model: a Hugging Face backbone, its class's own pooling and a head with one label.

`BradleyTerryRM` bundles the three things a reward needs: weights, tokenizer and rendering. It saves and loads plain
Hugging Face folders, so `AutoModelForSequenceClassification.from_pretrained` gives the same rewards anywhere.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from rmcore.data.rendering import Renderer, Rendering, TokenizedSide, choose_rendering
from rmcore.data.tokenizers import FIXED_DATE, fix_date
from rmcore.models import lora
from rmcore.models.ahead import made_ahead
from rmcore.models.batching import distinct_sides, scoring_chunks
from rmcore.models.checks import refuse_not_finite
from rmcore.models.deferred import Deferred
from rmcore.models.device import pick_device
from rmcore.models.head import is_reward_head
from rmcore.models.layers import recompute_layers, transformer_layers
from rmcore.models.loading import Origin, check_positions, load_backbone, quiet_libraries
from rmcore.models.lora_targets import make_lora_config
from rmcore.models.packing.forward import find_packing, outputs_of
from rmcore.models.packing.layout import Packing, pack_sides
from rmcore.models.packing.rows import PaddedRows, Rows, pad_rows
from rmcore.models.precision import (
    InFloat32,
    Precision,
    exact_in_bfloat16,
    float32_head,
    narrow_floats,
    precision_context,
    reward_heads,
)
from rmcore.models.preference import checked_beta, write_beta
from rmcore.models.seal import write_seal
from rmcore.models.trained import load_trained, warn_of_date, warn_of_random_weights
from rmcore.models.training_parts import SplitWeights, TrainingOnlyModule

if TYPE_CHECKING:
    from peft import LoraConfig

    from rmcore.models.compiling import CompiledLayers

SCORING_TOKEN_BUDGET = {"cpu": 8192, "cuda": 65536}
"""Computed tokens per batch when scoring without gradients, by device type."""
COMPILED_WORK = 1e12
"""Tokens times layers times hidden units from which scoring on a GPU compiles the layers first. Compiling saves the
memory traffic of element-wise operations, an estimated 0.14 ms for a side of 200 tokens at 0.5 B
(benchmarks/results/gpu.md), and takes an assumed 30 s: level at 9e11."""


class BradleyTerryRM:
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
        self.model = model
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._origin = origin
        self._adapter_base: lora.AdapterBase | None = None
        self.beta = 1.0
        """Scale of the margins: P(first preferred) = sigmoid(beta * margin). What the loss was trained with; 1 unless a
        training set it, and for checkpoints without a record."""
        self.allow_packing = True
        """Whether rows are packed where the model can be; off: always padded."""
        self.recomputed_share = 1.0
        """Share of the layers that recompute their activations once that is enabled."""
        self.companion: TrainingOnlyModule | None = None
        """See `Companion`; None: the model is a plain Hugging Face one."""
        self.deferred: Deferred | None = None
        """Weights that are read when the model is sharded (`rmcore.training.sharding.shard`), before which it computes
        nothing; None: it has all."""
        self.compiled: CompiledLayers | None = None
        """Compiled layers that scoring uses: those of the training, during it; on a GPU, made for `COMPILED_WORK`."""
        self._packing: dict[tuple[Precision, str], Packing | None] = {}
        self._narrowed: list[torch.nn.Linear] = []
        self.split: SplitWeights | None = None
        """See `SplitWeights`; None: the model itself holds the float32 weights."""

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
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def num_parameters(self) -> int:
        """Parameters in all."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that training changes: all, those of the reward head, or those of adapters and head."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    @property
    def pad_id(self) -> int:
        """Token id of padding."""
        return int(self.tokenizer.pad_token_id)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass, of `recomputed_share` of the layers, while in training mode.

        The non-reentrant kind, which needs no gradient at its input: with adapters the embeddings are frozen.
        """
        recompute_layers(self.model, self.recomputed_share)

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

    def _in_float32(self, precision: Precision) -> AbstractContextManager[Any]:
        """Make the block compute in float32 where weights are held in bfloat16 and fp32 is requested."""
        if precision == "fp32" and self.split is not None:
            return InFloat32(self.split.exact)
        return InFloat32() if precision == "fp32" and self._narrowed else nullcontext()

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

    def packing(self, precision: Precision = "fp32") -> Packing | None:
        """How rows are packed in this precision; None where they are padded, which is said once with the reason."""
        if not self.allow_packing:
            return None
        place = (precision, self.device.type)
        if place not in self._packing:
            try:
                with self._in_float32(precision):
                    found = find_packing(
                        self.model,
                        longest_side=self.renderer.rendering.max_seq_len,
                        precision=precision,
                        pad_id=self.pad_id,
                    )
            except ModelError as refusal:
                print(f"note: sides are padded, not packed: {refusal}.", file=sys.stderr)
                found = None
            self._packing[place] = found
        return self._packing[place]

    @torch.inference_mode()
    def score_sides(
        self,
        sides: Sequence[TokenizedSide],
        *,
        token_budget: int | None = None,
        precision: Precision = "fp32",
        report: Report = silent,
    ) -> np.ndarray:
        """Rewards of N tokenized sides: (N,) float32, in the order of `sides`.

        Inside, sides with a common prefix are computed together where the model allows it, so N answers to one prompt
        cost one prompt. `token_budget` is per batch; default: `SCORING_TOKEN_BUDGET`. `report` is called with the
        number of sides done; on a GPU, with the number submitted to it.
        """
        return self.score_outputs(sides, token_budget=token_budget, precision=precision, report=report)[:, 0]

    @torch.inference_mode()
    def score_outputs(
        self,
        sides: Sequence[TokenizedSide],
        *,
        token_budget: int | None = None,
        precision: Precision = "fp32",
        report: Report = silent,
    ) -> np.ndarray:
        """All that the head says of N tokenized sides: (N, 1), or (N, 1 + A) with A attributes; the reward first."""
        different, which = distinct_sides(sides)  # D sides, and (N,) which of them each one is
        if not different:
            return np.zeros((0, 1), dtype=np.float32)
        times = np.bincount(which, minlength=len(different))
        on_gpu = self.device.type == "cuda"
        budget = token_budget or SCORING_TOKEN_BUDGET[self.device.type]
        chunks = self.scoring_chunks(different, token_budget=budget, precision=precision)
        packing = self.packing(precision)
        if on_gpu and packing is not None:
            self._compile_for(sum(len(side.ids) for side in different))

        def make_rows(chunk: Sequence[Sequence[int]]) -> Rows:
            rows = self._rows_of(different, chunk, packing)
            return rows.pin_memory() if on_gpu else rows

        was_training = self.model.training
        self.model.eval()
        found: list[Tensor] = []
        done = 0
        # On a GPU, no result is awaited before all batches are queued.
        for chunk, rows in zip(chunks, (made_ahead if on_gpu else map)(make_rows, chunks), strict=True):
            found.append(self._compute(rows, precision))
            done += int(times[[index for group in chunk for index in group]].sum())
            report(done, len(sides), "sides")
        self.model.train(was_training)
        outputs = np.zeros((len(different), found[0].shape[1]), dtype=np.float32)
        outputs[[index for chunk in chunks for group in chunk for index in group]] = torch.cat(found).cpu().numpy()
        return outputs[which]  # (D, 1) -> (N, 1)

    def scoring_chunks(
        self, sides: Sequence[TokenizedSide], *, token_budget: int, precision: Precision
    ) -> list[list[list[int]]]:
        """Positions of N sides as batches of groups; see `rmcore.models.batching.scoring_chunks`."""
        ids = [side.ids for side in sides]
        return scoring_chunks(ids, token_budget=token_budget, packing=self.packing(precision))

    @torch.no_grad()  # not inference_mode: sharded weights cannot be inference tensors
    def score_chunk(
        self, sides: Sequence[TokenizedSide], chunk: Sequence[Sequence[int]], *, precision: Precision = "fp32"
    ) -> Tensor:
        """Rewards of the sides of one batch of groups, in its order: float32 on the model's device.

        The caller sets evaluation mode.
        """
        return self.output_chunk(sides, chunk, precision=precision)[:, 0]

    @torch.no_grad()
    def output_chunk(
        self, sides: Sequence[TokenizedSide], chunk: Sequence[Sequence[int]], *, precision: Precision = "fp32"
    ) -> Tensor:
        """All that the head says of the sides of one batch of groups: (S, 1), with attributes (S, 1 + A); as above."""
        return self._compute(self._rows_of(sides, chunk, self.packing(precision)), precision)

    def _rows_of(self, sides: Sequence[TokenizedSide], chunk: Sequence[Sequence[int]], packing: Packing | None) -> Rows:
        ids = [sides[index].ids for group in chunk for index in group]
        if packing is None:
            return pad_rows(ids, pad_id=self.pad_id)
        if packing.reads_last and self.compiled is not None and self.compiled.works:
            packing = replace(packing, reads_last=False)  # compiled layers compute all tokens
        places = iter(range(len(ids)))  # `ids` are in the order of the groups, so places count up through them
        return pack_sides(ids, [[next(places) for _ in group] for group in chunk], packing)

    def _compile_for(self, num_tokens: int) -> None:
        """Have the layers compiled if so many tokens are worth it."""
        work = num_tokens * len(transformer_layers(self.model)) * self.model.config.get_text_config().hidden_size
        if self.compiled is None and work >= COMPILED_WORK:
            from rmcore.models.compiling import CompiledLayers  # whose import takes a second

            self.compiled = CompiledLayers(self.model)

    def _compute(self, rows: Rows, precision: Precision) -> Tensor:
        """All that the head says of rows, on the model's device."""
        in_float32 = self._in_float32(precision)
        compiled = self.compiled if isinstance(in_float32, nullcontext) else None  # which intercepts each operation

        def outputs() -> Tensor:
            with (
                in_float32,
                precision_context(precision, self.device),
                float32_head(self.model) if precision == "bf16" else nullcontext(),
            ):
                return outputs_of(self.model, rows.to(self.device)).float()

        return outputs() if compiled is None else compiled.run(outputs)

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
