"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through PEFT: put them on, save them, load them, merge them.

An adapter folder holds PEFT's own two files, so that PEFT and servers read it, plus `rm_base.json`: which base it
belongs to and what that base's weights looked like. An adapter on another base gives rewards that mean nothing, and
nothing else would notice.

Merging computes W + delta next to the live weights. PEFT's merge in place followed by its unmerge does not give back
the same bits, and a training that was saved must continue exactly as one that was not.
"""

import copy
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rmcore.config.model import LoraSettings, WeightDtype
from rmcore.core.errors import ConfigError, ModelError
from rmcore.models.foreign import find_foreign_head, install
from rmcore.models.layers import is_reward_head
from rmcore.models.loading import Backbone, Origin, check_finite, guard, load_backbone, resolve_model, seeded
from rmcore.models.precision import reward_heads, round_backbone
from rmcore.models.weight_files import Deferred

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


LINEAR = (nn.Linear, Conv1D)
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""Llama's names, which most causal models share: attention and MLP, and not the router of a mixture of experts."""
ADAPTER_FOLDER = "adapter"
"""Where a checkpoint keeps its adapter, next to the merged model."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FILE = "adapter_config.json", "adapter_model.safetensors", "rm_base.json"
PEFT_PREFIX = "base_model.model."
SAMPLED_VALUES = 64


def make_lora_config(settings: LoraSettings) -> "LoraConfig":
    """The PEFT configuration of our settings; no targets mean `default_targets`, which `lora.attach` fills in."""
    from peft import LoraConfig

    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT divides it by the rank
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets) or None,
    )


def check_names(model: nn.Module, targets: Iterable[str], saved: Iterable[str]) -> None:
    """Refuse names that match nothing; PEFT itself is content if one of them does.

    Args:
        model: without adapters.
        targets: names of layers to adapt, which the reward head is not among: it is trained whole.
        saved: names of modules to train whole.

    Raises:
        ConfigError: names those that match nothing, and what exists.
    """
    names = [name for name, _ in model.named_modules()]
    backbone = [name for name in names if not is_reward_head(name)]
    absent = sorted(target for target in targets if not any(matches(name, target) for name in backbone))
    if absent:
        raise ConfigError(
            f"LoRA targets {', '.join(absent)} match no layer of this model's backbone. {describe_layers(model)}"
        )
    unknown = sorted(part for part in saved if not any(matches(name, part) for name in names))
    if unknown:
        raise ConfigError(f"modules_to_save {', '.join(unknown)} are no modules of this model; name existing ones.")


def linear_layers(model: nn.Module) -> list[str]:
    """Full names of the layers that can carry an adapter: linear ones outside of the reward head."""
    return [name for name, part in model.named_modules() if isinstance(part, LINEAR) and not is_reward_head(name)]


def default_targets(model: nn.Module) -> list[str]:
    """Names of the linear layers inside the repeated transformer blocks, as short as they stay unambiguous.

    Where all of Llama's seven projections exist, those; else every linear layer of a block. A pooler between the
    blocks and the head is never among them.

    Raises:
        ConfigError: there are no repeated blocks with linear layers.
    """
    lists = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    lists = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    linear = linear_layers(model)
    inside = {name: name.removeprefix(f"{one}.") for one in lists for name in linear if name.startswith(f"{one}.")}
    outside = [name for name, part in model.named_modules() if isinstance(part, LINEAR) and name not in inside]
    if {name.rpartition(".")[2] for name in inside} >= PROJECTIONS:
        outside += [name for name in inside if name.rpartition(".")[2] not in PROJECTIONS]
        inside = {name: path for name, path in inside.items() if name.rpartition(".")[2] in PROJECTIONS}
    if not inside:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks with linear layers, so LoRA targets cannot be found by "
            f"inspection; name them (lora.targets). {describe_layers(model)}"
        )
    targets = set()
    for name, path in inside.items():
        parts = path.split(".")[1:]  # without the number of the block
        suffixes = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        clear = [suffix for suffix in suffixes if not any(matches(other, suffix) for other in outside)]
        targets.add(clear[0] if clear else name)
    return sorted(targets)


def matches(name: str, target: str) -> bool:
    """PEFT's rule for a list of targets: the whole name or its last parts."""
    return name == target or name.endswith(f".{target}")


def describe_layers(model: nn.Module) -> str:
    """The short names of `linear_layers`, with counts, for messages."""
    counts = Counter(name.rpartition(".")[2] for name in linear_layers(model))
    return "Linear layers that exist: " + ", ".join(f"{name} ({count})" for name, count in sorted(counts.items())) + "."


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The base of an adapter: `name` with what is missing drawn under `seed`, and a sample of its weights."""

    name: str
    seed: int
    fingerprint: str

    @classmethod
    def of(cls, model: nn.Module, origin: Origin, deferred: Deferred | None = None) -> "AdapterBase":
        """Record `model`, which has no adapters yet; `deferred` are its weights that are still in their files."""
        return cls(origin.name, origin.seed, fingerprint(model, origin.fresh, deferred))

    def save(self, folder: Path) -> None:
        """Write `rm_base.json`."""
        (folder / BASE_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds a PEFT adapter instead of a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_base(folder: Path) -> AdapterBase:
    """Read which base the adapter in `folder` was trained on; of an adapter made elsewhere only the name is known.

    Raises:
        ModelError: no base is named, or the file that names it is damaged.
    """
    if (folder / BASE_FILE).is_file():
        known = _read_object(folder / BASE_FILE)
        kinds = {name: type(value) for name, value in known.items()}
        if kinds != {"name": str, "seed": int, "fingerprint": str} or abs(known["seed"]) >= 2**63:
            raise _damaged(folder / BASE_FILE, "it does not hold a name, a seed of 64 bits and a fingerprint")
        return AdapterBase(**known)
    name = _read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if name is not None and not isinstance(name, str):
        raise _damaged(folder / ADAPTER_CONFIG, f"base_model_name_or_path is {name!r}"[:200])
    if not name:
        raise ModelError(
            f"the adapter {folder} names no base model, and without one it is nothing; write the folder of its base "
            f"as base_model_name_or_path into {ADAPTER_CONFIG}."
        )
    return AdapterBase(name, 0, "")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, "it is no JSON object")
    return found


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(
        f"{path} is damaged ({why}), so the adapter's base is not known; restore it from the folder it was trained "
        "into."
    )


def fingerprint(model: nn.Module, fresh: frozenset[str], deferred: Deferred | None = None) -> str:
    """sha256 in hex over names, shapes and some values of each weight, without the freshly drawn ones.

    It tells another model, another training step or another random draw apart, and reads next to nothing.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if name not in fresh:
            values = tensor if deferred is None else deferred.values(tensor)
            flat = values.detach().flatten()
            sample = flat[:: max(1, flat.numel() // SAMPLED_VALUES)].to(tensor.dtype).double().cpu().numpy()
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()


def attach(model: PreTrainedModel, config: "LoraConfig", *, seed: int, origin: Origin) -> "PeftModel":
    """Put adapters on `model` in place; they, the reward head and what was freshly drawn are then what is trained.

    The configuration is copied and kept as it is. Filled in is only what must be: the task, the targets if None, and
    the head among `modules_to_save`. (PEFT itself spells out the target "all-linear".)

    Args:
        model: a sequence-classification model.
        config: PEFT's configuration.
        seed: of the adapters' initial values; random states are left as they were.
        origin: of `model`.

    Raises:
        ConfigError: the targets match nothing, or the configuration cannot be trained or saved without its base.
    """
    from peft import get_peft_model

    config = copy.deepcopy(config)
    _check_usable(config)
    config.task_type = config.task_type or "SEQ_CLS"
    if config.target_modules is None and not config.target_parameters:
        config.target_modules = default_targets(model)
    targets = [] if isinstance(config.target_modules, str) else config.target_modules or []
    check_names(model, targets, config.modules_to_save or [])
    named, config.base_model_name_or_path = config.base_model_name_or_path or resolve_model(origin.name), None
    heads = list(reward_heads(model))
    drawn = {name.rpartition(".")[0] for name in origin.fresh if not is_reward_head(name)}
    wanted = [*(config.modules_to_save or []), *heads, *sorted(drawn)]
    saved = list(dict.fromkeys(wanted))  # the user's first, each once
    config.modules_to_save = list(saved)
    try:
        with seeded(seed), _quiet_peft():
            adapted = get_peft_model(model, config)
    except ValueError as error:
        detail = str(error).strip().splitlines()[0]
        raise ConfigError(f"LoRA cannot be put on this model ({detail}). {describe_layers(model)}") from error
    config.modules_to_save = saved  # PEFT adds names of its own, whether they exist or not
    config.base_model_name_or_path = named
    return adapted.eval()


def _check_usable(config: "LoraConfig") -> None:
    if config.task_type not in (None, "SEQ_CLS"):
        raise ConfigError(
            f"this LoraConfig is for task_type={config.task_type}, and a reward model is a sequence classifier; leave "
            "task_type out or say SEQ_CLS."
        )
    if config.inference_mode:
        raise ConfigError("this LoraConfig has inference_mode=True, which freezes head and adapters; leave it out.")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights not in ("gaussian", "orthogonal"):
        raise ConfigError(
            f"init_lora_weights={config.init_lora_weights!r} needs data or changes the base's weights, so the adapter "
            "would not fit the saved base; use True, 'gaussian' or 'orthogonal'."
        )


def save_adapter(
    model: "PeftModel", folder: Path, base: AdapterBase, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write the adapter with its head and the record of its base; `state` as in `merged_state`."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    # Embeddings are saved where they are trained; whether they are PEFT would find out from the base's folder.
    tensors = get_peft_model_state_dict(model, state_dict=_full(model, state), save_embedding_layers=False)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config["default"])
    config.inference_mode = True  # what PEFT itself writes
    config.save_pretrained(str(folder))
    base.save(folder)


def load_base(base: AdapterBase, folder: Path, *, trust_remote_code: bool, dtype: WeightDtype = "float32") -> Backbone:
    """Load the base of the adapter in `folder`, with the adapter's tokenizer where it has one.

    A fingerprint is that of weights which nothing rounded. So a base whose files are not bfloat16 already is read in
    float32, also where bfloat16 is requested, and then rounded: on the host that takes the memory of float32.

    Raises:
        ModelError: the base is gone, or has other weights than the adapter was trained on.
    """
    loaded = _read_base(base, folder, trust_remote_code=trust_remote_code, dtype=dtype)
    if dtype == "bfloat16" and not _fits(loaded, base):
        del loaded
        loaded = _read_base(base, folder, trust_remote_code=trust_remote_code, dtype="float32")
    if not _fits(loaded, base):
        raise ModelError(
            f"the adapter {folder} was trained on other weights than {base.name} has now, so its rewards would mean "
            "nothing; bring back that base, or use the merged model next to the adapter."
        )
    if dtype == "bfloat16":
        round_backbone(loaded.model)
    return loaded


def _fits(loaded: Backbone, base: AdapterBase) -> bool:
    return not base.fingerprint or base.fingerprint == fingerprint(loaded.model, loaded.origin.fresh)


def _read_base(base: AdapterBase, folder: Path, *, trust_remote_code: bool, dtype: WeightDtype) -> Backbone:
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    try:
        return load_backbone(
            base.name,
            seed=base.seed,
            trust_remote_code=trust_remote_code,
            tokenizer_folder=str(folder) if has_tokenizer else None,
            is_adapted=True,
            dtype=dtype,
        )
    except ModelError as error:
        record = BASE_FILE if (folder / BASE_FILE).is_file() else ADAPTER_CONFIG
        raise ModelError(
            f"the adapter {folder} needs its base model {base.name}, which cannot be had: {error} Bring the base back, "
            f"write its new place into {record}, or use the merged model next to the adapter."
        ) from error


def load_adapter(loaded: Backbone, folder: Path, base: AdapterBase) -> "PeftModel":
    """Put the adapter in `folder` on its base, trainable.

    Raises:
        ModelError: the adapter lacks weights, above all the head, or does not fit the base.
    """
    held = guard(str(folder), lambda: load_file(folder / ADAPTER_WEIGHTS))
    check_finite(held.items(), str(folder))
    fresh, head = loaded.origin.fresh, find_foreign_head(folder)
    if head is not None:
        fresh -= {install(head, loaded.model, str(folder))}
    absent = sorted(fresh - {name.removeprefix(PEFT_PREFIX) for name in held})
    if absent:
        raise ModelError(
            f"neither the adapter {folder} nor its base {base.name} holds {', '.join(absent)}, so rewards would be "
            "random; train again with those among modules_to_save."
        )
    with _quiet_peft():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            adapted = _adapted(loaded.model, folder, held, has_foreign_head=head is not None)
        except Exception as error:  # PEFT raises whatever a damaged file makes it trip over
            raise ModelError(
                f"the adapter {folder} does not fit its base {base.name} ({error}); restore the adapter's files."
            ) from error
    return adapted.eval()


def _adapted(
    model: PreTrainedModel, folder: Path, held: Mapping[str, Tensor], *, has_foreign_head: bool
) -> "PeftModel":
    """The model with the adapter in `folder`, trainable.

    An adapter of a language model, with another trainer's head next to it, becomes one of a reward model, whose head
    (which `model` has by now) is trained and saved with it.
    """
    from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict

    config: Any = LoraConfig.from_pretrained(str(folder))
    if not has_foreign_head:
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True, config=config)
    config.task_type, config.modules_to_save, config.inference_mode = "SEQ_CLS", ["score"], False
    head = {f"{PEFT_PREFIX}score.weight": model.get_parameter("score.weight").detach().clone()}
    adapted: Any = get_peft_model(model, config)
    found: Any = set_peft_model_state_dict(adapted, {**held, **head})
    lost = [name for name in found.missing_keys if "lora_" in name] + list(found.unexpected_keys)
    if lost:
        raise ValueError(f"{lost[0]} is in one of the two alone")
    return cast("PeftModel", adapted)


def merged_state(model: "PeftModel", state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The weights of the plain model with the adapters added in, on the CPU, by the plain model's own names.

    The live weights are neither changed nor copied as a whole: an empty shell of the model takes references to them,
    and PEFT merges into that. New memory is what the adapted layers take, on the host.

    Args:
        model: with adapters.
        state: full tensors by the names of `model.state_dict()`, where the live ones are sharded.
    """
    shell = hollow_model(model)
    on_cpu = {name: _wide(tensor.detach().cpu()) for name, tensor in _full(model, state).items()}
    shell.load_state_dict(on_cpu, assign=True)
    merged: Any = shell.merge_and_unload(safe_merge=True)
    return {name: tensor.detach() for name, tensor in merged.state_dict().items()}


def hollow_model(model: Any) -> Any:
    """A model of the same classes and adapters, sharded by nobody, on torch's meta device: shapes without memory."""
    from peft import get_peft_model

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    plain: Any = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"), _quiet_peft():
        shell = plain(base.config)
        if base is model:
            return shell
        config = copy.deepcopy(model.peft_config["default"])
        config.base_model_name_or_path = None  # the shell comes from nowhere, and PEFT would warn
        return get_peft_model(shell, config, low_cpu_mem_usage=True)


def _wide(tensor: Tensor) -> Tensor:
    """The same in float32: a product of adapters that is added to a base in bfloat16 must not be rounded to that."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _full(model: nn.Module, state: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    return dict(model.state_dict() if state is None else state)


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Hide that PEFT reads a property which transformers 5.23 has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield
