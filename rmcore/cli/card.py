"""The model card of a reward model, in the hub's own form: what it is, what was shown of it, and what was not.

What is not known is said to be not stated; of names on this machine only the last part is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.cli.train import SETTINGS_FILE
from rmcore.core.files import read_object
from rmcore.core.hub import ALIASES, is_hub_name
from rmcore.core.manifests import MANIFEST
from rmcore.reporting.card import GOLD, Evidence, Judgement, Markdown, highest, limits, public_name, shown
from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Table, markdown
from rmcore.reporting.html.page import date
from rmcore.reporting.runs import Run, read_runs
from rmcore.reporting.verdict_style import VERDICT_STYLES

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

    from rmcore.models.reward_model import BradleyTerryRM

BEST = "best"
NOT_STATED = "not stated"
OWN_KEY = "rm_optimizer"
"""Key of the metadata under which a card says of which weights it is, and what the verdict was."""
TERMS = ("label_smoothing", "regularization_lambda", "margin_regularization", "centering")
"""Settings of the loss that are told where they are not 0."""
PROMPT, RESPONSE = "What is 2 + 2?", "It is 4."
"""The example whose reward a card names, so that anyone who loads the model can check that it reads text as it did."""
CHAT_TEXT = (
    'messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]\n'
    "    text = tokenizer.apply_chat_template(messages, tokenize=False)\n"
    '    ids = tokenizer(text, add_special_tokens=False)["input_ids"]'
)
PLAIN_TEXT = 'ids = tokenizer(f"Prompt: {prompt}\\n\\nResponse: {response}")["input_ids"]'
USE = """```python
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAME = "OWNER/NAME"  # this repository, or a folder that holds its files
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForSequenceClassification.from_pretrained(NAME, dtype=torch.float32).eval()


def reward(prompt: str, response: str) -> float:
    {token_ids}
    if len(ids) > {max_seq_len}:
        raise ValueError(f"{{len(ids)}} tokens, and the model reads {max_seq_len}")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


print(reward("{prompt}", "{response}"))  # {reward:.4f}
```

**Check it:** the last line prints {reward:.4f} in float32, to about four decimals. Another number means that the text
reaches the model in another way than it was trained on."""
NO_SNIPPET = (
    "Its text is written by a function of its makers that is not in this repository: load it with rm-opt and name that "
    "function (--render-fn module:function)."
)
LADDER = (
    "The evidence levels: 1 labelled pairs, 2 logged answers, 3 samples of the policy, judged, 4 a policy that was "
    "optimised. Below the third no model is called ready."
)
FORMATS = {"chat": "its chat template", "plain": "as paragraphs Prompt: … and Response: …"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint comes from, as far as its place says.

    Attributes:
        training: record `training.json` of the training that wrote it; empty where it is not known.
        settings: of that training, as a PipelineConfig; empty where they are not known.
        run: the newest run that trained and measured it.
    """

    name: str
    training: Mapping[str, Any]
    settings: Mapping[str, Any]
    run: Run | None = None


def find_origin(folder: Path) -> Origin:
    """Look at what is around a checkpoint's folder: the records of `rm-opt train`, or a store and its runs."""
    trained, is_best = folder.parent, folder.name == BEST
    training = read_object(trained / "training.json")
    if training is None or not (is_best or folder.name.startswith("step_")):
        return Origin(folder.name, {}, {})
    manifest = read_object(trained / MANIFEST) or {}
    inputs = manifest.get("inputs")
    settings = read_object(trained / SETTINGS_FILE) or (inputs.get("config") if isinstance(inputs, Mapping) else None)
    settings = settings if isinstance(settings, Mapping) else {}
    for run in (
        read_runs(trained.parents[2] / "reports")
        if is_best and manifest.get("key") and len(trained.parents) > 2
        else ()
    ):
        if run.stage_keys.get("train") == manifest.get("key"):
            return Origin(str(run.record["run_name"]), training, run.config or settings, run)
    return Origin(trained.name if is_best else f"{trained.name} {folder.name}", training, settings)


def make_card(
    origin: Origin, rm: "BradleyTerryRM", digest: str, found: Sequence[Evidence], license_id: str | None
) -> "ModelCard":
    """Make the card of the model `rm`, whose files have the `digest`: metadata, then a page.

    Of several verdicts the one on the highest evidence level is shown.
    """
    from huggingface_hub import ModelCard, ModelCardData

    judgement, data = highest(found), origin.settings.get("data") or {}
    base = (origin.settings.get("model") or {}).get("name")
    base = None if base is None else ALIASES.get(base, base)
    sources = {"training": data.get("source"), "held-out": data.get("eval_source")}
    results = [result for one in found for result in one.results]
    own: dict[str, Any] = {"checkpoint_digest": digest, "verdict": None}
    if judgement is not None:
        own["verdict"] = {"status": judgement.status, "rung": judgement.rung, "headline": judgement.headline}
    more: dict[str, Any] = {OWN_KEY: own}
    metadata = ModelCardData(
        base_model=base if base is not None and is_hub_name(base) else None,
        datasets=[name for name in sources.values() if name and is_hub_name(name)] or None,
        eval_results=results or None,
        library_name="transformers",
        license=license_id,
        model_name=origin.name if results else None,
        pipeline_tag="text-classification",
        tags=["reward-model", "preference", "rm-optimizer"],
        **more,
    )
    rendering, is_synthetic = rm.renderer.rendering, sources["training"] == GOLD
    rows = {"base model": NOT_STATED if base is None else public_name(base), "licence of the base model": NOT_STATED}
    rows |= {f"{what} pairs": public_name(name) for what, name in sources.items() if name}
    rows |= {"licence of the pairs": "they are synthetic" if is_synthetic else NOT_STATED, **_training(origin)}
    rows |= {
        "parameters": f"{numbers.count(rm.num_parameters)}, {type(rm.model).__name__}",
        "how text is written": FORMATS.get(rendering.format, "by a function of its makers, which is not in here"),
        "longest text": f"{rendering.max_seq_len:,} tokens, prompt and answer together",
        "digest of its files": digest[:16],
    }
    cut = (origin.training.get("truncation") or {}).get("train") or {}
    forbidden = limits(judgement, found, cut, rendering.max_seq_len, is_synthetic)
    sections = [section for one in found for section in one.sections]
    blocks = [
        _verdict(judgement),
        Block("What it must not be used for", findings=forbidden),
        _use(rm),
        Block("What it was made of", tables=(Table(("", ""), list(rows.items()), left=range(2)),)),
        *(sections or [Block("Measurements", ("None were there when this card was written.",))]),
    ]
    head = (
        f"# {shown(origin.name)}\n\nA reward model: it gives an answer to a prompt one number, and a higher one to the "
        "answer that people would rather have. Written by rm-opt export (RM-Optimizer) on "
        f"{date(datetime.now(UTC).isoformat(timespec='seconds'))}, from what training and measurements left."
    )
    page = "\n\n".join([head, *(markdown(one, 2, is_whole=True, escape=shown) for one in blocks)])
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{page}\n")


def _verdict(judgement: Judgement | None) -> Block:
    title = "May a policy be optimised against it?"
    if judgement is None:
        nobody = "> **? Nobody judged.** No verdict was given when this card was written, so nothing here says so."
        return Block(title, text=(Markdown(nobody),))
    told = (
        f"> **{VERDICT_STYLES[judgement.status].sign} {shown(judgement.headline)}**\n>\n> Evidence level "
        f"{judgement.rung} of 4: {shown(judgement.evidence)}. Read from {shown(judgement.source)}."
    )
    against = [f"What speaks against it: {reason}" for reason in judgement.reasons]
    more = [f"What would give a stronger verdict: {judgement.raised_by}"] if judgement.raised_by else []
    return Block(title, text=(Markdown(told), LADDER), findings=(*against, *more))


def _use(rm: "BradleyTerryRM") -> Block:
    token_ids, snippet = _token_ids(rm), NO_SNIPPET
    if token_ids is not None:
        example = {"prompt": PROMPT, "response": RESPONSE, "reward": float(rm.score([PROMPT], [RESPONSE])[0])}
        reads = {"token_ids": token_ids, "max_seq_len": rm.renderer.rendering.max_seq_len}
        snippet = USE.format(**example, **reads)
    scale = (
        f"Rewards are logits: β = {rm.beta:g} times the difference of two rewards of one prompt are the log-odds that "
        "the first answer is preferred. rm-opt score and rm-opt serve read this folder, too."
    )
    return Block("How to use it", text=(Markdown(snippet), scale))


def _token_ids(rm: "BradleyTerryRM") -> str | None:
    """Lines of Python that make the token ids of a text with the tokenizer alone, tried on an example; None: none do.

    The text is then made by a function of the user, or cut already.
    """
    from rmcore.data.chat_template import render_chat

    is_chat, tokenizer = rm.renderer.rendering.format == "chat", rm.tokenizer
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": RESPONSE}]
    text = render_chat(tokenizer, messages) if is_chat else f"Prompt: {PROMPT}\n\nResponse: {RESPONSE}"
    ids = list(tokenizer(str(text), add_special_tokens=not is_chat)["input_ids"])
    wanted = rm.renderer.tokenize_sides([(PROMPT, RESPONSE)])[0].ids
    ends = {f" + [tokenizer.{name}]": [getattr(tokenizer, name)] for name in ("eos_token_id", "sep_token_id")}
    closing = next((end for end, added in {"": [], **ends}.items() if ids + added == wanted), None)
    return None if closing is None else (CHAT_TEXT if is_chat else PLAIN_TEXT) + closing


def _training(origin: Origin) -> dict[str, str]:
    """Tell what the training was, in words, as far as it is known."""
    training, train = origin.training, origin.settings.get("train") or {}
    pairs, seen = (training.get("truncation") or {}).get("train", {}).get("num_pairs"), training.get("num_pairs")
    passes = f", seen {numbers.count(seen)} times in all ({seen / pairs:.3g} passes)" if pairs and seen else ""
    rows = {"different pairs that were trained on": NOT_STATED if pairs is None else f"{pairs:,}{passes}"}
    if training:
        steps = f"{numbers.count(training['num_steps'])} ({training['stop_reason'].replace('_', ' ')})"
        rows["optimizer steps"] = f"{steps}; kept was step {numbers.count(training['best_step'])}"
    if {"optimizer", "lr", "pairs_per_step"} <= train.keys():
        terms = "".join(f", {name.replace('_', ' ')} {train[name]:g}" for name in TERMS if train.get(name))
        rows["loss"] = f"Bradley–Terry{terms}; {train['pairs_per_step']:,} pairs a step"
        rows["optimizer"] = f"{train['optimizer']}, learning rate {train['lr']:g}, seed {origin.settings.get('seed')}"
    return rows
