"""Is the verdict of the third rung right? Best-of-64 by reward models that were judged, tried on fresh prompts.

    python benchmarks/verdict_vs_truth.py --out demo --preset demo --seeds 10
    python benchmarks/verdict_vs_truth.py --out labels --preset rlhf --pairs 300 1000 3000 10000 --bias 0 0.5 --seeds 2

Each reward model is one of the gold world, trained as the preset says, on about so many labelled pairs (left out: the
preset's own number), of which annotators named the longer answer in a share `--bias`. It is judged by readiness v2 on
samples of the gold world's writer. The truth is what best-of-n by it gains on 200 prompts that nothing else has seen,
64 samples each. A model is worth optimising against where best-of-64 gains what readiness asks for (readiness.min_gain)
and has not fallen by as much from its highest point. Stages are cached under $RM_OPT_HOME and measurements in --out: a
second call continues, and judges them by the conditions of the day. Writes `rows.json` and `curve.png`, and prints the
table.
"""

import argparse
import json
import random
from collections import Counter
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.presets import PRESETS
from rmcore.config.model import FROM_POLICY
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.config.readiness import ReadinessConfig
from rmcore.core.files import write_json
from rmcore.core.store import ArtifactRef, Store
from rmcore.data.gold.prompts import draw_prompt
from rmcore.data.gold.world import gold_reward, written_responses
from rmcore.data.table import read_pairs
from rmcore.evaluation.uncertainty import ends
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.overoptimization import overoptimization
from rmcore.policy.readiness.readiness_v2 import judge_v2
from rmcore.policy.readiness.verdict import PASSED
from rmcore.reporting.figures.style import BLUE, GREEN, MUTED, ORANGE, dress, headline, legend, new_figure, save
from rmcore.stages.interface import policy_place
from rmcore.stages.registry import pipeline_stages, stage_call
from rmcore.stages.requirements import required_policy
from tasks.execution import execute
from tasks.home import configure_environment, home

FRESH_PROMPTS, SAMPLES = 200, 64
PLAN = {"planned_optimizer": "best_of_n", "planned_kl": 3.0}
"""What the verdict is about, and what is tried: best-of-64 moves by 3.2 nats."""
HELD_OUT = 300
"""Prompts that are kept for the labelled checks and for readiness, whatever the number of training pairs."""


def variant(base: PipelineConfig, start: str, *, seed: int, pairs: int | None, bias: float) -> PipelineConfig:
    """The preset with another number of labelled pairs and other annotators; its policy is the gold world's writer."""
    gold = base.data.gold.model_copy(update={"length_bias": bias})
    data = base.data.model_copy(update={"gold": gold})
    if pairs is not None:
        kept = round(pairs / gold.pairs_per_prompt / (1 - base.data.validation_fraction))  # for training, validation
        gold = gold.model_copy(update={"num_prompts": kept + HELD_OUT})
        data = data.model_copy(update={"gold": gold, "test_fraction": HELD_OUT / (kept + HELD_OUT)})
    return base.model_copy(
        update={
            "seed": seed,
            "data": data,
            "model": base.model.model_copy(update={"name": start}),
            "policy": PolicyConfig(name="world"),
            "readiness": base.readiness.model_copy(update=PLAN),
            "rlhf": None,
        }
    )


def run(store: Store, name: str, config: PipelineConfig, refs: dict[str, ArtifactRef]) -> ArtifactRef:
    return execute(store, stage_call(name, config, refs), lambda path: nullcontext(), lambda: None)[0]


def row_of(store: Store, config: PipelineConfig) -> dict:
    """One reward model: its verdict, and the truth."""
    refs: dict[str, ArtifactRef] = {}
    for name in pipeline_stages(config):
        refs[name] = run(store, name, config, refs)
    judged = json.loads((Path(refs["readiness_v2"].path) / "readiness.json").read_text())
    prepared = Path(refs["prepare"].path)
    splits = {name: read_pairs(prepared / f"{name}.parquet") for name in ("train", "validation", "test")}
    rm = BradleyTerryRM.from_pretrained(Path(refs["train"].path) / "best", device=config.device)
    curve = truth(config, rm, {str(pair.prompt) for pairs in splits.values() for pair in pairs})
    parts = judged["readiness"]["parts"]
    return {
        "seed": config.seed,
        "pairs": len(splits["train"]),
        "bias": config.data.gold.length_bias,
        "parts": parts,
        "accuracy": parts["pairwise_accuracy"]["value"],
        "on_policy_accuracy": parts["on_policy_accuracy"]["value"],
        "estimated": parts["planned_gain"],
        "gain": curve["points"][-1]["gold"],
        "best_n": int(curve["points"][curve["best"]]["setting"]),
        "fall": curve["fall"],
    }


def judged_row(row: dict, config: ReadinessConfig) -> dict:
    """The measurements of a row with what they mean under a plan."""
    judged = judge_v2(row["parts"], config, "the gold world")
    return row | {
        "verdict": judged["verdict"]["status"],
        "failed": [check["name"] for check in judged["gate"] if not check["passed"]],
        "is_worth_it": row["gain"]["value"] >= config.min_gain and row["fall"]["value"] > -config.min_gain,
    }


def truth(config: PipelineConfig, rm: BradleyTerryRM, known: set[str]) -> dict:
    """The curve of best-of-n on fresh prompts."""
    rng = random.Random(f"verdict vs truth {config.seed}")  # noqa: S311 - data, not cryptography
    fresh: dict[str, None] = {}
    while len(fresh) < FRESH_PROMPTS:
        prompt = draw_prompt(rng, ood=False)
        if prompt not in known:
            fresh[prompt] = None
    rewards, gold = [], []
    for prompt in fresh:
        responses = written_responses(prompt, SAMPLES, config.data.gold.shortcut, seed=config.seed + 1)
        rewards.append(np.asarray(rm.score([prompt] * SAMPLES, responses), dtype=np.float64))
        gold.append(np.array([gold_reward(prompt, response) for response in responses]))
    found = overoptimization(
        rewards,
        gold,
        method="best_of_n",
        max_n=SAMPLES,
        planned_kl=PLAN["planned_kl"],
        num_resamples=1000,
        seed=config.seed,
    )
    return found.to_dict()


def table(rows: list[dict]) -> str:
    lines = [
        "| pairs | biased labels | seed | accuracy | on-policy | verdict | gold gain at the plan, estimated | "
        "of best-of-64 on fresh prompts | best n there | fall since | verdict is |",
        "| ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    counts: Counter[tuple[bool, bool]] = Counter()
    for row in rows:
        is_ready = row["verdict"] in PASSED
        counts[is_ready, row["is_worth_it"]] += 1
        estimated, gain = (
            f"{one['value']:+.2f} ({ends(one)[0]:+.2f} to {ends(one)[1]:+.2f})"
            for one in (row["estimated"], row["gain"])
        )
        lines.append(
            f"| {row['pairs']} | {row['bias']:.0%} | {row['seed']} | {row['accuracy']:.3f} | "
            f"{row['on_policy_accuracy']:.3f} | {row['verdict']} | {estimated} | {gain} | {row['best_n']} | "
            f"{row['fall']['value']:+.2f} | {'right' if is_ready == row['is_worth_it'] else 'WRONG'} |"
        )
    right = counts[True, True] + counts[False, False]
    lines.append(
        f"\nThe verdict was right for {right} of {len(rows)}: {counts[True, True]} ready and worth it, "
        f"{counts[False, False]} not ready and not worth it; {counts[True, False]} ready and not worth it, "
        f"{counts[False, True]} not ready although worth it."
    )
    return "\n".join(lines)


def figure_of(rows: list[dict], min_gain: float) -> Figure:
    """Gain of best-of-64 on fresh prompts against the number of labelled pairs; filled where the verdict was ready."""
    figure = new_figure(7.2, 4.4)
    ax = figure.subplots()
    dress(
        ax,
        title=f"filled: verdict ready · 95 % intervals over {FRESH_PROMPTS} fresh prompts · lines: means of seeds",
        x="labelled pairs that the reward model was trained on",
        y="gold gain of best-of-64 (sd within prompts)",
    )
    for bias, colour in zip(sorted({row["bias"] for row in rows}), (BLUE, ORANGE, GREEN), strict=False):
        own = [row for row in rows if row["bias"] == bias]
        asked = dict.fromkeys(row["asked"] for row in own)
        alike = [[row for row in own if row["asked"] == number] for number in asked]
        sizes = [np.mean([row["pairs"] for row in some]) for some in alike]
        means = [np.mean([row["gain"]["value"] for row in some]) for some in alike]
        label = "honest annotators" if bias == 0 else f"{bias:.0%} of labels name the longer answer"
        ax.plot(sizes, means, color=colour, linewidth=1.2, label=label)
        for row in own:
            gain = row["gain"]
            low, high = ends(gain)
            ax.errorbar(
                row["pairs"],
                gain["value"],
                yerr=[[gain["value"] - low], [high - gain["value"]]],
                fmt="o",
                color=colour,
                markerfacecolor=colour if row["verdict"] in PASSED else "white",
                markersize=7,
                capsize=2,
            )
    ax.axhline(min_gain, color=MUTED, linewidth=1, linestyle="--", label="asked for")
    ax.axhline(0, color=MUTED, linewidth=0.8)
    ax.set_xscale("log")
    legend(ax, loc="upper left")
    headline(figure, "What labels buy, and whose")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the rows, the table and the figure")
    parser.add_argument("--preset", default="demo", help="how the reward models are trained and judged")
    parser.add_argument("--seeds", type=int, default=1, help="reward models of each kind")
    parser.add_argument("--pairs", type=int, nargs="+", help="labelled pairs they are trained on")
    parser.add_argument("--bias", type=float, nargs="+", default=[0.0], help="shares of labels that name the longer")
    options = parser.parse_args()
    configure_environment()
    store, base = Store(home() / "store"), PRESETS[options.preset]
    start = base.model.name
    if (
        start == FROM_POLICY
    ):  # the writer has no weights: they are those of the policy that was fine-tuned on its answers
        refs = {"prepare": run(store, "prepare", base, {})}
        start = policy_place(required_policy(base).name, Path(run(store, "policy", base, refs).path))
    options.out.mkdir(parents=True, exist_ok=True)
    rows, plan = [], base.readiness.model_copy(update=PLAN)
    for pairs, bias, seed in product(options.pairs or [None], options.bias, range(options.seeds)):
        done = options.out / f"row_{pairs}_{bias:g}_{seed}.json"
        if not done.is_file():
            write_json(done, row_of(store, variant(base, start, seed=seed, pairs=pairs, bias=bias)))
        rows.append(judged_row(json.loads(done.read_text()), plan) | {"asked": pairs})
        print(json.dumps(rows[-1]), flush=True)
    write_json(options.out / "rows.json", rows)
    save(figure_of(rows, base.readiness.min_gain), options.out / "curve.png")
    print(table(rows))


if __name__ == "__main__":
    main()
