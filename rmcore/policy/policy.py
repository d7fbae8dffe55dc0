"""A policy: a causal language model folder, and how prompts become its token ids.

The policy reads a prompt by its own chat template and tokenizer, whatever those of the reward model are: between the
two only text travels. Weights are read by `load_weights` alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rmcore.config.model import TINY_SIZES
from rmcore.core.errors import DataError, ModelError
from rmcore.core.progress import report_left_out
from rmcore.data.chat_template import chat_text
from rmcore.data.control_tokens import ControlTokens, texts_of
from rmcore.data.pair import TOOLS, Prompt, as_prompts, plain_prompt, prompt_messages, prompt_text
from rmcore.data.readers.turns import exchange
from rmcore.data.shown import Shown, Turns
from rmcore.models.loading import (
    fetch_snapshot,
    guard,
    load_tokenizer,
    max_positions,
    quiet_libraries,
    read_config,
    resolve_model,
)
from rmcore.serving.vllm_process import EngineDtype

_TEMPLATE = "the policy's chat template"
TEXT_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
WEIGHT_PATTERNS = ["*.safetensors"]


@dataclass(frozen=True)
class Policy:
    """A causal model that answers prompts.

    name: as the caller gave it.
    folder: where it is; of a hub model the snapshot, whose weights `weights` downloads.
    hub_name: of a hub model, else None.
    stop_ids: tokens that end a response: those of the tokenizer, the config and the generation config together. Empty
        where none names any; every response then has all its tokens.
    """

    name: str
    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    hub_name: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def load(cls, name_or_path: str | Path, trust_remote_code: bool = False) -> "Policy":
        """Read tokenizer and config of a folder or hub model, no weights.

        Raises:
            ModelError: it cannot be read, has adapters next to it, or is no causal model (a reward model is none).
        """
        quiet_libraries()
        name = str(name_or_path)
        if name in TINY_SIZES:
            raise ModelError(f"`{name}` is an untrained shape and no policy; fine-tune it first, or name a folder.")
        source = resolve_model(name)
        if not Path(source).is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
            raise ModelError(f"there is no folder {source}; name that of a causal language model, or a hub name.")
        hub_name = None if Path(source).is_dir() else source
        folder = Path(source).resolve() if hub_name is None else fetch_snapshot(hub_name, TEXT_PATTERNS)
        config = read_config(str(folder), trust_remote_code=trust_remote_code)
        _check_causal(name, config)
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"the policy {name} has adapters next to its weights, which vLLM would leave out; merge them with "
                "PEFT's merge_and_unload, save that and name its folder."
            )
        tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
        stop_ids = _stop_ids(folder, config, tokenizer)
        return cls(name, folder, config, tokenizer, stop_ids, hub_name, trust_remote_code)

    def weights(self) -> Path:
        """The folder, with its weights: a hub model's are downloaded now.

        Raises:
            ModelError: the hub cannot be asked.
        """
        if self.hub_name is not None:
            fetch_snapshot(self.hub_name, WEIGHT_PATTERNS, revision=self.folder.name)
        return self.folder

    def compute_dtype(self, device_type: str) -> EngineDtype:
        """Choose the dtype of sampling: float32 on a CPU or where the weights are stored so, else bfloat16."""
        stored = str(self.config.get_text_config().dtype).removeprefix("torch.")
        return "bfloat16" if device_type == "cuda" and stored in ("bfloat16", "float16") else "float32"

    @cached_property
    def reader(self) -> "TextReader":
        """How text becomes the policy's token ids."""
        return TextReader(self.tokenizer)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids that a response is appended to; see `TextReader.prompt_ids`."""
        return self.reader.prompt_ids(prompt)

    def fitting_ids(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
        """Token ids of all prompts, each with room for a whole response behind it.

        Raises:
            DataError: a prompt leaves no such room within the policy's positions, or the chat template refuses it.
            ModelError: the tokenizer knows tokens that the model does not.
        """
        all_ids = self.try_fitting_ids(prompts, max_new_tokens)
        rendered: list[list[int]] = []
        for place, ids in enumerate(all_ids):
            if isinstance(ids, DataError):
                many = sum(isinstance(one, DataError) for one in all_ids)
                raise DataError(f"{many} of {len(prompts)} prompts cannot be answered; prompt {place}: {ids}") from ids
            rendered.append(ids)
        return rendered

    def readable_ids(self, prompts: Sequence[Prompt], max_new_tokens: int) -> dict[int, list[int]]:
        """Token ids of the prompts that the policy can answer, by their places; the others are said on stderr.

        Raises:
            DataError: there are prompts, and none can be answered.
            ModelError: see `fitting_ids`.
        """
        all_ids = self.try_fitting_ids(prompts, max_new_tokens)
        errors = [f"prompt {place}: {ids}" for place, ids in enumerate(all_ids) if isinstance(ids, DataError)]
        if errors and len(errors) == len(all_ids):
            raise DataError(f"none of the {len(all_ids)} prompts can be answered; {errors[0]}")
        if errors:
            report_left_out(len(errors), "prompts", errors[0], reader=f"the policy {self.name}")
        return {place: ids for place, ids in enumerate(all_ids) if not isinstance(ids, DataError)}

    def try_fitting_ids(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int] | DataError]:
        """Token ids as `fitting_ids` gives them, with the error in the place of a prompt that cannot be answered.

        Raises:
            ModelError: the tokenizer knows tokens that the model does not.
        """
        all_ids = [self._try_ids(prompt) for prompt in as_prompts(prompts)]
        vocab_size = self.config.get_text_config().vocab_size
        largest = max((max(ids) for ids in all_ids if isinstance(ids, list)), default=0)
        if largest >= vocab_size:
            raise ModelError(
                f"the tokenizer of {self.name} gives token {largest}, and the model knows {vocab_size} tokens: they do "
                "not belong together. Restore the tokenizer that the policy was trained with."
            )
        positions = max_positions(self.config)
        for place, ids in enumerate(all_ids):
            if positions is not None and isinstance(ids, list) and len(ids) > positions - max_new_tokens:
                all_ids[place] = DataError(
                    f"{quoted(prompt_text(prompts[place]))} of {len(ids)} tokens is too long for {self.name}, which "
                    f"has {positions} positions and needs {max_new_tokens} for the response. Drop it, or lower "
                    "max_new_tokens."
                )
        return all_ids

    def _try_ids(self, prompt: Prompt) -> list[int] | DataError:
        try:
            return self.prompt_ids(prompt)
        except DataError as error:
            return error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens. Half a character, as a cut may leave it, becomes U+FFFD."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def response_text(self, ids: Sequence[int]) -> str:
        """The text of a drawn response, without the tokens that end one."""
        return self.decode([token for token in ids if token not in self.stop_ids])


class TextReader:
    """Turns prompts and responses into a policy's token ids; control tokens' strings in them are text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.control = ControlTokens(tokenizer)
        by = _TEMPLATE if tokenizer.chat_template else "the plain form of a policy's prompt"
        self._shown = Shown(self._written, by)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, up to where its answer begins.

        With the tokenizer's chat template, which is then the authority on special tokens; without one the text
        `Prompt: ...`, an empty line, `Response: `, with a BOS where the tokenizer puts one. Never two of them, and no
        EOS.

        Raises:
            DataError: the chat template refuses the dialogue, makes nothing of it, or leaves a part of it out.
        """
        around = not self.tokenizer.chat_template
        prompt, _ = exchange(prompt, "")
        text = self._written(prompt_messages(prompt))
        self._shown.check(prompt_messages(prompt), text, answered=False)
        if self.control.stand_in(texts_of(prompt, "")):
            marked = self.control.mark(prompt, "")
            text = self.control.rename(self._written(prompt_messages(marked.prompt)), marked.mark)
            ids = self.control.encode([text], add_special_tokens=around)[0].ids
        else:
            ids = list(self.tokenizer(text, add_special_tokens=around, verbose=False)["input_ids"])
        if not ids:
            raise DataError(
                f"the policy's chat template makes nothing of the prompt {quoted(text)}; drop such prompts."
            )
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if around and eos is not None and ids[-1] == eos:  # some tokenizers close every text
            ids = ids[:-1]
        return ids

    def response_ids(self, response: str) -> list[int]:
        """Token ids of a response's text alone, without an end."""
        if self.control.stand_in([response]):
            return self.control.encode([response], add_special_tokens=False)[0].ids
        return list(self.tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"])

    def _written(self, turns: Turns) -> str:
        prompt = plain_prompt(turns)
        if not self.tokenizer.chat_template:
            return plain_form(prompt)
        return chat_text(self.tokenizer, prompt, None, _TEMPLATE)


def plain_form(prompt: Prompt) -> str:
    """A prompt as a policy without a chat template reads it; tools and fields of messages are not in it."""
    turns = (turn._replace(fields="") for turn in prompt_messages(prompt) if turn.role != TOOLS)
    return f"Prompt: {prompt_text(tuple(turns))}\n\nResponse: "


def quoted(text: str, limit: int = 60) -> str:
    """The beginning of a text, as an error names it."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def _check_causal(name: str, config: PretrainedConfig) -> None:
    architectures = config.architectures or []
    if any("SequenceClassification" in architecture for architecture in architectures):
        raise ModelError(
            f"{name} is a classifier ({architectures[0]}), such as a reward model: it cannot write text. Name a causal "
            "language model as the policy."
        )
    known = {
        name
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for name in ([names] if isinstance(names, str) else names)
    }
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.is_encoder_decoder or not (own_code or known & set(architectures)):
        raise ModelError(
            f"{name} is no causal language model: its architecture is {', '.join(architectures) or 'not named'}. Name "
            "one whose config.json says ...ForCausalLM."
        )


def _stop_ids(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    named: list[Any] = [config.get_text_config()]
    if (folder / "generation_config.json").is_file():
        named.append(guard(str(folder), lambda: GenerationConfig.from_pretrained(folder)))
    return stop_ids(tokenizer, *named)


def stop_ids(tokenizer: PreTrainedTokenizerBase, *configs: Any) -> tuple[int, ...]:
    """Tokens that end a response: those of a tokenizer and of configurations together."""
    found: set[int] = set()
    for named in (tokenizer, *configs):
        ids = getattr(named, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def load_weights(policy: Policy, dtype: torch.dtype) -> Any:
    """Load the causal model of a policy on the CPU; it samples the policy's whole distribution until it ends.

    Raises:
        ModelError: it cannot be read, or lacks weights.
    """
    quiet_libraries()
    model, info = guard(
        policy.name,
        lambda: AutoModelForCausalLM.from_pretrained(
            policy.weights(),
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=policy.trust_remote_code,
            output_loading_info=True,
        ),
    )
    if info["missing_keys"]:
        raise ModelError(
            f"the policy {policy.name} lacks weights ({', '.join(sorted(info['missing_keys'])[:3])}...), which would "
            "be random. Name the folder of a whole causal model."
        )
    # Whatever the folder recommends (top-k, penalties, suppressed tokens) is another distribution than the policy's.
    model.generation_config = GenerationConfig(eos_token_id=list(policy.stop_ids) or None)
    return model
