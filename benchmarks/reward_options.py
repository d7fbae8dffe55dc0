"""Which reward ends better? A length-controlled reward and the plain one by what gold gains at equal KL.

    python benchmarks/reward_options.py --preset rlhf --seeds 3 --out runs/options
    python benchmarks/reward_options.py --preset rlhf-flawed --seeds 3 --out runs/options-flawed

One policy and one reward model a preset, GRPO with each reward, without a watch and with little of a KL penalty, so
that every training passes the distances that are asked about. Gold there is interpolated along each training in the
root of its nats, on the same held-out prompts for every option and seed; a difference is one a prompt and seed, and its
interval is for new seeds and prompts. What is there already in `--out` is not run again.
"""

import argparse
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rlhf_endings import interval, places_of

from rmcore.policy.grpo.rlhf_record import value_over_seeds

NATS = (1.0, 2.0)
PLAIN = "as it is"


def options(penalty: float, steps: int) -> dict[str, tuple[str, ...]]:
    """Settings of each reward by its name; where length pays nothing a policy moves half as fast."""
    return {PLAIN: (), "length-controlled": (f"rlhf.length_penalty={penalty:.4g}", f"rlhf.steps={2 * steps}")}


def trained(given: argparse.Namespace, number: int, settings: tuple[str, ...]) -> dict[str, Any]:
    """Results of one option's trainings; run now, unless they are there."""
    file = given.out / f"{number}.json"
    if not file.is_file():
        asked = [
            "rlhf.watch=null",
            "rlhf.kl_target=null",
            f"rlhf.kl_beta={given.kl_beta}",
            f"rlhf.steps={given.steps}",
            "rlhf.measure_every=3",
            "rlhf.num_prompts=60",
            *settings,
        ]
        command = ["rm-opt", "rlhf", "--preset", given.preset, "--seeds", str(given.seeds), "--summary", str(file)]
        subprocess.run([*command, *(part for one in asked for part in ("--set", one))], check=True)
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["results"]
    return results


def length_slope(results: Mapping[str, Any]) -> float:
    """What a token adds to the reward within prompts, over the start policy's samples: what the control takes off."""
    table = pd.read_parquet(places_of(results)["overoptimization"] / "rewards.parquet")
    apart = table[["reward", "num_tokens"]] - table.groupby("prompt_id")[["reward", "num_tokens"]].transform("mean")
    tokens = apart["num_tokens"].to_numpy(dtype=np.float64)
    return float(tokens @ apart["reward"].to_numpy(dtype=np.float64) / (tokens @ tokens))


def at_distance(results: Mapping[str, Any], nats: float) -> pd.DataFrame | None:
    """Gold and length at a distance, a row a seed and prompt; None where a training did not get there."""
    progress = pd.read_parquet(places_of(results)["grpo"] / "progress.parquet")
    found = []
    for seed, rows in progress.groupby("seed"):
        roots = np.sqrt(rows.groupby("step")["kl"].mean().clip(lower=0.0))
        beyond = np.flatnonzero(roots.to_numpy() >= nats**0.5)
        if not len(beyond):
            return None
        after = int(beyond[0])
        low, high = (float(roots.iloc[one]) for one in (after - 1, after))
        share = (nats**0.5 - low) / (high - low)
        sides = [rows[rows["step"] == roots.index[one]].set_index("prompt") for one in (after - 1, after)]
        joined = (1 - share) * sides[0][["gold", "num_tokens"]] + share * sides[1][["gold", "num_tokens"]]
        found.append(joined.reset_index().assign(seed=seed))
    return pd.concat(found)


def shown(value: Mapping[str, Any] | None) -> str:
    if value is None or value["ci_low"] is None:
        return "-"
    return interval(value)


def main() -> None:
    """Print one row a reward and distance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="rlhf", choices=("rlhf", "rlhf-flawed"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kl-beta", type=float, default=0.05)
    parser.add_argument("--out", type=Path, required=True, help="folder for each option's results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    plain = trained(given, 0, ())
    penalty = length_slope(plain)
    print(f"{given.preset}: within prompts a token adds {penalty:.4f} to the reward\n")
    if penalty <= 0:
        print("longer answers are not rewarded, so there is nothing to control\n")
    print("| reward | nats | gold gain, sd | less that of the reward as it is | tokens | steps to get there |")
    print("| --- | ---: | --- | --- | ---: | ---: |")
    for number, (name, settings) in enumerate(options(max(penalty, 0.0), given.steps).items()):
        results = plain if name == PLAIN else trained(given, number, settings)
        for nats in NATS:
            rows, beside = at_distance(results, nats), at_distance(plain, nats)
            if rows is None:
                print(f"| {name} | {nats:g} | not reached | | | |", flush=True)
                continue
            less = None
            if beside is not None and name != PLAIN:
                both = rows.merge(beside, on=["seed", "prompt"], suffixes=("", "_plain"))
                less = value_over_seeds(both.assign(less=both["gold"] - both["gold_plain"]), "less", 2000, 0)
            points = results["rlhf"]["curve"]
            steps = next(point["step"] for point in points if point["kl"]["value"] >= nats)
            gold = value_over_seeds(rows, "gold", 2000, 0)
            print(
                f"| {name} | {nats:g} | {shown(gold)} | {shown(less)} | {rows['num_tokens'].mean():.0f} | {steps} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
