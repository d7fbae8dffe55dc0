"""The model card of a reward model: metadata in the hub's own form, and a page for people.

It says what is known, and of what is not that it is not stated. It is made from plain facts and from what measurements
left (`evidence`); `rmcore.cli.card` gathers both.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml

from rmcore.core.errors import DataError
from rmcore.reporting.card.evidence import Found, Judgement
from rmcore.reporting.card.limits import limits
from rmcore.reporting.card.text import NOT_STATED, Markdown, shown
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, markdown
from rmcore.reporting.html.cards import checks_table
from rmcore.reporting.html.page import date
from rmcore.reporting.verdict_style import VERDICT_STYLES

TEMPLATE = "model_card.md.j2"
CARD_FILE = "README.md"
REPOSITORY = "OWNER/NAME"
"""Stands in a card for the repository's name; `rm-opt card --push` writes the name there."""
OWN_KEY = "rm_optimizer"
"""Key of the metadata under which a card says of which weights it is, and what the verdict was."""
DIGEST_KEY = "card_digest"
"""Key below it of the digest by which a changed card is recognised."""
TERMS = ("label_smoothing", "regularization_lambda", "margin_regularization", "centering", "margin_loss_weight")
"""Settings of the loss that are told where they are not 0; β has its own line."""
TAGS = ("reward-model", "preference", "rm-optimizer")


@dataclass(frozen=True, slots=True)
class Example:
    """One answer with its reward, so that anyone who loads the model can check that it reads text as in training."""

    prompt: str
    response: str
    reward: float
    """In float32."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of a trained reward model apart from measurements."""

    name: str
    digest: str
    """Digest of the files that decide its rewards."""
    architecture: str
    num_parameters: int
    rendering: str
    """chat, plain or custom."""
    max_seq_len: int
    beta: float
    token_ids: str | None
    """Python lines that make the token ids `ids` of `prompt` and `response` with `tokenizer`; None where transformers
    alone cannot make them."""
    example: Example
    license: str | None = None
    base_model: str | None = None
    """Name as strangers may read it; None: not stated."""
    base_on_hub: str | None = None
    """The same where it is a name on the hub."""
    data: tuple[tuple[str, str], ...] = ()
    """Names by what they were read for: ("training", "hh.jsonl")."""
    data_on_hub: tuple[str, ...] = ()
    synthetic: bool = False
    """Whether it was trained on the synthetic benchmark's texts."""
    training: Mapping[str, Any] | None = None
    """Record `training.json`."""
    settings: Mapping[str, Any] | None = None
    """All settings of the training, as a PipelineConfig."""
    made_with: Mapping[str, str] | None = None
    """Versions of the libraries of the run."""


@dataclass(frozen=True, slots=True)
class ReadCard:
    """All that a card says to programs."""

    digest: str
    """Digest of the model that it is about."""
    status: str | None
    """Status of the verdict; None: nobody judged."""
    headline: str | None
    is_as_written: bool
    """Whether nobody has changed its page or its metadata since."""


def write_card(facts: Facts, found: Sequence[Found], *, made: str) -> str:
    """The card's text: metadata, then Markdown.

    Args:
        facts: of the model.
        found: what measurements tell, in any order; of several verdicts the one on the highest evidence level is shown.
        made: ISO 8601 time.
    """
    judgement = highest(found)
    elsewhere = next((one.elsewhere for one in reversed(found) if one.elsewhere is not None), None)
    over_baseline = next((one.over_baseline for one in reversed(found) if one.over_baseline is not None), None)
    truncation = (facts.training or {}).get("truncation", {}).get("train")
    sections = [section for one in found for section in one.sections]
    if judgement is not None and judgement.checks:
        sections.append(Block(f"Checks of evidence level {judgement.rung}", tables=(checks_table(judgement.checks),)))
    values = {
        "facts": facts,
        "judgement": judgement,
        "sign": Markdown("?" if judgement is None else VERDICT_STYLES[judgement.status].sign),
        "limits": limits(
            judgement,
            max_seq_len=facts.max_seq_len,
            truncation=truncation,
            elsewhere=elsewhere,
            over_baseline=over_baseline,
            synthetic=facts.synthetic,
        ),
        "sections": [Markdown(markdown(one, 2, is_whole=True, escape=shown)) for one in sections],
        "training": _training_rows(facts),
        "not_stated": NOT_STATED,
        "example": {name: Markdown(json.dumps(getattr(facts.example, name))) for name in ("prompt", "response")},
        "beta": f"{facts.beta:g}",
        "reward": Markdown(f"{facts.example.reward:.4f}"),
        "token_ids": None if facts.token_ids is None else Markdown(facts.token_ids),
        "repository": Markdown(REPOSITORY),
        "made": date(made),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # noqa: S701 - it is no HTML: `finalize` escapes, for Markdown and for the HTML in it
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(TEMPLATE).render(values)
    digest = _digest(_written(facts, found, judgement, page, None))
    return _written(facts, found, judgement, page, digest)


def highest(found: Sequence[Found]) -> Judgement | None:
    """The verdict of the highest evidence level, the last of several there; None where nobody judged."""
    judged = [one.judgement for one in found if one.judgement is not None]
    return max(reversed(judged), key=lambda one: one.rung, default=None)


def _written(facts: Facts, found: Sequence[Found], judgement: Judgement | None, page: str, digest: str | None) -> str:
    """Metadata and page, with the digest of both."""
    from huggingface_hub import ModelCardData

    results = [result for one in found for result in one.results]
    own: dict[str, Any] = {"checkpoint_digest": facts.digest, DIGEST_KEY: digest, "verdict": None}
    if judgement is not None:
        own["verdict"] = {"status": judgement.status, "rung": judgement.rung, "headline": judgement.headline}
    more: dict[str, Any] = {OWN_KEY: own}
    data = ModelCardData(
        base_model=facts.base_on_hub,
        datasets=list(facts.data_on_hub) or None,
        eval_results=results or None,
        library_name="transformers",
        license=facts.license,
        model_name=facts.name if results else None,
        pipeline_tag="text-classification",
        tags=list(TAGS),
        **more,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{page}"


def name_repository(text: str, repository: str) -> str:
    """The card with the repository's name in place of `REPOSITORY`; an unedited card still counts as unedited."""
    card, named = read_card(text), text.replace(REPOSITORY, repository)
    if card is None or not card.is_as_written:
        return named
    return named.replace(_digest(text), _digest(named), 1)  # the first is in the metadata


def read_card(content: str | bytes) -> ReadCard | None:
    """Read what a card of `write_card` says to programs; None where it is another's, or no text in UTF-8.

    Raises:
        DataError: its metadata are no YAML.
    """
    from huggingface_hub import ModelCard

    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n")  # as an editor or git may have written it
    try:
        card = ModelCard(text, ignore_metadata_errors=True)
        own = card.data.to_dict().get(OWN_KEY)
        if own is None:
            return None
        verdict = own["verdict"] or {}
        is_as_written = own[DIGEST_KEY] == _digest(text)
        return ReadCard(str(own["checkpoint_digest"]), verdict.get("status"), verdict.get("headline"), is_as_written)
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the metadata at the beginning of the card cannot be read ({type(error).__name__}); write it again with "
            "`rm-opt card`."
        ) from error


def _digest(text: str) -> str:
    """sha256 of a card of ours in hex digits: of its page, and of its metadata apart from this digest."""
    from huggingface_hub import ModelCard

    card = ModelCard(text, ignore_metadata_errors=True)
    data = card.data.to_dict()
    data[OWN_KEY] = {name: value for name, value in data[OWN_KEY].items() if name != DIGEST_KEY}
    told = json.dumps(data, sort_keys=True, default=str)  # YAML has dates, JSON has none
    return hashlib.sha256(f"{told}\n{card.text.strip()}".encode()).hexdigest()


def _training_rows(facts: Facts) -> list[tuple[str, str | Markdown]]:
    """Tell what training was, in words; what is not known is said."""
    training, settings = facts.training or {}, facts.settings or {}
    model, train = settings.get("model") or {}, settings.get("train") or {}
    rows: list[tuple[str, str | Markdown]] = [("base model", facts.base_model or NOT_STATED)]
    rows += [("licence of the base model", NOT_STATED)]
    rows += [(f"{what} pairs", name) for what, name in facts.data] or [("training pairs", NOT_STATED)]
    rows += [("licence of the pairs", "they are synthetic" if facts.synthetic else NOT_STATED)]
    pairs = (training.get("truncation") or {}).get("train", {}).get("num_pairs")
    seen = training.get("num_pairs")
    passes = (
        "" if not pairs or seen is None else f", seen {numbers.count(seen)} times in all ({seen / pairs:.3g} passes)"
    )
    rows += [("different pairs that were trained on", NOT_STATED if pairs is None else f"{pairs:,}{passes}")]
    if training:
        steps = f"{numbers.count(training['num_steps'])} ({training['stop_reason'].replace('_', ' ')})"
        rows += [("optimizer steps", f"{steps}; kept was step {numbers.count(training['best_step'])}")]
    if {"optimizer", "lr", "pairs_per_step"} <= train.keys():
        rows += [("loss", _loss(train)), ("optimizer", f"{train['optimizer']}, learning rate {train['lr']:g}")]
        rows += [("pairs a step", numbers.count(train["pairs_per_step"]))]
        trained = "LoRA adapters and the reward head" if model.get("lora") else "all weights"
        rows += [("what was trained", "the reward head alone" if model.get("head_only") else trained)]
    rows += [("seed", str(settings["seed"]) if settings else NOT_STATED)]
    rows += [("parameters", numbers.count(facts.num_parameters)), ("architecture", facts.architecture)]
    formats = {"chat": "its chat template", "plain": "as paragraphs Prompt: … and Response: …"}
    rows += [("how text is written", formats.get(facts.rendering, "by a function of its makers, which is not in here"))]
    rows += [("longest text", f"{facts.max_seq_len:,} tokens, prompt and answer together")]
    versions = ", ".join(f"{name} {version}" for name, version in (facts.made_with or {}).items())
    rows += [("made with", versions or NOT_STATED), ("digest of its files", Markdown(f"`{facts.digest[:16]}`"))]
    return rows


def _loss(train: Mapping[str, Any]) -> str:
    weights = {name.replace("_", " "): train[name] for name in TERMS if train.get(name)}
    return "Bradley–Terry" + "".join(f", {name} {weight:g}" for name, weight in weights.items())
