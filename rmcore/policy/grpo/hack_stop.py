"""`HackStop`: a callback that watches a policy in training with few labels, and ends where the true reward has turned.

In any trainer of transformers or TRL whose `model` generates (GRPO, RLOO, PPO), in one process:

    judge = ScoreJudge(HookJudge("mine:judge", judge))                 # or PeopleJudge(Path("to_judge"))
    stop = HackStop(held_out_prompts, judge, Path("watch"), every=10)
    trainer = GRPOTrainer(..., callbacks=[stop])
    trainer.train()                                                    # the model is then the best checkpoint
    print(stop.looks[-1].reason, stop.final_gain(trainer.model, fresh_prompts))  # None where the start was kept

What it decides, and how sure that is: `rmcore.policy.stopping.watch`. Its folder holds, so that a cut-off training
continues from the trainer's last state with the labels that it has,

- `watch.json`: the unit of a difference, and whose watch it is
- `snapshots/NUMBER.safetensors`: weights of the checkpoints that may be compared with or kept
- `look_STEP/asked.json` and `judged.jsonl`: what a look asks, and the answers, from which its evidence follows again
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from rmcore.config.rlhf import WatchConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import read_json_lines, write_json
from rmcore.data.pair import Prompt, content_id, prompt_text
from rmcore.policy.confirmation import ServedGain
from rmcore.policy.grpo.policy_in_training import PolicyInTraining, Snapshots, policy_of
from rmcore.policy.grpo.rlhf_requirements import require_labels
from rmcore.policy.policy import Policy
from rmcore.policy.stopping.pair_judges import CALIBRATED, PairJudge, judge_in_turns
from rmcore.policy.stopping.watch import USEFUL_GAIN, Look, Watch

STATE, ASKED = "watch.json", "asked.json"
KEPT = 12
"""Checkpoints whose weights are kept at a time."""
STEERED = (0.5, 2.0)
"""Factors by which a look changes the KL penalty at most."""


class HackStop(TrainerCallback):
    """Looks at a policy every `every` steps; ends the training where the true reward has turned or gains no more.

    When training ends, for whatever reason, the model gets the weights of the best checkpoint; its number is in
    `best`, and 0 is the start.

    Args:
        prompts: held out; each is used once at most. A look for which none is left judges nothing.
        judge: who compares two responses: `ScoreJudge` or `PeopleJudge`.
        folder: for the state.
        settings: labels.
        every: steps between looks.
        temperature, max_new_tokens: of the samples.
        kl_target: nats from the start: beyond them the `beta` of the trainer given to `attach` is raised, within them
            it comes back to what it began with; None: it is left alone.
        seed: of prompts, samples and choices.
        policy: how prompts and responses become token ids; None: by the trainer's model and tokenizer.

    Raises:
        ConfigError: too few prompts, or several processes.
        JudgementsWantedError: people have to answer first; train again from the last checkpoint when they have.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        judge: PairJudge,
        folder: Path,
        *,
        settings: WatchConfig | None = None,
        every: int = 10,
        temperature: float = 1.0,
        max_new_tokens: int = 256,
        kl_target: float | None = None,
        seed: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.prompts, self.judge, self.folder = list(prompts), judge, folder
        self.settings, self.every, self.seed, self.policy = settings or WatchConfig(), every, seed, policy
        self.temperature, self.max_new_tokens = temperature, max_new_tokens
        self.kl_target = kl_target
        self.looks: list[Look] = []
        self.stopped: str | None = None
        self.best = 0
        self._trainer: Any = None
        self._watch: Watch
        self._sampled: PolicyInTraining
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._snapshots = Snapshots(folder / "snapshots")

    def attach(self, trainer: Any) -> None:
        """Let the watch raise and lower the KL penalty of `trainer` (its `beta`, where that is not 0)."""
        self._trainer = trainer

    @property
    def prompts_used(self) -> int:
        """Prompts that the unit and the looks took."""
        return CALIBRATED + self._watch.pairs_asked

    @property
    def labels_used(self) -> int:
        """Responses, or pairs where people judge, that were judged in the training."""
        pairs = self._watch.pairs_judged
        return self.judge.labels_per_pair * pairs + (2 * CALIBRATED if self.judge.calibrates else 0)

    def resume(self, model: Any, tokenizer: Any, *, step: int, max_steps: int) -> None:
        """Begin with the start policy, or with what an earlier call left at `step`; at step 0 the folder starts empty.

        Raises:
            ConfigError: the labels, or the prompts that can be answered, are too few for so many looks, or the folder
                holds the watch of another training.
        """
        policy = policy_of(model, tokenizer) if self.policy is None else self.policy
        self._sampled = PolicyInTraining(policy, temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        num_looks = math.ceil(max_steps / self.every)
        require_labels(self.settings, num_looks, self.judge.labels_per_pair)
        # Those that the policy cannot answer are counted and said on stderr.
        self.prompts = [self.prompts[place] for place in policy.readable_ids(self.prompts, self.max_new_tokens)]
        self._watch = Watch(
            self._num_pairs(num_looks),
            num_looks=num_looks,
            limit=self.judge.limit,
            unit=self.judge.unit,
            is_clipped=self.judge.calibrates,
        )
        whose = {
            "judge": self.judge.name,
            "prompts": content_id(*map(prompt_text, self.prompts)),
            "seed": self.seed,
            "every": self.every,
            "settings": self.settings.model_dump(mode="json"),
        }
        if step == 0:
            self._begin(model, whose)
        file = self.folder / STATE
        begun = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"whose": None}
        if begun["whose"] != whose:
            raise ConfigError(
                f"{self.folder} does not hold the watch of this training up to step {step}, but "
                f"{'another' if begun['whose'] else 'none'}: judge, prompts, seed, looks or settings differ. Train "
                "from the start, or name the folder that the training had."
            )
        self.judge.scale = begun["scale"]
        self._rewind(step)

    def catch_up(self, model: Any, *, step: int, max_steps: int) -> bool:
        """Look at `step`, if a look is due there; whether the watch has ended the training.

        Nothing of the look is sampled or judged that an earlier call has sampled or judged.
        """
        if self._due(step, max_steps) and self._watch.steps[-1] < step:
            self._look(model, step)
        return self.stopped is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Resume from what there is; a look that an earlier call could not close is closed now."""
        if args.world_size > 1:
            raise ConfigError("a watch over a training works in one process; train in one, or judge the checkpoints.")
        self.resume(given["model"], given["processing_class"], step=state.global_step, max_steps=state.max_steps)
        if self.catch_up(given["model"], step=state.global_step, max_steps=state.max_steps):
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look, where a look is due."""
        if self._due(state.global_step, state.max_steps):
            self._look(given["model"], state.global_step)
            if self.stopped is not None:
                control.should_training_stop = control.should_save = True

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Put the best checkpoint's weights into the model."""
        self.roll_back(given["model"], self.best)

    def roll_back(self, model: Any, number: int) -> None:
        """Put the weights of a checkpoint that is still kept into the model; 0 is the start."""
        self._snapshots.load(model, number)

    @property
    def best_step(self) -> int:
        """Step of the best checkpoint."""
        return self._watch.steps[self.best]

    @property
    def best_kl(self) -> float:
        """Nats of the best checkpoint from the start."""
        return self._watch.kls[self.best]

    def final_gain(
        self, model: Any, prompts: Sequence[Prompt], report: Callable[[int, int], None] = lambda done, of: None
    ) -> dict[str, Any] | None:
        """Measure what the kept checkpoint, which `model` holds now, has gained; None where the start was kept.

        Args:
            model: after the training.
            prompts: fresh ones, as many as are to be judged.
            report: told how many pairs are judged.

        Returns:
            JSON-ready: value, the mean difference in the judge's unit, clipped at its limit, or the end of the interval
            that it is beyond; interval, 95 %, valid at whatever number of pairs one stops; path, the interval after
            1, 2, ... pairs; differences of the pairs, not clipped; limit, None if they are wins and losses; examples
            (prompt, before, after, difference) of the first pairs.
        """
        if self.best == 0:
            return None
        folder = self.folder / "final"
        folder.mkdir(exist_ok=True)
        file = folder / ASKED
        asked: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"best": None}
        if asked["best"] != [self.best, len(prompts)]:
            (folder / "judged.jsonl").unlink(missing_ok=True)
            later = self._sampled.answers(model, prompts, self.seed + 1)
            with self._snapshots.inside(model, 0):
                earlier = self._sampled.answers(model, prompts, self.seed + 2)
            asked = {"best": [self.best, len(prompts)], "later": later, "earlier": earlier}
            write_json(file, asked)
        gain = ServedGain(self.judge.limit, USEFUL_GAIN, is_clipped=self.judge.calibrates)
        name, later, earlier = f"final-seed{self.seed}", asked["later"], asked["earlier"]
        for turn in judge_in_turns(self.judge, name, prompts, later, earlier, folder / "judged.jsonl"):
            for difference in turn:
                if not math.isnan(difference):  # else the judge's reply could not be read
                    gain.see(difference)
            report(len(gain.differences), len(prompts))
        kept = [row["difference"] for row in read_json_lines(folder / "judged.jsonl")]
        rows = [row for row in zip(prompts, earlier, later, kept, strict=False) if not math.isnan(row[3])][:3]
        return {
            "value": gain.mean,
            "interval": gain.interval,
            "path": gain.path,
            "differences": gain.differences,
            "limit": self.judge.limit if gain.is_clipped else None,
            "examples": [
                {"prompt": prompt_text(prompt), "before": old, "after": new, "difference": difference}
                for prompt, old, new, difference in rows
            ],
        }

    def _due(self, step: int, max_steps: int) -> bool:
        return step > 0 and (step % self.every == 0 or step == max_steps)

    def _begin(self, model: Any, whose: dict[str, Any]) -> None:
        for place in [*self.folder.glob("look_*"), self.folder / "final"]:
            shutil.rmtree(place, ignore_errors=True)
        self._snapshots.keep(())
        self._snapshots.save(model, 0)
        if self.judge.calibrates:
            prompts = self._first_prompts()
            first, second = (self._sampled.answers(model, prompts, self.seed + 10 + number) for number in range(2))
            self.judge.calibrate(prompts, first, second)
        write_json(self.folder / STATE, {"scale": self.judge.scale, "whose": whose})

    def _num_pairs(self, num_looks: int) -> int:
        """Pairs that may be judged; too few prompts for the looks are refused, and for the labels said on stderr."""
        pairs, wanted = len(self.prompts) - CALIBRATED, self.settings.labels // self.judge.labels_per_pair
        if pairs < num_looks:
            raise ConfigError(
                f"{len(self.prompts)} held-out prompts, {CALIBRATED} of them for the unit, and each is judged once: "
                f"they are too few for {num_looks} looks. Hold out more, or look more rarely (rlhf.measure_every)."
            )
        if pairs < wanted:
            print(
                f"warning: {len(self.prompts)} held-out prompts allow {pairs} judged pairs, not the {wanted} that "
                "rlhf.watch.labels are for: each prompt is judged once. Hold out more.",
                file=sys.stderr,
            )
        return min(pairs, wanted)

    def _places(self, first: int, last: int) -> list[int]:
        """Places of prompts in an order of chance: of `CALIBRATED` for unit and distances, then of those to judge."""
        order: list[int] = np.random.default_rng([self.seed, 0]).permutation(len(self.prompts)).tolist()
        return order[first:last]

    def _first_prompts(self) -> list[Prompt]:
        """Prompts for the unit and for distances, on which nothing is ever judged about the trained policy."""
        return [self.prompts[place] for place in self._places(0, CALIBRATED)]

    def _look(self, model: Any, step: int) -> None:
        folder = self.folder / f"look_{step}"
        folder.mkdir(exist_ok=True)
        number = len(self._watch.curve)
        # Not before: until the state of the last look's step is written, one before it may be resumed from.
        self._snapshots.keep(self._watch.kept)
        self._snapshots.save(model, number)
        self._judge(step, self._asked(step) if (folder / ASKED).is_file() else self._ask(model, step, number))

    def _asked(self, step: int) -> dict[str, Any]:
        """Begin a look again that an earlier call has begun; what it asks."""
        asked: dict[str, Any] = json.loads((self.folder / f"look_{step}" / ASKED).read_text(encoding="utf-8"))
        _, planned = self._watch.begin(step, asked["kl"], asked["reference"])
        self._watch.pairs_asked += len(asked["prompts"]) - planned  # where more steps, so more looks, are planned now
        return asked

    def _ask(self, model: Any, step: int, number: int) -> dict[str, Any]:
        """Begin a look and sample both policies for its pairs; what it asks, prompts by their places."""
        seed = self.seed + 1000 * number
        # The distance decides whom to compare with, so it is not measured on the responses that are then compared.
        kl = self._sampled.distance(model, self._snapshots, 0, self._first_prompts(), seed + 2)
        first = self.prompts_used
        reference, num_pairs = self._watch.begin(step, kl)
        places = self._places(first, first + num_pairs)
        prompts = [self.prompts[place] for place in places]
        later = self._sampled.answers(model, prompts, seed)
        with self._snapshots.inside(model, reference):
            earlier = self._sampled.answers(model, prompts, seed + 1)
        asked = {"kl": kl, "reference": reference, "prompts": places, "later": later, "earlier": earlier}
        write_json(self.folder / f"look_{step}" / ASKED, asked)
        return asked

    def _judge(self, step: int, asked: dict[str, Any]) -> None:
        """Have the pairs of a look judged, those that were not before, and do what follows."""
        watch, folder = self._watch, self.folder / f"look_{step}"
        prompts = [self.prompts[place] for place in asked["prompts"]]
        name, later, earlier = f"step{step}-seed{self.seed}", asked["later"], asked["earlier"]
        for turn in judge_in_turns(self.judge, name, prompts, later, earlier, folder / "judged.jsonl"):
            more = True
            for difference in turn:
                if not math.isnan(difference):
                    more = watch.see(difference)
            if not more:
                break
        look = watch.end()
        watch.forget(KEPT)
        self._act(look)
        self.looks.append(look)

    def _act(self, look: Look) -> None:
        self.best = look.best
        if look.action == "stop":
            self.stopped = f"{look.reason} (step {look.step})"
        beta = getattr(self._trainer, "beta", 0.0)
        if self.kl_target is not None and beta:
            # Never below the setting: a policy that is still on its way would be let loose, and overshoot.
            steered = beta * float(np.clip(max(look.kl, 0.0) / self.kl_target, *STEERED))
            self._trainer.beta = max(self._trainer.args.beta, steered)

    def _rewind(self, step: int) -> None:
        """Judge the looks before `step` again by the answers that there are, and drop those after it."""
        steps = sorted(int(place.name.removeprefix("look_")) for place in self.folder.glob("look_*"))
        for later in (one for one in steps if one > step):
            shutil.rmtree(self.folder / f"look_{later}")
            shutil.rmtree(self.folder / "final", ignore_errors=True)
        self.looks, self.stopped, self.best = [], None, 0
        if getattr(self._trainer, "beta", 0.0):
            self._trainer.beta = self._trainer.args.beta
        for earlier in (one for one in steps if one < step):
            self._judge(earlier, self._asked(earlier))
        self._watch.kept = [number for number in self._watch.kept if self._snapshots.has(number)]
