"""Does what is known before say what GRPO gains? Twelve reward models of the study of readiness, six of each world.

    python benchmarks/readiness_vs_grpo.py --out readiness_vs_grpo            # after `rm-opt readiness validate`
    python benchmarks/readiness_vs_grpo.py --out readiness_vs_grpo --world claims     # six of them, in a second process

Reads the populations of the study, and takes in each world the backbones, with their own heads, in the middle of six
equal strata of the best-of-16 win rate: which ones is known before any is optimised against. Each is judged by
readiness v2 on the policy's samples and then optimised against by GRPO; the gold world says what that gained. Stages
are cached under $RM_OPT_HOME and rows in --out, so a second call continues with the next model. Writes `rows.json` and
prints the table.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from experiments.presets import PRESETS
from flows.policy import POPULATION
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.files import write_json
from rmcore.core.progress import silent
from rmcore.core.store import ArtifactRef, Store
from rmcore.data.table import read_pairs
from rmcore.policy.grpo.defects import BackboneRecipe, backbones
from rmcore.stages.interface import policy_place
from rmcore.stages.population import ROWS_FILE, train_backbone
from rmcore.stages.registry import stage_call
from rmcore.stages.requirements import required_policy, required_validation
from rmcore.stages.settings import TrainSettings
from tasks.checkpoints import given_checkpoint
from tasks.execution import execute
from tasks.home import configure_environment, home

JUDGED = ("evaluate", "landscape", "readiness", "overoptimization", "readiness_v2", "grpo")


def study(world: str, num_models: int, config: PipelineConfig, out: Path) -> list[dict]:
    """One row a reward model of one world."""
    store, refs = Store(home() / "store"), {}
    for name in POPULATION:
        refs[name] = run(store, name, config, refs)
    population = pd.read_parquet(Path(refs["population"].path) / ROWS_FILE)
    length = required_validation(config)
    recipes = {one.name: one for one in backbones(config.train.model_copy(update={"steps": length.steps}), world)}
    rows = []
    for name in stratified(population, num_models):
        done = out / f"row_{world}_{name}.json"
        if not done.is_file():
            recipe, checkpoint = recipes[name], out / world / name
            if not (checkpoint / "training.json").is_file():
                checkpoint.mkdir(parents=True, exist_ok=True)
                pairs = read_pairs(Path(refs["prepare"].path) / "train.parquet")
                policy = policy_place(required_policy(config).name, Path(refs["policy"].path))
                train_backbone(TrainSettings.of(config), length, recipe, pairs, policy, checkpoint, silent)
            own = refs | {"train": given_checkpoint(str(checkpoint / "best"), home() / "given")}
            for stage in JUDGED:
                own[stage] = run(store, stage, config, own)
            write_json(done, {"world": world} | row_of(recipe, config, own))
        rows.append(json.loads(done.read_text()))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def stratified(population: pd.DataFrame, num_models: int) -> list[str]:
    """Names of the backbones in the middle of equal strata of the win rate of their own heads."""
    own = population[population["head"] == "own"].sort_values("win_rate_16", kind="stable")
    return [str(stratum[len(stratum) // 2]) for stratum in np.array_split(own["backbone"].to_numpy(), num_models)]


def run(store: Store, name: str, config: PipelineConfig, refs: dict[str, ArtifactRef]) -> ArtifactRef:
    return execute(store, stage_call(name, config, refs), lambda path: nullcontext(), lambda: None)[0]


def row_of(recipe: BackboneRecipe, config: PipelineConfig, refs: dict[str, ArtifactRef]) -> dict:
    readiness = json.loads((Path(refs["readiness_v2"].path) / "readiness.json").read_text())
    trained = json.loads((Path(refs["grpo"].path) / "rlhf.json").read_text())
    curve = trained["curve"]
    kl, gold = ([point[name]["value"] for point in curve] for name in ("kl", "gold"))
    planned = config.readiness.planned_kl
    parts = readiness["readiness"]["parts"]
    return {
        "model": recipe.name,
        "defect": recipe.defect,
        "verdict": readiness["verdict"]["status"],
        "failed": [check["name"] for check in readiness["gate"] if not check["passed"]],
        "probability": readiness["readiness"]["probability"],
        "on_policy_accuracy": parts["on_policy_accuracy"]["value"],
        "win_rate_16": parts["win_rate_16"]["value"],
        "best_of_n_gain": parts["planned_gain"]["value"],
        "grpo_kl": kl[-1],
        "grpo_gain_at_plan": float(np.interp(planned, kl, gold)) if kl[-1] >= planned else None,
        "grpo_best": max(gold),
        "grpo_last": curve[-1]["gold"],
        "grpo_proxy_last": curve[-1]["proxy"]["value"],
        "stop": trained["early_stop"]["seeds"][0],
    }


def table(rows: list[dict], config: PipelineConfig) -> str:
    lines = [
        f"| reward model | verdict | P(gain) | on-policy accuracy | win rate, best of 16 | gold gain of best-of-n at "
        f"{config.readiness.planned_kl:g} nats | of GRPO there | of GRPO at the end (KL) |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        numbers = [row[name] for name in ("probability", "on_policy_accuracy", "win_rate_16", "best_of_n_gain")]
        at_plan = "not reached" if row["grpo_gain_at_plan"] is None else f"{row['grpo_gain_at_plan']:+.2f}"
        shown = " | ".join("-" if number is None else f"{number:.2f}" for number in numbers)
        last = row["grpo_last"]
        end = f"{last['value']:+.2f} ({last['ci_low']:+.2f} to {last['ci_high']:+.2f}; {row['grpo_kl']:.1f})"
        lines.append(f"| {row['world']}: {row['model']} | {row['verdict']} | {shown} | {at_plan} | {end} |")
    for name in ("on_policy_accuracy", "win_rate_16", "best_of_n_gain"):
        both = [(row[name], row["grpo_gain_at_plan"]) for row in rows if row["grpo_gain_at_plan"] is not None]
        if len(both) > 2:
            found = spearmanr(*zip(*both, strict=True))
            lines.append(f"\nSpearman of {name} with GRPO's gain at the plan: {found.statistic:.2f} (n = {len(both)})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and rows.json")
    parser.add_argument("--world", help="only this world of the study")
    parser.add_argument("--models", type=int, default=6, help="of each world")
    parser.add_argument("--steps", type=int, help="of GRPO; default: the preset's")
    parser.add_argument("--preset", default="validation", help="of the study whose populations are read")
    parser.add_argument("--seed", type=int, default=0, help="of that study")
    options = parser.parse_args()
    configure_environment()
    preset, rlhf = PRESETS[options.preset], PRESETS["rlhf"]
    assert preset.validation is not None
    assert rlhf.rlhf is not None
    changes = {"rewards": "local"} | ({} if options.steps is None else {"steps": options.steps})
    # Every stage of the study keeps its settings, so that it is there already; what it has not is the preset rlhf's.
    config = preset.model_copy(
        update={
            "seed": options.seed,
            "evaluate": rlhf.evaluate,
            "landscape": rlhf.landscape,
            "rlhf": rlhf.rlhf.model_copy(update=changes),
        }
    )
    rows = []
    for world in preset.validation.worlds if options.world is None else (options.world,):
        rows += study(world, options.models, config.in_world(world), options.out)
    name = "rows.json" if options.world is None else f"rows_{options.world}.json"
    (options.out / name).write_text(json.dumps(rows, indent=1))
    print(table(rows, config))


if __name__ == "__main__":
    main()
