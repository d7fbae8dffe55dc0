"""Rewards and embeddings of texts, rows a second: here, by a plain loop of transformers, by sentence-transformers.

    PYTHONPATH=<where sentence-transformers is> python benchmarks/scoring.py --data $RM_OPT_DATA

From texts to numbers, tokenization included. Every side has the same weights and the same texts, all of which fit into
--max-seq-len tokens; no text stands twice. Sides take turns, and the next repeat goes through them backwards.

    here                      `BradleyTerryRM.score`; for embeddings `features`, the input of the reward head
    transformers              rows in the order of the file, 32 a batch, padded to its longest, as in model cards
    sentence-transformers     `CrossEncoder.predict`, which sorts by length; for embeddings `SentenceTransformer.encode`
                              with mean pooling; its default of 32 a batch. A cross-encoder takes pairs, so it reads
                              prompt and answer with a separator, a few tokens less than the others' text

In bf16 the others get bf16 weights; here the backbone computes in bf16 and the head in float32. Medians over repeats;
rewards of the same text are compared with those of the plain loop in float32: largest difference over their standard
deviation.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rmcore.config.model import ModelConfig
from rmcore.core.hardware import cpu_multiplies_bf16
from rmcore.data.pair import prompt_text
from rmcore.data.readers.sources import load_pairs
from rmcore.ensembles.features import features
from rmcore.models.loading import quiet_libraries, resolve_model
from rmcore.models.reward_model import BradleyTerryRM

BATCH = 32
FILES = {"alpacaeval": "alpacaeval_test.parquet", "hh": "hh_harmless_base_test.jsonl.gz"}


def texts_of(rm: BradleyTerryRM, path: Path, number: int) -> tuple[list[tuple[Any, str]], list[str]]:
    """Different answers of the file that fit, as (prompt, answer) and as the text that a model reads."""
    sides: dict[str, tuple[Any, str]] = {}
    for pair in load_pairs(str(path)).pairs:
        for side in ((pair.prompt, pair.chosen), (pair.prompt, pair.rejected)):
            sides.setdefault(rm.renderer.render(*side), side)
        if len(sides) > 4 * number:
            break
    tokenized = rm.renderer.tokenize_sides(list(sides.values()))
    fit = [text for text, side in zip(sides, tokenized, strict=True) if side.num_cut == 0][:number]
    return [sides[text] for text in fit], fit


def plain_loop(model: Any, tokenizer: Any, texts: list[str], limit: int) -> np.ndarray:
    """The usual loop of a model card."""
    found = []
    for first in range(0, len(texts), BATCH):
        batch = tokenizer(
            texts[first : first + BATCH], padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        with torch.inference_mode():
            found.append(model(**batch).logits[:, 0].float().numpy())
    return np.concatenate(found)


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The classifier of a folder, as transformers loads it."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()


def reward_sides(
    rm: BradleyTerryRM, folder: Path, rows: list[tuple[Any, str]], texts: list[str], limit: int
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions that give the rewards of all rows."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [(prompt_text(prompt), answer) for prompt, answer in rows]
    sides: dict[str, Callable[[], np.ndarray]] = {}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, dtype in dtypes.items():
        sides[f"here, {name}"] = partial(_here, rm, rows, name)
        sides[f"transformers, {name}"] = partial(plain_loop, loaded(folder, dtype), tokenizer, texts, limit)
        if find_spec("sentence_transformers") is not None:
            from sentence_transformers import CrossEncoder

            encoder = CrossEncoder(str(folder), device="cpu", max_length=limit, model_kwargs={"dtype": dtype})
            sides[f"sentence-transformers, {name}"] = partial(_crossed, encoder, pairs)
    return sides


def _here(rm: BradleyTerryRM, rows: list[tuple[Any, str]], precision: Any) -> np.ndarray:
    return rm.score_sides(rm.renderer.tokenize_sides(rows), precision=precision)


def _crossed(encoder: Any, pairs: list[tuple[str, str]]) -> np.ndarray:
    found = encoder.predict(pairs, batch_size=BATCH, show_progress_bar=False, activation_fn=torch.nn.Identity())
    return np.asarray(found, dtype=np.float32).reshape(-1)


def embedding_sides(
    rm: BradleyTerryRM, rows: list[tuple[Any, str]], texts: list[str], limit: int
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions that give one vector a row: of the reward model here, of the encoder that it began with there."""
    sides: dict[str, Callable[[], np.ndarray]] = {"here, fp32": lambda: features(rm, rm.renderer.tokenize_sides(rows))}
    if find_spec("sentence_transformers") is not None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        whole = Transformer(resolve_model("minilm"), max_seq_length=limit)
        encoder = SentenceTransformer(modules=[whole, Pooling(whole.get_embedding_dimension())], device="cpu")
        sides["sentence-transformers, fp32"] = lambda: encoder.encode(texts, show_progress_bar=False)
    return sides


def in_turns(sides: dict[str, Callable[[], np.ndarray]], repeats: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of every side, and what it gave; one call each beforehand is not counted."""
    found = {name: side() for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides) if repeat % 2 == 0 else list(sides)[::-1]:
            start = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds, found


def told(title: str, num_rows: int, seconds: dict[str, list[float]], found: dict[str, Any], truth: str | None) -> None:
    """Print the table of one comparison."""
    here = {name.rpartition(", ")[2]: np.median(took) for name, took in seconds.items() if name.startswith("here")}
    print(f"\n{title}\n\n| side | rows/s, median (range) | here, times as many | largest difference, sd |")
    print("| --- | --- | ---: | ---: |")
    for name, took in seconds.items():
        rates = num_rows / np.array(took)
        ours = np.median(took) / here[name.rpartition(", ")[2]]
        same_text = truth is not None and not name.startswith("sentence")
        apart = "" if not same_text else f"{np.abs(found[name] - found[truth]).max() / found[truth].std():.1e}"
        shown = f"{np.median(rates):.1f} ({rates.min():.1f}–{rates.max():.1f})"
        print(f"| {name} | {shown} | {'' if name.startswith('here') else f'{ours:.2f}'} | {apart} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RM_OPT_DATA", "../shared/data")))
    parser.add_argument("--models", nargs="+", default=["minilm", "tiny"])
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-seq-len", type=int, default=512)
    args = parser.parse_args()
    quiet_libraries()
    units = "has" if cpu_multiplies_bf16() else "has no"
    print(f"{torch.get_num_threads()} threads; the machine {units} units for bf16")
    for name in args.models:
        rm = BradleyTerryRM.new(
            ModelConfig(name=name, max_seq_len=args.max_seq_len), seed=0, device=torch.device("cpu")
        )
        with tempfile.TemporaryDirectory() as given:
            folder = Path(given) / "model"
            rm.save(folder)
            for file in args.files:
                rows, texts = texts_of(rm, args.data / FILES[file], args.rows)
                tokens = sum(len(side.ids) for side in rm.renderer.tokenize_sides(rows))
                title = f"{name}, {len(rows)} rows of {file}, {tokens / len(rows):.0f} tokens each"
                seconds, found = in_turns(reward_sides(rm, folder, rows, texts, args.max_seq_len), args.repeats)
                told(f"rewards: {title}", len(rows), seconds, found, "transformers, fp32")
                if name == "minilm":
                    seconds, found = in_turns(embedding_sides(rm, rows, texts, args.max_seq_len), args.repeats)
                    told(f"embeddings: {title}", len(rows), seconds, found, None)


if __name__ == "__main__":
    main()
