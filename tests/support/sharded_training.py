"""A training of the tests' `tiny` in float64, in one of several processes; torchrun starts it with the file of a spec.

The spec is [folder, stop_at, changes]; among the changes, `model` is a folder in place of `tiny`, and `lora` puts
adapters on it. Writes the loss of every step and the trained model. Stops in step `stop_at`, if that is not 0; a
negative one ends the process and its launcher, as if the host had lost its power. One that is to stop saves a state
after every step, if it is alone as often as it can.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from fresh_forks import use_small_models
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import MemoryTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.data.observation import Observation
from rmcore.data.tokenized_observations import open_observations_tokenized, write_observations_tokenized
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer
from rmcore.training.material import attach, make_design
from rmcore.training.ranks import environment_ranks
from rmcore.training.sharding import process_group, shard, whole_state_dict

STEPS = 14


class Stopped(BaseException):
    """Ends a training; a state that is being written meanwhile is finished."""


def main(folder: Path, stop_at: int, changes: dict, variables: dict[str, str]) -> None:
    """`variables` are those that torchrun sets."""
    os.environ.update(variables)
    device = torch.device("cpu")
    pairs = generate_pairs(GoldConfig(num_prompts=60, pairs_per_prompt=2), seed=0).pairs
    settings = {"name": changes.pop("model", "tiny"), "lora": changes.pop("lora", None), "max_seq_len": 96}
    is_shared = environment_ranks().world > 1
    rm = BradleyTerryRM.new(ModelConfig.model_validate(settings), seed=0, device=device, defer=is_shared)
    is_deferred = rm.deferred is not None
    with process_group(device) as ranks:
        tracker = MemoryTracker()

        def stop(step: int, total: int, text: str) -> None:
            if step == stop_at:
                raise Stopped
            if step == -stop_at:
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

        settings = {
            "steps": STEPS, "pairs_per_step": 6, "lr": 1e-3, "warmup_steps": 2, "log_every": 1, "eval_every": 7,
            "token_budget": 400, "resume_every_seconds": 0 if stop_at else 3600,
        }  # fmt: skip
        kinds = changes.pop("kinds", None)
        config = TrainConfig.model_validate(settings | changes)
        train = rm.renderer.tokenize_pairs(pairs[:41])  # 7 steps an epoch, the last of 5 pairs: shares differ
        if kinds:
            train = tokenized_observations(rm, config, pairs[:41], kinds, folder / f"tokens{ranks.rank}")
        shard(rm, ranks)
        rm.model.double()
        trainer = Trainer(
            rm,
            config,
            train=train,
            validation=rm.renderer.tokenize_pairs(pairs[50:61]),
            folder=folder,
            tracker=tracker,
            seed=0,
            report=stop,
            ranks=ranks,
        )
        try:
            result = trainer.run()
        except Stopped:
            return
        weights = whole_state_dict(rm.model)
        if ranks.is_main:
            torch.save(weights, folder / "weights.pt")
            np.save(folder / "best_rewards.npy", trainer.best_rewards)
            told = {"rows": trainer.progress.rows, "result": result.to_dict(), "deferred": is_deferred}
            (folder / "rows.json").write_text(json.dumps(told))


def tokenized_observations(rm, config, pairs, kinds, folder):
    """Pairs, and what else two answers may be judged to be, with the likelihood put on `rm`."""
    judgements = {
        "pair": {"ranks": (1, 2)},
        "tie": {"ranks": (1, 1)},
        "grades": {"grades": {"good": (2.0, 1.0), "short": (0.0, 1.0)}},
        "more": {"grades": {"good": (3.0, None), "short": (1.0, 0.0)}},
    }
    observations = [
        Observation(pair.prompt, (pair.chosen, pair.rejected), **judgements[kinds[at % len(kinds)]])
        for at, pair in enumerate(pairs)
    ]
    design = make_design(config, observations, None)
    attach(rm, design)
    write_observations_tokenized(rm.renderer, observations, folder, design.coding, over_length="cut")
    return open_observations_tokenized(folder, len(observations)).observations


if __name__ == "__main__":
    use_small_models()
    given, *rest = json.loads(Path(sys.argv[1]).read_text())
    main(Path(given), *rest, {})
