"""How much of an experiment's error over prompts its control variates explain: what is known of a prompt beforehand.

    rm-opt experiment ablation --size gold --summary ablation.json
    python benchmarks/control_variates.py ablation.json

For each claim about a difference of accuracies, the share of the variance over prompts (of the difference, averaged
over seeds) that a linear regression on the covariates explains; and the same of the arm alone. Covariates: the ceiling
that label noise leaves (the mean of |p - 1/2|), how well the longer answer does, and what an untrained model of the
same kind prefers. The square root of what is left is how much narrower intervals could be, were the covariates' means
over all prompts known; on data that are read they are not.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.config.pipeline import PipelineConfig
from rmcore.data.table import read_pairs
from rmcore.ensembles.score import score_pairs_table
from rmcore.models.reward_model import BradleyTerryRM

SCORED = "eval/test_expected_accuracy"


def scores(rewards: pd.DataFrame) -> pd.Series:
    """Expected accuracy of each prompt's pairs."""
    margin = np.sign(rewards["reward_chosen"] - rewards["reward_rejected"])
    p = rewards["chosen_probability"].astype(float)
    return (0.5 + margin * (p - 0.5)).groupby(rewards["prompt_id"]).mean()


def of_arm(results: dict[str, Any], arm: str) -> pd.Series:
    """The same, averaged over the seeds of an arm."""
    found = []
    for cell in results["cells"]:
        if cell["arm"] == arm and "evaluate" in cell.get("paths", {}):
            rewards = pd.read_parquet(Path(cell["paths"]["evaluate"]) / "rewards.parquet")
            found.append(scores(rewards[rewards["split"] == "test"]))
    return pd.concat(found, axis=1).mean(axis=1)


def covariates(results: dict[str, Any]) -> pd.DataFrame:
    """What is known of each prompt before anything is trained: ceiling, longer, untrained."""
    cell = next(one for one in results["cells"] if "evaluate" in one.get("paths", {}))
    record = json.loads((Path(cell["paths"]["train"]) / "MANIFEST.json").read_text())
    settings = record["inputs"]["config"]
    pairs = read_pairs(Path(cell["paths"]["prepare"]) / "test.parquet")
    model = PipelineConfig.model_validate({"model": settings["model"] | {"name": "tiny"}}).model
    untrained, _ = score_pairs_table(BradleyTerryRM.new(model, seed=12345, device="cpu"), pairs)
    rewards = pd.read_parquet(Path(cell["paths"]["evaluate"]) / "rewards.parquet")
    rewards = rewards[rewards["split"] == "test"]
    p = rewards["chosen_probability"].astype(float) - 0.5
    longer = 0.5 + np.sign(rewards["chosen_chars"] - rewards["rejected_chars"]) * p
    by_prompt = pd.DataFrame({"ceiling": p.abs(), "longer": longer}).groupby(rewards["prompt_id"]).mean()
    return by_prompt.assign(untrained=scores(untrained))


def explained(y: pd.Series, x: pd.DataFrame) -> float:
    """R squared of the regression, less what as many columns of noise would give."""
    design = np.column_stack([np.ones(len(y)), x.loc[y.index].to_numpy()])
    coefficients, *_ = np.linalg.lstsq(design, y.to_numpy(), rcond=None)
    left = float(((y.to_numpy() - design @ coefficients) ** 2).sum()) / (len(y) - design.shape[1])
    return 1 - left / float(y.var())


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())["results"]
    known = covariates(results)
    print("| of what | sd over prompts | ceiling | longer | untrained | all three |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    claims = [one for one in results["hypotheses"] if one["metric"] == SCORED]
    wanted = [one for one in claims if one["comparison"] == "difference"]
    rows = {f"{one['arm']} - {one['versus']}": (one["arm"], one["versus"]) for one in wanted}
    rows |= {arm: (arm, None) for arm in dict.fromkeys(one["arm"] for one in wanted)}
    for name, (arm, versus) in rows.items():
        y = of_arm(results, arm) - (0.0 if versus is None else of_arm(results, versus))
        shares = [explained(y, known[columns]) for columns in ([name] for name in known)] + [explained(y, known)]
        print(f"| {name} | {y.std():.3f} | " + " | ".join(f"{100 * share:.1f} %" for share in shares) + " |")


if __name__ == "__main__":
    main()
