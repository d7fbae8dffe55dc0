"""How fast preference pairs become token ids: `Renderer.tokenize_pairs` here, `RewardTrainer._prepare_dataset` in TRL.

    PYTHONPATH=<where TRL is> python benchmarks/tokenization.py --data $RM_OPT_DATA

Every tokenizer with every file; the sides take turns in one process and the next repeat goes through them backwards.
TRL's time is that of its own method alone on a trainer that is already there: not the construction of the trainer, not
that of the data set, which is in memory, so that nothing can be answered from a cache on disk. It gets the pairs as
`prompt`, `chosen`, `rejected` of messages where the tokenizer has a chat template, else as the texts that the plain
format renders, ready made, which is in its favour. Progress bars are off. Here the time is from pairs to lists of ids.

    threads      fast tokenizers work on a batch in threads, as many as there are cores unless TOKENIZERS_PARALLELISM is
                 false; TRL hands them one text at a time, so to it that makes no difference
    processes    TRL's dataset_num_proc: one by default
    limit        pairs with a side over --max-seq-len are dropped by TRL; here the side is cut
    CPU          seconds of all threads and processes, which say more than the clock where other programs run too
    ids          compared on the pairs that neither side cut or dropped. For a tokenizer without EOS TRL has to be told
                 of one (SEP) and adds it as text before the tokenizer adds its own: one token more a side

Medians over the repeats; ratios are against TRL with its default of one process.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from rmcore.data.pair import PreferencePair, dialogue_records, prompt_text
from rmcore.data.readers.sources import load_pairs
from rmcore.data.rendering import Renderer, TokenizedPair, choose_rendering
from rmcore.data.tokenizers import ensure_pad_token
from rmcore.models.loading import quiet_libraries, resolve_model
from rmcore.models.tiny import build_tiny

FILES = {"HH": "hh_harmless_base_test.jsonl.gz", "AlpacaEval": "alpacaeval_train.parquet"}
TOKENIZERS = ("tiny", "minilm")
ONE_THREAD, TRL_DEFAULT = "rm-opt, 1 thread", "TRL, 1 process"


@dataclass
class Timing:
    """What one side took, a repeat at a time."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float]:
        """Seconds by the clock and seconds of CPU."""
        return float(np.median(self.wall)), float(np.median(self.cpu))


def trl_rows(pairs: Sequence[PreferencePair], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The pairs in TRL's layout: messages for a chat template, else the texts of the plain format."""
    if tokenizer.chat_template is None:
        return [
            {
                "prompt": f"Prompt: {prompt_text(pair.prompt)}\n\nResponse: ",
                "chosen": pair.chosen,
                "rejected": pair.rejected,
            }
            for pair in pairs
        ]
    return [
        {
            "prompt": dialogue_records(pair.prompt),
            "chosen": [{"role": "assistant", "content": pair.chosen}],
            "rejected": [{"role": "assistant", "content": pair.rejected}],
        }
        for pair in pairs
    ]


def trl_preparation(
    tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], limit: int, folder: Path
) -> Callable[[int | None], Any]:
    """A function of the number of processes that runs TRL's own preparation of the rows."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    arguments = RewardConfig(output_dir=str(folder / "trl"), max_length=limit, use_cpu=True, report_to=[])
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(build_tiny(folder / "model")),
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"chosen_ids": [1, 2], "rejected_ids": [1, 3]}]),
    )
    dataset = Dataset.from_list(rows)
    assert not dataset.cache_files

    def prepare(processes: int | None) -> Any:
        arguments.dataset_num_proc = processes
        return trainer._prepare_dataset(dataset, tokenizer, arguments, "train")

    return prepare


def load_tokenizers(name: str, folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
    """The tokenizer for here and another one for TRL, which cannot do without an EOS."""
    source = build_tiny(folder / "tiny") if name == "tiny" else resolve_model(name)
    here, there = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    ensure_pad_token(here)
    if there.eos_token is None:
        there.eos_token = there.sep_token
    return here, there


def measure(sides: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, Timing], dict[str, Any]]:
    """Seconds of every side in turns, and what each returned last."""
    timings: dict[str, Timing] = {name: Timing() for name in sides}
    results: dict[str, Any] = {}
    for repeat in range(repeats):
        for name in list(sides) if repeat % 2 == 0 else list(sides)[::-1]:
            os.environ["TOKENIZERS_PARALLELISM"] = "false" if name == ONE_THREAD else "true"
            wall, cpu = time.perf_counter(), _cpu_seconds()
            results[name] = sides[name]()
            timings[name].wall.append(time.perf_counter() - wall)
            timings[name].cpu.append(_cpu_seconds() - cpu)
    return timings, results


def _cpu_seconds() -> float:
    """Of this process and of those it started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def compare_ids(ours: Sequence[TokenizedPair], theirs: Any) -> str:
    """Whether the ids agree on the pairs that neither side cut or dropped, and where not, in what."""
    whole = [pair for pair in ours if not any(pair.truncation.values())]
    mine = [(pair.chosen.ids, pair.rejected.ids) for pair in whole]
    trl = list(zip(theirs["chosen_ids"], theirs["rejected_ids"], strict=True))
    kept = f"{len(mine):,} pairs within the limit here, {len(trl):,} in TRL"
    if mine == trl:
        return f"{kept}, ids equal"
    without_end = {tuple(map(tuple, pair)) for pair in mine}
    same = sum((tuple(chosen[:-1]), tuple(rejected[:-1])) in without_end for chosen, rejected in trl)
    counts = [sum(len(ids) for pair in pairs for ids in pair) for pairs in (mine, trl)]
    return f"{kept}, of which {same:,} equal but for one more closing token ({counts[0]:,} and {counts[1]:,} tokens)"


def run(name: str, file: str, pairs: Sequence[PreferencePair], given: argparse.Namespace) -> str:
    """Measure one tokenizer on one file and describe it."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = load_tokenizers(name, Path(folder))
        limit = given.max_seq_len
        renderer = Renderer(here, choose_rendering(here, use_chat_template=True, max_seq_len=limit))
        prepare = trl_preparation(there, trl_rows(pairs, there), limit, Path(folder))
        cores = len(os.sched_getaffinity(0))
        sides: dict[str, Callable[[], Any]] = {
            ONE_THREAD: lambda: renderer.tokenize_pairs(pairs),
            f"rm-opt, {cores} threads": lambda: renderer.tokenize_pairs(pairs),
            TRL_DEFAULT: lambda: prepare(None),
            f"TRL, {cores} processes": lambda: prepare(cores),
        }
        timings, results = measure(sides, given.repeats)
    tokenized = [side for pair in results[ONE_THREAD] for side in (pair.chosen, pair.rejected)]
    num_tokens = sum(len(side.ids) + side.num_cut for side in tokenized)
    wall_base, cpu_base = timings[TRL_DEFAULT].medians()
    lines = [
        f"\n{file}, {name} ({renderer.rendering.format} format): {len(pairs):,} pairs, {num_tokens:,} tokens; limit "
        f"{limit} tokens a side: " + compare_ids(results[ONE_THREAD], results[TRL_DEFAULT]),
        "\n| | s | min-max | CPU s | pairs/s | tokens/s | x TRL | x TRL by CPU |\n| --- |" + " ---: |" * 7,
    ]
    for side, timing in timings.items():
        wall, cpu = timing.medians()
        lines.append(
            f"| {side} | {wall:.2f} | {min(timing.wall):.2f}-{max(timing.wall):.2f} | {cpu:.2f} "
            f"| {len(pairs) / wall:,.0f} | {num_tokens / wall:,.0f} | {wall_base / wall:.2f} | {cpu_base / cpu:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("RM_OPT_DATA", ".")), help="folder of the files"
    )
    parser.add_argument("--pairs", type=int, help="at most so many of each file; all by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-seq-len", type=int, default=512)
    given = parser.parse_args()
    if find_spec("trl") is None:
        parser.error("TRL is not installed here: pip install trl, or name its folder in PYTHONPATH")
    from datasets import disable_caching, disable_progress_bars

    disable_caching()
    disable_progress_bars()
    quiet_libraries()
    for name in TOKENIZERS:
        for file, path in FILES.items():
            pairs = load_pairs(str(given.data / path)).pairs[: given.pairs]
            print(run(name, file, pairs, given), flush=True)


if __name__ == "__main__":
    main()
