"""Stage policy: what will be optimised against the reward model.

`policy.name=sft` fine-tunes a small causal model on the synthetic benchmark's answers, or on the responses of the
training pairs, chosen and rejected alike, and writes it to `model/` with `training.json`. Another name is only written
down. Writes `policy.json` and `summary.json`.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rmcore.config.model import TINY_SIZES
from rmcore.config.policy import SFT
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, report_left_out
from rmcore.core.saving import save_pretrained
from rmcore.core.tracking import Tracker
from rmcore.data.gold.world import demonstrations
from rmcore.data.pair import Prompt, with_text_answers
from rmcore.data.readers.sources import source_digest
from rmcore.data.table import read_pairs
from rmcore.models.device import pick_device
from rmcore.models.loading import guard, load_tokenizer, max_positions, quiet_libraries
from rmcore.models.tiny import build_tiny
from rmcore.policy.policy import TextReader
from rmcore.policy.sft import TOKEN_BUDGET, Example, fine_tune
from rmcore.stages.prepared import POLICY_FOLDER
from rmcore.stages.stages import PolicyStage

POLICY_FILE = "policy.json"
EPOCHS = 3
"""Passes over the examples: with as many the start policy of a study is made in a minute on a laptop."""
TINY_LR = 4e-3
"""Peak learning rate, by Muon, of weights that begin as random numbers."""
PRETRAINED_LR = 5e-5
"""That of a base which has been trained: within the 1e-5 to 1e-4 that are usual, and not measured here."""


def run(settings: PolicyStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Fine-tune, or write down which policy is meant."""
    name, base = settings.drawn_from, settings.base
    if name != SFT:
        content = source_digest(name) if name and Path(name).exists() else name
        write_json(out / POLICY_FILE, {"policy": content})  # not where it is: it may be moved
        write_json(out / "summary.json", {"metrics": {}})
        return
    with tempfile.TemporaryDirectory() as scratch:
        if base in TINY_SIZES:
            base = str(build_tiny(Path(scratch), seed=settings.seed, size=base))
        quiet_libraries()
        model = guard(
            base, lambda: AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, use_safetensors=True)
        )
        tokenizer = load_tokenizer(base)
    model.to(pick_device(settings.device))
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError(f"the tokenizer of policy.base={settings.base} has no EOS, so no response would ever end.")
    limit = min(TOKEN_BUDGET, max_positions(model.config) or TOKEN_BUDGET)
    reader = TextReader(tokenizer)
    examples = _examples(reader, _responses(settings, settings.prepared.folder), end)
    fitting = [example for example in examples if example.num_tokens <= limit]

    def on_step(done: int, num_steps: int, loss: float) -> None:
        report(done, num_steps, f"loss {loss:.3f}")
        tracker.metrics(done, {"policy/loss": loss})

    lr = TINY_LR if settings.base in TINY_SIZES else PRETRAINED_LR
    loss = fine_tune(model, fitting, epochs=EPOCHS, lr=lr, seed=settings.seed, on_step=on_step)
    save_pretrained(model, out / POLICY_FOLDER)
    save_pretrained(tokenizer, out / POLICY_FOLDER)
    write_json(out / POLICY_FILE, {"policy": SFT})
    left_out = len(examples) - len(fitting)
    write_json(out / "training.json", {"num_examples": len(fitting), "num_too_long": left_out, "loss": loss})
    write_json(out / "summary.json", {"metrics": {"policy/sft_loss": loss, "policy/sft_examples": len(fitting)}})


def _examples(reader: TextReader, rows: Sequence[tuple[Prompt, str]], end: int) -> list[Example]:
    """Rows as token ids; prompts that the policy cannot read are left out and said on stderr."""
    examples: list[Example] = []
    errors: list[str] = []
    for prompt, response in rows:
        try:
            examples.append(Example(tuple(reader.prompt_ids(prompt)), (*reader.response_ids(response), end)))
        except DataError as error:
            errors.append(str(error))
    if errors and not examples:
        raise DataError(f"none of the {len(rows)} prompts can be read by policy.base; {errors[0]}")
    if errors:
        report_left_out(len(errors), "prompts", errors[0], reader="policy.base")
    return examples


def _responses(settings: PolicyStage, prepared: Path) -> list[tuple[Prompt, str]]:
    most, shortcut = settings.sft_examples, settings.demonstrated_shortcut
    if shortcut is not None:
        held_out = {
            str(pair.prompt)
            for name in ("validation", "test")
            if (prepared / f"{name}.parquet").is_file()
            for pair in read_pairs(prepared / f"{name}.parquet")
        }
        return list(demonstrations(shortcut, most, seed=settings.seed, without=held_out))
    pairs = with_text_answers(read_pairs(prepared / "train.parquet"), "learnt as text")
    rows = dict.fromkeys((pair.prompt, side) for pair in pairs for side in (pair.chosen, pair.rejected))
    return list(rows)[:most]
