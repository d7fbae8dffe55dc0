"""Two endings of RLHF in one picture: what readiness said before, and what the gold reward did then.

    rm-opt rlhf --seeds 3 --summary ready.json
    rm-opt rlhf --preset rlhf-flawed --seeds 3 --summary flawed.json
    python benchmarks/rlhf_endings.py ready.json flawed.json --out docs/endings.png

Reads what the two commands wrote, draws proxy and gold reward by step, and prints the table of the seeds. With
`--fresh 200` it also lets the start policy and the trained one (of the first seed) answer 200 prompts that nothing has
seen, and says what the gold reward makes of it.
"""

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from rmcore.data.gold.prompts import draw_prompt
from rmcore.data.gold.world import gold_reward
from rmcore.data.table import read_pairs
from rmcore.evaluation.uncertainty import cluster_bootstrap, percentile_interval
from rmcore.policy.grpo.policy_meter import draw
from rmcore.policy.policy import Policy
from rmcore.policy.policy_weights import load_weights
from rmcore.policy.readiness.verdict import PASSED
from rmcore.policy.sampling.generate_sampler import whole_distribution
from rmcore.reporting.figures.style import BLUE, MUTED, ORANGE, dress, headline, legend, new_figure, save


def judged(results: Mapping[str, Any]) -> Mapping[str, Any]:
    """What readiness v2 said before the policy was trained."""
    return results["policy"]["readiness"]


SAMPLES = 8
"""Of each fresh prompt and policy."""


def interval(value: Mapping[str, Any]) -> str:
    return f"{value['value']:+.2f} ({value['ci_low']:+.2f} to {value['ci_high']:+.2f})"


def places_of(results: Mapping[str, Any]) -> dict[str, Path]:
    """Folder of each stage's artifact."""
    return {stage["name"]: Path(stage["path"]) for stage in results["stages"]}


def panel(ax: Axes, results: Mapping[str, Any]) -> None:
    """Proxy and gold of one run by step: means with 95 % intervals, and each seed as a faint line."""
    found, trained = judged(results), results["rlhf"]
    is_ready = found["verdict"]["status"] in PASSED
    plan = found["readiness"]["plan"]
    title = f"readiness before: {'ready' if is_ready else 'NOT READY'} for {plan['kl']:g} nats"
    dress(ax, title=title, x="optimizer step of the policy", y="gain over the start (sd within prompts)")
    for key, colour, marker in (("proxy", BLUE, "s"), ("gold", ORANGE, "o")):
        for seed in trained["seeds"]:
            points = seed["points"]
            steps = [point["step"] for point in points]
            ax.plot(steps, [point[key]["value"] for point in points], color=colour, alpha=0.25, linewidth=1)
        steps = [point["step"] for point in trained["curve"]]
        values = np.array([[point[key][end] for end in ("value", "ci_low", "ci_high")] for point in trained["curve"]])
        ax.fill_between(steps, values[:, 1], values[:, 2], color=colour, alpha=0.15, linewidth=0)
        ax.plot(steps, values[:, 0], color=colour, marker=marker, label=f"{key} reward")
    ax.axhline(0, color=MUTED, linewidth=0.8)
    last = trained["curve"][-1]
    gold = last["gold"]
    end = f"gold at the end {interval(gold)}, {last['kl']['value']:.1f} nats"
    ax.text(0.98, 0.03, end, transform=ax.transAxes, ha="right", fontsize=8)


def table(name: str, results: Mapping[str, Any]) -> str:
    """One row a seed."""
    found = judged(results)
    parts = found["readiness"]["parts"]
    accuracy, on_policy = (parts[one]["value"] for one in ("pairwise_accuracy", "on_policy_accuracy"))
    lines = [
        f"{name}: {found['verdict']['headline']}",
        f"  held-out accuracy {accuracy:.3f}, on-policy {on_policy:.3f}, gold gain of best-of-n at the plan "
        f"{interval(parts['planned_gain'])}",
        "",
        "| seed | KL at the end, nats | proxy | gold (95 % over prompts) | tokens |",
        "| ---: | ---: | ---: | --- | ---: |",
    ]
    for seed in results["rlhf"]["seeds"]:
        last = seed["points"][-1]
        gold = last["gold"]
        lines.append(
            f"| {seed['seed']} | {last['kl']['value']:.1f} | {last['proxy']['value']:+.2f} | {gold['value']:+.2f} "
            f"({gold['ci_low']:+.2f} to {gold['ci_high']:+.2f}) | {last['num_tokens']['value']:.0f} |"
        )
    gold = results["rlhf"]["curve"][-1]["gold"]
    lines.append(
        f"| all | | | {gold['value']:+.2f} ({gold['ci_low']:+.2f} to {gold['ci_high']:+.2f}), new seeds and prompts | |"
    )
    return "\n".join(lines)


def fresh_gain(results: Mapping[str, Any], num_prompts: int) -> str:
    """What the trained policy of the first seed gains over the start policy on prompts that nothing has seen."""
    places = places_of(results)
    files = [places["prepare"] / f"{name}.parquet" for name in ("train", "validation", "test", "ood")]
    known = {str(pair.prompt) for file in files if file.is_file() for pair in read_pairs(file)}
    rng, prompts = random.Random("endings"), dict[str, None]()  # noqa: S311 - data, not cryptography
    while len(prompts) < num_prompts:
        prompt = draw_prompt(rng, ood=False)
        if prompt not in known:
            prompts[prompt] = None
    settings = results["config"]["policy"]
    golds = []
    for place in (places["policy"] / "model", places["grpo"] / "model"):
        policy = Policy.load(str(place))
        ids = policy.fitting_ids(list(prompts), settings["max_new_tokens"])
        sampling = whole_distribution(policy, settings["temperature"], settings["max_new_tokens"])
        rows = [index for index in range(num_prompts) for _ in range(SAMPLES)]
        weights = load_weights(policy, torch.float32).eval()
        drawn = draw(weights, policy, [ids[index] for index in rows], sampling, seed=len(golds))
        texts = [policy.response_text(one) for one in drawn]
        judged = [
            gold_reward(prompt, text) for prompt, text in zip(np.repeat(list(prompts), SAMPLES), texts, strict=True)
        ]
        golds.append(np.array(judged).reshape(num_prompts, SAMPLES))
    start, trained = golds
    rise = trained.mean(axis=1) - start.mean(axis=1)
    squares = start.var(axis=1, ddof=1)
    found = cluster_bootstrap(
        lambda weights: {
            "gain": weights @ rise / weights.sum(axis=1) / np.sqrt(weights @ squares / weights.sum(axis=1))
        },
        num_prompts,
        num_resamples=2000,
        seed=0,
    )
    ends = percentile_interval(found.replicates["gain"], num_prompts)
    assert ends is not None
    gain = interval({"value": found.point["gain"], "ci_low": ends[0], "ci_high": ends[1]})
    return f"on {num_prompts} fresh prompts, {SAMPLES} samples each: gold {gain} sd"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summaries", type=Path, nargs=2, help="of the run that should gain, and of its flawed twin")
    parser.add_argument("--fresh", type=int, default=0, help="prompts that nothing has seen to try the policies on")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    options = parser.parse_args()
    runs = [json.loads(path.read_text())["results"] for path in options.summaries]
    figure = new_figure(10.5, 4.2)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, path, results in zip(axes, options.summaries, runs, strict=True):
        panel(ax, results)
        print(table(path.stem, results), end="\n\n")
        if options.fresh:
            print(f"{path.stem}, first seed, {fresh_gain(results, options.fresh)}", end="\n\n", flush=True)
    legend(axes[0], loc="upper left")
    headline(figure, "The verdict before, and what the gold reward did: GRPO against two reward models of one world")
    save(figure, options.out)


if __name__ == "__main__":
    main()
