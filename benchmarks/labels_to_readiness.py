"""From few labels to many: when may a policy be optimised against a reward model, and is the verdict right?.

    python benchmarks/labels_to_readiness.py --out labels_to_readiness

Reward models of the gold world, trained on more and more labelled pairs, and their twins whose annotators preferred the
longer answer in half of the pairs. Each is judged by readiness v2 on samples of the world's own writer, and what
longer answer in half of the pairs. Each is judged by readiness v2 on samples of the world's own writer; what best-of-64
by it really gains is taken on fresh prompts that nothing else has seen. Stages are cached under $RM_OPT_HOME,
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

from experiments.presets import PRESETS
from rmcore.config.pipeline import GoldConfig, PipelineConfig, PolicyConfig
from rmcore.core.store import ArtifactRef, Store
from rmcore.stages.registry import pipeline_stages, stage_call
from tasks.execution import execute
from tasks.home import configure_environment, home


def run(store: Store, config: PipelineConfig) -> dict[str, ArtifactRef]:
    refs: dict[str, ArtifactRef] = {}
    for name in pipeline_stages(config):
        refs[name] = execute(store, stage_call(name, config, refs), lambda path: nullcontext(), lambda: None)[0]
    return refs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, nargs="+")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    configure_environment()
    store = Store(home() / "store")
    base = PRESETS["policy"]
    for count in options.prompts:
        steps = max(100, int(count * 3 * 0.75 / 32))
        config = base.model_copy(
            update={
                "data": base.data.model_copy(update={"gold": GoldConfig(num_prompts=count)}),
                "policy": PolicyConfig(name="world"),
                "train": base.train.model_copy(update={"steps": steps, "eval_every": steps}),
                "landscape": base.landscape.model_copy(
                    update={"parts": ("normalized",), "num_pairs": 8, "lanczos_steps": 8}
                ),
            }
        )
        refs = run(store, config)
        found = json.loads((Path(refs["readiness_v2"].path) / "readiness.json").read_text())
        print(count, steps, found["verdict"]["headline"])
        for name, value in found["readiness"]["parts"].items():
            print("   ", name, value["value"], value["ci_low"], value["ci_high"])
        print("   ", found["verdict"]["reasons"], flush=True)


if __name__ == "__main__":
    main()
