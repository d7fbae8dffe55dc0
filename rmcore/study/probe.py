"""The cost of a training where nothing like it has run on this machine, measured in a process of its own.

`rmcore.core.child_process` starts it. A refusal is written as an error.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import RmcoreError
from rmcore.core.files import write_json
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.prepare import prepare
from rmcore.study.estimates import SpeedProbe
from rmcore.training.material import Material, tokens_of
from rmcore.training.plan import time_steps

CPU_PAIRS = 4
"""Pairs of a timed step on a CPU, whose time they decide: a first plan should take seconds. A GPU needs whole steps."""
TRIED_PAIRS = 20_000
"""Training pairs that are tokenized; how many of the others are left out follows from their share."""


def probe(config: PipelineConfig, started: float) -> SpeedProbe:
    """Time two real steps of a training, and all that comes before them.

    Args:
        config: of a cell.
        started: `time.time()` when its process was requested.
    """
    with TemporaryDirectory() as spool:  # mapped files outlive their names
        prepared = prepare(config.data, seed=config.seed, spool=Path(spool))
    rm = BradleyTerryRM.new(config.model, seed=config.seed, device=pick_device(config.device))
    pairs, said = prepared.pairs["train"], prepared.observations.get("train")
    some = None if said is None else list(said[:TRIED_PAIRS])
    material = Material.choose(config.train, list(pairs[:TRIED_PAIRS]), some, config.data.attribute_weights)
    material.attach_to(rm)
    with TemporaryDirectory() as folder:
        material.write(rm.renderer, Path(folder), config.train)
        tokens = tokens_of(material.open(Path(folder)))
    if rm.device.type == "cpu":
        smaller = {"pairs_per_step": min(CPU_PAIRS, config.train.pairs_per_step)}
        config = config.model_copy(update={"train": config.train.model_copy(update=smaller)})
    timed = time_steps(rm, config, tokens)
    until_warm = time.time() - started - timed.seconds
    scored = len(prepared.pairs["test"]) + len(prepared.pairs.get("validation", []))
    everything = pairs if said is None or material.design is None else said
    num_train = round(len(tokens) / len(material.train) * len(everything))
    return SpeedProbe(timed.num_pairs / timed.seconds, until_warm, num_train, scored)


def run_from_file(spec_path: str) -> int:
    """Read the file that says what to try, write `{"probe": …}` or `{"error": …}` where it says."""
    spec = json.loads(Path(spec_path).read_text())
    try:
        outcome: dict[str, object] = {
            "probe": asdict(probe(PipelineConfig.model_validate(spec["config"]), spec["started"]))
        }
    except RmcoreError as error:
        outcome = {"error": str(error)}
    write_json(Path(spec["out"]), outcome)
    return 0
