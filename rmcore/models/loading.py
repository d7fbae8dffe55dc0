"""Reading backbones: names and folders of any Hugging Face model become weights with one reward, and a tokenizer.

All failures of the loaders end in one clear error. What a checkpoint does not hold (a reward head, a pooler) is drawn
under the seed and named, so that nobody mistakes random weights for trained ones.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rmcore.config.model import TINY_SIZES, WeightDtype
from rmcore.core.errors import ConfigError, ModelError, RmcoreError
from rmcore.core.hub import ALIASES, MINILM_PACKAGE, is_hub_name, require_model
from rmcore.data.tokenizers import ensure_pad_token
from rmcore.models.foreign import HEAD_FILES, ForeignHead, find_foreign_head, install
from rmcore.models.layers import head_rows, is_reward_head
from rmcore.models.precision import with_float32_head
from rmcore.models.seal import SEAL_FILE, check_seal, sealed_files
from rmcore.models.tiny import build_tiny
from rmcore.models.weight_files import Deferred, Held, load_deferred, read_index, read_tensors

KNOWN_TEXT = "What is 2 + 2? The answer is 4."
"""Letters and digits that any tokenizer for text gives back, or calls unknown."""
DEFAULT_LIMIT = 2048
"""Most tokens a side of a model trained elsewhere: longer ones are rare and cost quadratically."""
WEIGHT_PATTERNS = ["model*.safetensors", "model*.safetensors.index.json", *HEAD_FILES]
OTHER_CLASSIFIERS = ("TokenClassification", "MultipleChoice")
"""Parts of class names whose `classifier` gives no reward of a text."""
FRACTIONS = frozenset(["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
BEHIND_THE_PAD_ID = frozenset(
    (
        *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm"),
        *("mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
"""Model types whose first position is the one behind the id of the pad token, as RoBERTa's: all such of transformers
5.23, by their modules. Known by name, as limits are needed where there is a config and no module."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where weights came from: enough to load the same ones again."""

    name: str
    """As `load_backbone` takes it; a folder is an absolute path."""
    seed: int = 0
    fresh: frozenset[str] = frozenset()
    """Parameters that the checkpoint did not hold: drawn under the seed."""
    is_rewritten: bool = False
    """Whether its head is another trainer's: its weights are then not those of its files."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """A model with one label on the CPU, and its tokenizer, which has a pad token."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    origin: Origin
    deferred: Deferred | None = None
    """Weights that are still in their files; None: there are none."""


def resolve_model(name: str) -> str:
    """Turn an alias into a folder or hub name; other names pass through. `tiny` is built, see `load_backbone`.

    Raises:
        ConfigError: `minilm` is requested and its package is not installed.
    """
    if name == "minilm":
        require_model(name)
        return str(Path(str(cast(ModuleSpec, find_spec(MINILM_PACKAGE)).origin)).parent / "model")
    return ALIASES.get(name, name)


def quiet_libraries() -> None:
    """Silence what the loaders print: bars for each file, and that a new reward head is new."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from the CPU generator under `seed`; afterwards all random states are as they were.

    Not `torch.manual_seed`, which would also reseed every GPU. Models are initialised on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def load_backbone(
    name: str,
    *,
    seed: int,
    trust_remote_code: bool = False,
    tokenizer_folder: str | None = None,
    is_adapted: bool = False,
    dtype: WeightDtype = "float32",
    defer: bool = False,
) -> Backbone:
    """Load the model called `name`; a missing head is drawn under `seed`.

    `name` is `tiny` or another of its sizes, an alias, a folder or a hub name. The tokenizer comes from
    `tokenizer_folder`, where given; the vocabulary grows to fit it. `is_adapted`: trained adapters will lie on it, so
    its pad token stays what they were trained with. With bfloat16 the weights are rounded as they are
    read, one at a time, and the reward head stays float32 (`rmcore.models.precision`). With `defer`, for training, the
    float32 weights are left in their files where the model allows that, to be read when it is sharded; why not is said.

    Raises:
        ModelError: the folder or hub model cannot be read, is not what its seal says, or has more than one label.
    """
    quiet_libraries()
    with ExitStack() as stack:
        source = resolve_model(name)
        if name in TINY_SIZES:
            source = str(build_tiny(Path(stack.enter_context(tempfile.TemporaryDirectory())), seed=seed, size=name))
        check_sealed(source)
        place = tokenizer_folder or source
        tokenizer = load_tokenizer(place, trust_remote_code=trust_remote_code)
        config = read_config(source, trust_remote_code=trust_remote_code)
        labels, head = _read_head(source, config)
        is_trained = is_adapted or labels is not None
        give_pad_token(tokenizer, config, is_trained=is_trained)
        deferred = None
        _check_labels(source, labels)
        if defer and head is None:
            found = _load_deferred(name, source, len(tokenizer), seed=seed, trust_remote_code=trust_remote_code)
            if found is not None:
                model, fresh, deferred = found
        with seeded(seed):
            if deferred is None:
                model, fresh = _load_model(source, trust_remote_code=trust_remote_code, dtype=dtype)
            if head is not None:
                fresh -= {install(head, model, source)}
            if len(tokenizer) > cast(nn.Embedding, model.get_input_embeddings()).num_embeddings:
                model.resize_token_embeddings(len(tokenizer))
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    is_built_in = name in TINY_SIZES or name != resolve_model(name)  # stays one next to such a folder
    is_folder = not is_built_in and Path(name).is_dir()
    origin = Origin(str(Path(name).resolve()) if is_folder else name, seed, fresh, head is not None)
    return Backbone(model, tokenizer, origin, deferred)


def _load_deferred(
    name: str, source: str, num_tokens: int, *, seed: int, trust_remote_code: bool
) -> tuple[PreTrainedModel, frozenset[str], Deferred] | None:
    """As `load_deferred`; None, with the reason on stderr, where the model must be loaded whole."""
    try:
        config = _reward_config(source, trust_remote_code=trust_remote_code)
        if name in TINY_SIZES:
            raise ModelError("it is built on the spot, in each of them")
        if trust_remote_code:
            raise ModelError("model.trust_remote_code is on, and what its code does with weights is not known")
        with seeded(seed):
            loaded: tuple[PreTrainedModel, frozenset[str], Deferred] = guard(
                source, lambda: load_deferred(source, config)
            )
        if num_tokens > cast(nn.Embedding, loaded[0].get_input_embeddings()).num_embeddings:
            raise ModelError(f"its tokenizer has {num_tokens} tokens, for which its embeddings must grow")
    except ModelError as reason:
        if os.environ.get("RANK", "0") == "0":
            why = str(reason).rstrip(".")
            print(f"note: each process loads all of {name} before it is sharded: {why}.", file=sys.stderr)
        return None
    loaded[0].eval()
    return loaded


def _reward_config(source: str, *, trust_remote_code: bool) -> PretrainedConfig:
    config = read_config(source, trust_remote_code=trust_remote_code)
    config.num_labels = 1
    config.problem_type = "regression"  # servers then return the raw reward instead of its sigmoid
    return config


def _load_model(source: str, *, trust_remote_code: bool, dtype: WeightDtype) -> tuple[PreTrainedModel, frozenset[str]]:
    """The model, and the names of the parameters that its checkpoint does not hold."""
    config = _reward_config(source, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {
        "use_safetensors": True,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
    }
    model, info = guard(
        source,
        lambda: (
            AutoModelForSequenceClassification.from_pretrained(source, config=config, dtype=torch.float32, **options)
            if dtype == "float32"
            else _from_pretrained_rounded(source, config, options)
        ),
    )
    check_finite(model.named_parameters(), source)
    return model.eval(), frozenset(info["missing_keys"])


def _from_pretrained_rounded(source: str, config: PretrainedConfig, options: dict[str, Any]) -> Any:
    """The same in bfloat16, with the reward head as exact as the file has it.

    Transformers asks the class which parameters it must not round, so it gets a class that names the head's.
    """
    with torch.device("meta"):
        shell = AutoModelForSequenceClassification.from_config(config, trust_remote_code=options["trust_remote_code"])
    kind = type(shell)
    head = {name for name, _ in shell.named_parameters() if is_reward_head(name)}
    keeping: Any = type(
        kind.__name__,
        (kind,),
        {
            "__module__": kind.__module__,
            "_keep_in_fp32_modules_strict": head | set(kind._keep_in_fp32_modules_strict or ()),
        },
    )
    model, info = keeping.from_pretrained(source, config=config, dtype=torch.bfloat16, **options)
    model.__class__ = kind
    kept = {name: one.dtype for name, one in model.named_parameters() if name in head - set(info["missing_keys"])}
    if rounded := sorted(name for name, dtype in kept.items() if dtype != torch.float32):
        raise ModelError(
            f"this version of transformers rounded {', '.join(rounded)} of {source!r}, which must stay float32: load "
            "the model in float32, or install the version that constraints.txt names."
        )
    with_float32_head(model)
    return model, info


def count_parameters(name: str, *, trust_remote_code: bool) -> int:
    """Count the parameters of the model called `name` with a reward head, from its configuration alone.

    Raises:
        ModelError: the configuration cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        is_tiny = name in TINY_SIZES
        source = str(build_tiny(Path(folder), seed=0, size=name)) if is_tiny else resolve_model(name)
        _check_labels(source, num_labels(source, read_config(source, trust_remote_code=trust_remote_code)))
        config = _reward_config(source, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def give_pad_token(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, is_trained: bool) -> None:
    """Give the tokenizer a pad token where it needs one.

    Args:
        tokenizer: of the model; in place.
        config: of the model, which may name the pad where the tokenizer does not.
        is_trained: whether a reward head was trained. One that was with EOS as the pad keeps it: it reads the token
            before EOS.
    """
    recorded = tokenizer.pad_token_id
    if recorded is None:
        recorded = config.get_text_config().pad_token_id
    if is_trained and recorded is not None and recorded == tokenizer.eos_token_id:
        tokenizer.pad_token = tokenizer.eos_token
    else:
        ensure_pad_token(tokenizer)


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a folder or hub model.

    Where a file of the vocabulary is missing, transformers makes an empty tokenizer without a word: it must read text.

    Raises:
        ModelError: it cannot be read, or loses text.
    """
    tokenizer = guard(source, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code))
    # What is odd in its files may show at its first use only.
    ids = guard(source, lambda: list(tokenizer(KNOWN_TEXT, add_special_tokens=False, verbose=False)["input_ids"]))
    special = set(tokenizer.all_special_ids)
    unknown = tokenizer.unk_token_id in ids
    # A vocabulary of another language may know no word of the text; then it must be a vocabulary at least.
    lost = set(range(len(tokenizer))) <= special if unknown else _letters(tokenizer.decode(ids)) != _letters(KNOWN_TEXT)
    if lost:
        raise ModelError(
            f"the tokenizer of {source!r} has {len(tokenizer)} tokens and loses text: of {KNOWN_TEXT!r} it leaves "
            f"{tokenizer.decode(ids)!r}, so every text would get nearly the same reward. Restore tokenizer.json (or "
            "vocab.txt, tokenizer.model) from where the model was trained or saved."
        )
    return tokenizer


def _letters(text: str) -> str:
    """Reduce a text to what a tokenizer may change in case only: white space and word marks are its own affair."""
    return "".join(letter for letter in text.lower() if letter.isascii() and letter.isalnum())


def check_finite(tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Refuse weights that are not finite; one pass over them, less than reading the files takes.

    Raises:
        ModelError: names the first tensors with NaN or infinity.
    """
    broken = [
        name
        for name, tensor in tensors
        if tensor.is_floating_point() and tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor)))
    ]
    if broken:
        raise ModelError(
            f"{source} holds NaN or infinity in {', '.join(broken[:4])}{', ...' if len(broken) > 4 else ''}, "
            f"{len(broken)} tensors in all, so its rewards would mean nothing: its training diverged, or the file is "
            "damaged. Take an earlier checkpoint."
        )


def read_config(source: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read the config of a folder or hub model.

    Raises:
        ModelError: it cannot be read.
    """
    config = guard(source, lambda: AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))
    kinds = config.architectures or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(
            f"config.json of {source} says architectures={kinds!r}, which is no list of class names, so it is not "
            "known what its weights are; restore that file."
        )
    return config


def guard(source: str, load: Callable[[], Any]) -> Any:
    """Turn the loaders' many failures into one clear error.

    Raises:
        ModelError: `load` failed, the hub does not answer, or `source` is a folder whose index of weights leads out of
            it.
    """
    read_index(Path(source))  # transformers would open whatever file it names
    require_model(source)
    try:
        return load()
    except RmcoreError:
        raise
    except Exception as error:  # the libraries raise whatever a damaged file makes them trip over
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the model {source!r} could not be loaded ({detail}). It must be a folder with config.json, safetensors "
            "weights and a tokenizer, a hub name (needs a network), or one of tiny, minilm, deberta, llama."
        ) from error


def fetch_snapshot(hub_name: str, patterns: list[str], revision: str | None = None) -> Path:
    """Download a hub model's files of these patterns, where they are not here yet, and give the folder they are in.

    Raises:
        ModelError: they are not here and the hub cannot be asked.
    """
    return Path(guard(hub_name, lambda: snapshot_download(hub_name, revision=revision, allow_patterns=patterns)))


def check_sealed(source: str) -> None:
    """Compare a folder or hub model with the seal that it was written with, where it has one.

    Raises:
        ModelError: see `check_seal`.
    """
    folder = Path(source)
    if is_hub_name(source):
        folder = fetch_snapshot(source, [SEAL_FILE])
        if files := sealed_files(folder):
            fetch_snapshot(source, list(files))
    check_seal(folder)


def num_labels(source: str, config: PretrainedConfig) -> int | None:
    """Count the labels of a checkpoint's head; None: it is a backbone without a reward head.

    The weights decide, as far as they can be known: a reward model's configuration may have no number of labels, or
    name the class of a language model next to which another trainer put a head. A hub model's are fetched where its
    configuration leaves it open.

    Raises:
        ModelError: its files are damaged, or the hub cannot be asked.
    """
    return _read_head(source, config)[0]


def _read_head(source: str, config: PretrainedConfig) -> tuple[int | None, ForeignHead | None]:
    """As `num_labels`, and the head where it is another trainer's; the headers of the weights are read once."""
    kinds = config.architectures or []
    is_classifier = any("SequenceClassification" in kind for kind in kinds)
    is_plain = is_classifier and config.num_labels == 1 and not getattr(config, "normalize_reward", False)
    if is_hub_name(source) and is_plain:
        return 1, None
    folder = fetch_snapshot(source, WEIGHT_PATTERNS) if is_hub_name(source) else Path(source)
    tensors = read_tensors(folder)
    _check_kinds(source, config, tensors)
    head = find_foreign_head(folder, config, tensors)
    if head is not None:
        return 1, head
    if any(other in kind for kind in kinds for other in OTHER_CLASSIFIERS):
        return None, None
    labels: int | None = head_rows({name: held.shape for name, held in tensors.items()})
    if labels is None and is_classifier:
        labels = config.num_labels
    return labels, None


def _check_labels(source: str, labels: int | None) -> None:
    if labels not in (None, 1):
        raise ModelError(
            f"{source} is a classifier with {labels} labels; a reward model has exactly one. Name its base model (a "
            "new head is then made) or a reward model."
        )


def _check_kinds(source: str, config: PretrainedConfig, tensors: Mapping[str, Held]) -> None:
    """Refuse weights that are whole numbers: transformers would turn them into fractions of another meaning."""
    if getattr(config, "quantization_config", None) is not None:
        return
    for name, held in tensors.items():
        if name.endswith((".weight", ".bias")) and held.dtype not in FRACTIONS:
            raise ModelError(
                f"{source} holds {name} as {held.dtype}, and the weights of a model that is not quantized are floating "
                "point numbers: the header of its file is damaged. Copy, download or save the model again."
            )


def check_positions(config: PretrainedConfig, max_seq_len: int, *, name: str) -> None:
    """Refuse sides longer than the model has positions for.

    Raises:
        ConfigError: max_seq_len exceeds them.
    """
    positions = max_positions(config)
    if positions is not None and max_seq_len > positions:
        raise ConfigError(
            f"max_seq_len={max_seq_len}, but {name} has positions for {positions} tokens; "
            f"lower max_seq_len to at most {positions}."
        )


def max_positions(config: PretrainedConfig) -> int | None:
    """Most tokens a side may have, None where the architecture has no limit."""
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is None or positions <= 0:
        return None
    pad_id = text_config.pad_token_id
    if text_config.model_type in BEHIND_THE_PAD_ID and pad_id is not None:
        return int(positions - pad_id - 1)
    return int(positions)
