"""Two real steps of a training, timed: `python -m rmcore.study.probe SPEC.json` in a process of its own.

Says what an experiment costs where nothing like it has run on this machine. A refusal is written as an error.
"""

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import RmcoreError
from rmcore.core.files import write_json
from rmcore.core.processes import die_with_parent
from rmcore.core.tracking import NullTracker
from rmcore.data.integrity import select_training_pairs
from rmcore.models.loading import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.prepare import load_splits
from rmcore.study.estimates import SpeedProbe
from rmcore.training.loop import Trainer

WARM_STEPS, TIMED_STEPS = 1, 2


def probe(config: PipelineConfig, started: float) -> SpeedProbe:
    """Time the steps after the first one, in which libraries and caches warm up; weights are thrown away.

    Args:
        config: of a cell.
        started: `time.time()` when its process was asked for.
    """
    splits, _ = load_splits(config.data, seed=config.seed)
    rm = BradleyTerryRM.new(config.model, seed=config.seed, device=pick_device(config.device))
    pairs, _ = select_training_pairs(
        rm.renderer.tokenize_readable(splits["train"]).tokenized, over_length=config.train.over_length
    )
    with tempfile.TemporaryDirectory() as nothing:
        trainer = Trainer(
            rm, config.train, train=pairs, validation=[], folder=Path(nothing), tracker=NullTracker(), seed=config.seed
        )
        trainer.probe(WARM_STEPS)
        warm = time.time()
        trainer.probe(TIMED_STEPS)
        seconds = time.time() - warm
    timed = min(TIMED_STEPS, trainer.num_steps) * min(config.train.pairs_per_step, len(pairs))
    scored = len(splits["test"]) + len(splits.get("validation", []))
    return SpeedProbe(timed / seconds, warm - started, len(pairs), scored)


def main(spec_path: str) -> int:
    """Read the specification, write `{"probe": …}` or `{"error": …}` where it says."""
    spec = json.loads(Path(spec_path).read_text())
    die_with_parent(spec["parent_pid"])
    try:
        outcome: dict[str, object] = {
            "probe": asdict(probe(PipelineConfig.model_validate(spec["config"]), spec["started"]))
        }
    except RmcoreError as error:
        outcome = {"error": str(error)}
    write_json(Path(spec["out"]), outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
