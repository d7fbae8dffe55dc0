"""Are the effects of an answer's parts the true ones? In the gold world, where the worth of each sentence is known.

    python benchmarks/span_effects.py --seeds 5 --out cells                # train, measure, and print the tables
    python benchmarks/span_effects.py --seconds tiny minilm                 # seconds an answer, no more

`tiny` is trained in a world without a shortcut; in one with planted flattery, as `planted_shortcuts.py` plants it
(three pairs in ten, and marks in the others that decide nothing); and in one in which half of the labels name the
longer answer and answers are longer by sentences of filler. Answers of fresh prompts are taken apart by sentence.

Order: by answer the rank correlation (Spearman) of each effect with what the gold reward loses without the sentence,
and with the sentence's Shapley value in the gold reward over all subsets. Answers whose sentences are all worth the
same have no order and are left out; `random` is the same with drawn numbers.

Shortcuts: of answers with sentences of the shortcut and others beside them that the gold reward pays nothing for
either, the share in which the largest effect among those is above zero and a shortcut's, against the share that a
draw among them would have.

Means are over answers, intervals by bootstrap over prompts, each seed with prompts of its own; and over seeds, where a
t interval holds what differs from training to training. A finished cell is a JSON file in --out.
"""

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from planted_shortcuts import mark_pairs
from scipy.stats import spearmanr

from rmcore.config.data import GoldConfig, Shortcut
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.files import write_json
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.gold.world import BANKS, generate_pairs, gold_reward
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.evaluation.uncertainty import cluster_bootstrap, metric_value, t_interval
from rmcore.explain.effects import span_effects
from rmcore.explain.spans import Span, spans_of, text_of
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.reads import settled
from rmcore.stages.train import train_into

WORLDS = {
    "none": GoldConfig(num_prompts=1100, pairs_per_prompt=3, shortcut="none", temperature=0.25),
    "flattery": GoldConfig(num_prompts=400, pairs_per_prompt=3, shortcut="none"),
    "length": GoldConfig(num_prompts=400, pairs_per_prompt=3, shortcut="length", length_bias=0.5),
}
STEPS = {"none": 200, "flattery": 60, "length": 50}
SHORTCUTS: dict[str, Shortcut] = {"none": "none", "flattery": "flattery", "length": "length"}
"""Sentences that answers have more of, and that are looked for."""
NUM_ANSWERS = 150
"""Answers a seed, one a prompt."""
MOST = 8
"""Sentences of an answer: the true Shapley value needs the gold reward of each subset."""
EFFECTS = ("share", "removed", "random")


def train(world: str, seed: int, folder: Path) -> BradleyTerryRM:
    """Train from scratch; the last checkpoint."""
    steps = STEPS[world]
    config = PipelineConfig(
        seed=seed,
        device="cpu",
        model=ModelConfig(name="tiny", max_seq_len=256),
        train=TrainConfig(
            lr=1e-3, steps=steps, warmup_steps=10, pairs_per_step=16, eval_every=steps, token_budget=8192
        ),
    )
    pairs = generate_pairs(WORLDS[world], seed).pairs
    if world == "flattery":
        pairs = mark_pairs(pairs, seed, "flattery in other words")
    train_into(settled(config), pairs, [], folder, NullTracker(), silent)
    return BradleyTerryRM.from_pretrained(folder / "best", device="cpu")


def true_worth(prompt: str, answer: str, spans: Sequence[Span]) -> tuple[list[float], list[float]]:
    """What the gold reward loses without each sentence, and its Shapley value over all subsets, in logits."""
    count = len(spans)
    gold = {
        kept: gold_reward(prompt, text_of(answer, spans, kept))
        for size in range(count + 1)
        for kept in itertools.combinations(range(count), size)
    }
    everything = tuple(range(count))
    removed, shapley = [], []
    for own in everything:
        value = 0.0
        for kept, without in gold.items():
            if own not in kept:
                weight = math.factorial(len(kept)) * math.factorial(count - len(kept) - 1) / math.factorial(count)
                value += weight * (gold[tuple(sorted((*kept, own)))] - without)
        shapley.append(value)
        removed.append(gold[everything] - gold[everything[:own] + everything[own + 1 :]])
    return removed, shapley


def measure(rm: BradleyTerryRM, world: str, fresh: Sequence[PreferencePair], seed: int) -> list[dict[str, Any]]:
    """The effects of each sentence of NUM_ANSWERS answers of two to MOST sentences, beside the truth."""
    rng = random.Random(f"span effects {seed}")  # noqa: S311 - data
    sides: list[tuple[str, str]] = []
    for pair in {prompt_text(pair.prompt): pair for pair in fresh}.values():
        answer = rng.choice((pair.chosen, pair.rejected))
        if 2 <= len(spans_of(answer, "sentence", most=MOST + 1)) <= MOST:
            sides.append((prompt_text(pair.prompt), answer))
    sides = sides[:NUM_ANSWERS]
    records = []
    for (prompt, answer), effects in zip(sides, span_effects(rm, sides, "sentence"), strict=True):
        spans = [Span(one.start, one.end) for one in effects.spans]
        removed, shapley = true_worth(prompt, answer, spans)
        records.append(
            {
                "prompt": prompt,
                "removed in gold": removed,
                "Shapley in gold": shapley,
                "share": [one.share for one in effects.spans],
                "removed": [one.removed for one in effects.spans],
                "random": [rng.random() - 0.5 for _ in spans],
                "shortcut": [any(one in span.of(answer) for one in BANKS[SHORTCUTS[world]]) for span in spans],
                "difference": effects.total - effects.base,
                "interaction": effects.interaction,
            }
        )
    return records


def pays(rm: BradleyTerryRM, world: str, fresh: Sequence[PreferencePair]) -> float | None:
    """How much one more sentence of the shortcut raises rewards, in standard deviations between answers."""
    bank = BANKS[SHORTCUTS[world]]
    if not bank:
        return None
    prompts, answers = [pair.prompt for pair in fresh], [pair.chosen for pair in fresh]
    more = [f"{answer} {bank[at % len(bank)]}" for at, answer in enumerate(answers)]
    before = rm.score(prompts, answers)
    return float((rm.score(prompts, more) - before).mean() / before.std())


def cell(world: str, seed: int, out: Path) -> dict[str, Any]:
    """One training, measured; read where it is there."""
    place = out / f"{world}_{seed}.json"
    if place.is_file():
        return json.loads(place.read_text())
    started = time.perf_counter()
    with TemporaryDirectory() as folder:
        rm = train(world, seed, Path(folder))
        trained = time.perf_counter() - started
        drawn = GoldConfig(num_prompts=3 * NUM_ANSWERS // 2, pairs_per_prompt=1, shortcut=SHORTCUTS[world])
        fresh = generate_pairs(drawn, 10_000 + seed).pairs
        rewards = rm.score_pairs(fresh)
        gold = [
            gold_reward(prompt_text(p.prompt), p.chosen) - gold_reward(prompt_text(p.prompt), p.rejected) for p in fresh
        ]
        decided = np.flatnonzero(gold)
        right = np.sign(rewards[:, 0] - rewards[:, 1])[decided] == np.sign(gold)[decided]
        started = time.perf_counter()
        answers = measure(rm, world, fresh, seed)
    found = {
        "accuracy": float(right.mean()),
        "trained_s": trained,
        "measured_s": time.perf_counter() - started,
        "pays": pays(rm, world, fresh),
        "answers": answers,
    }
    write_json(place, found)
    print(f"{world} {seed}: accuracy {found['accuracy']:.3f}, {trained:.0f} s", file=sys.stderr, flush=True)
    return found


def order(answer: dict[str, Any], effect: str, truth: str) -> float | None:
    """Rank correlation of an effect with the truth in one answer; None where the truth has no order, or no effect."""
    if answer[effect] is None or np.ptp(answer[truth]) < 1e-9:
        return None
    if np.ptp(answer[effect]) == 0:
        return 0.0
    return float(spearmanr(answer[effect], np.round(answer[truth], 9)).statistic)


def on_top(answer: dict[str, Any], effect: str) -> tuple[float, float] | None:
    """Whether a shortcut's sentence is on top of those that are worth nothing, and how likely that is by chance."""
    if answer[effect] is None:
        return None
    nothing = [at for at, worth in enumerate(answer["removed in gold"]) if abs(worth) < 1e-9]
    marked = [at for at in nothing if answer["shortcut"][at]]
    if not 0 < len(marked) < len(nothing):
        return None
    top = max(nothing, key=lambda at: answer[effect][at])
    return float(answer[effect][top] > 0 and top in marked), len(marked) / len(nothing)


def top_share(answer: dict[str, Any], effect: str, *, less: bool) -> float | None:
    """Whether a shortcut's sentence is on top, less the chance of it where that is asked for."""
    found = on_top(answer, effect)
    return None if found is None else found[0] - less * found[1]


def over_answers(cells: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]) -> str:
    """Mean over the answers of all seeds with its interval over prompts, and the interval over seeds."""
    kept = [(seed, one, value(one)) for seed, found in enumerate(cells) for one in found["answers"]]
    values = np.array([number for *_, number in kept if number is not None])
    seeds = np.array([seed for seed, _, number in kept if number is not None])
    names = [f"{seed} {one['prompt']}" for seed, one, number in kept if number is not None]
    cluster = np.unique(names, return_inverse=True)[1]
    counts, sums = np.bincount(cluster), np.bincount(cluster, values)
    drawn = cluster_bootstrap(
        lambda weights: {"mean": weights @ sums / (weights @ counts)}, len(counts), num_resamples=2000, seed=0
    )
    mean = metric_value(drawn.point["mean"], drawn.replicates["mean"], num_prompts=len(counts), num_pairs=len(values))
    shown = f"{mean.value:.3f} [{mean.ci_low:.3f}, {mean.ci_high:.3f}]"
    spread = t_interval([float(values[seeds == seed].mean()) for seed in range(len(cells))])
    return f"{shown} | -" if spread.ci_low is None else f"{shown} | [{spread.ci_low:.3f}, {spread.ci_high:.3f}]"


def seconds(models: Sequence[str]) -> None:
    """Processor seconds an answer, one after the other, of a middling and of the longest answer of the gold world."""
    print("| model | answer, words | sentences | sentences, s | words, s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    pairs = generate_pairs(GoldConfig(num_prompts=60, shortcut="length", tail_share=1.0), 77).pairs
    by_words = sorted(pairs, key=lambda pair: len(pair.chosen.split()))
    for model in models:
        config = ModelConfig(name=model, max_seq_len=256)
        rm = BradleyTerryRM.new(config, seed=0, device=torch.device("cpu"))
        span_effects(rm, [(prompt_text(pairs[0].prompt), pairs[0].chosen)], "sentence")  # the trial of packing
        for pair in (by_words[len(by_words) // 2], by_words[-1]):
            side = (prompt_text(pair.prompt), pair.chosen)
            times = [time.process_time()]
            for unit in ("sentence", "word"):
                span_effects(rm, [side], unit)
                times.append(time.process_time())
            count = len(spans_of(pair.chosen, "sentence", most=64))
            shown = " | ".join(f"{after - before:.2f}" for before, after in itertools.pairwise(times))
            print(f"| {model} | {len(pair.chosen.split())} | {count} | {shown} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("span_cells"), help="finished cells")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--seconds", nargs="+", metavar="MODEL", help="tiny, minilm, or a checkpoint's folder")
    args = parser.parse_args()
    if args.seconds:
        seconds(args.seconds)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {world: [] for world in args.worlds}
    for seed, world in itertools.product(range(args.seeds), args.worlds):
        found[world].append(cell(world, seed, args.out))
    for world, cells in found.items():
        accuracies = ", ".join(f"{one['accuracy']:.3f}" for one in cells)
        leftover = np.mean([abs(a["interaction"]) for one in cells for a in one["answers"]])
        reach = np.mean([abs(a["difference"]) for one in cells for a in one["answers"]])
        error = max(abs(a["error"]) for one in cells for a in one["answers"])
        print(
            f"\n{world}: accuracy by the gold reward {accuracies}; mean |interaction| {leftover:.2f} of mean "
            f"|total - base| {reach:.2f} logits; largest error of integration {error:.3f}"
        )
        if cells[0].get("pays") is not None:
            shown = ", ".join(f"{one['pays']:+.2f}" for one in cells)
            print(f"one more sentence of the shortcut pays {shown} standard deviations between answers")
        print("| effect | truth | rank correlation | over seeds |\n| --- | --- | ---: | ---: |")
        for effect, truth in itertools.product(EFFECTS, ("removed in gold", "Shapley in gold")):
            print(f"| {effect} | {truth} | {over_answers(cells, partial(order, effect=effect, truth=truth))} |")
        if SHORTCUTS[world] == "none":
            continue
        tops = [on_top(one, "share") for made in cells for one in made["answers"]]
        chances = [one[1] for one in tops if one is not None]
        print(f"\n{len(chances)} answers; by chance {np.mean(chances):.3f}\n")
        print(
            "| effect | shortcut on top | over seeds | above chance | over seeds |\n| --- | ---: | ---: | ---: | ---: |"
        )
        for effect in EFFECTS:
            hit, above = (over_answers(cells, partial(top_share, effect=effect, less=less)) for less in (False, True))
            print(f"| {effect} | {hit} | {above} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
