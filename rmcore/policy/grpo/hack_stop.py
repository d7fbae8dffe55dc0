"""`HackStop`: a callback that watches a policy in training with few labels, and ends where the true reward has turned.

In any trainer of transformers or TRL whose `model` generates (GRPO, RLOO, PPO), in one process:

    judge = ScoreJudge(HookJudge("mine:judge", judge))                 # or PeopleJudge(Path("to_judge"))
    stop = HackStop(held_out_prompts, judge, my_reward, Path("watch"), every=10)
    trainer = GRPOTrainer(..., callbacks=[stop])
    stop.attach(trainer)                                               # so that it can raise the KL penalty
    trainer.train()                                                    # the model is then the best checkpoint
    print(stop.looks[-1].reason, stop.final_gain(trainer.model, fresh_prompts))  # None where the start was kept

What it decides, and how sure that is: `rmcore.policy.stopping.watch`. Its folder holds, so that a cut-off training goes
on from the trainer's last state with the labels that it has,

- `watch.json`: the unit of a difference, and whose watch it is
- `snapshots/NUMBER.safetensors`: weights of the checkpoints that may be compared with or kept
- `look_STEP/asked.json` and `judged.jsonl`: what a look asks, and the answers
- `looks.jsonl`: a row a look, with the state of the watch after it
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from rmcore.config.rlhf import WatchConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.core.files import append_json_lines, read_json_lines, write_json
from rmcore.data.pair import Prompt, content_id, prompt_text
from rmcore.policy.confirmation import ServedGain
from rmcore.policy.grpo.policy_in_training import PolicyInTraining, Snapshots, policy_of
from rmcore.policy.grpo.rlhf_requirements import require_labels
from rmcore.policy.policy import Policy
from rmcore.policy.stopping.chosen_pairs import Chosen
from rmcore.policy.stopping.pair_judges import CALIBRATED, PairJudge, judge_in_turns
from rmcore.policy.stopping.watch import CANDIDATES, USEFUL_GAIN, Look, Watch

LOOKS, STATE = "looks.jsonl", "watch.json"
KEPT = 12
"""Checkpoints whose weights are kept at a time."""
STEERED = (0.5, 2.0)
"""Factors by which a look changes the KL penalty at most."""
LEAST_KL = 0.1
"""Nats below which no policy is held: it could not move."""
FEWEST_PROMPTS = 50


Reward = Callable[[Sequence[Prompt], Sequence[str]], Sequence[float] | FloatArray]
"""The reward that the policy is trained on: of N prompts and their responses, one finite number each."""


@dataclass(frozen=True)
class FinalGain:
    """The gain of what is kept over the start, on prompts that nothing was decided on.

    value: mean difference, in the judge's unit, clipped at its limit; or the end of the interval that it lies beyond,
        as the mean of judgements may that were unlike at first.
    interval: 95 %, valid at whatever number of pairs one stops.
    path: the interval after 1, 2, ... pairs.
    differences: (N,) of the pairs, not clipped.
    limit: at which they are clipped in `value` and `interval`; None: they are wins and losses.
    examples: prompt, both responses and the difference, of the first pairs.
    """

    value: float
    interval: tuple[float, float]
    path: list[tuple[float, float]]
    differences: list[float]
    limit: float | None
    examples: list[dict[str, Any]]


class HackStop(TrainerCallback):
    """Looks at a policy every `every` steps; ends the training where the true reward has turned or gains no more.

    When training ends, for whatever reason, the model gets the weights of the best checkpoint; its number is in
    `best`, and 0 is the start.

    Args:
        prompts: held out; each is used once at most. A look for which none is left judges nothing.
        judge: who compares two responses: `ScoreJudge` or `PeopleJudge`.
        reward: that is trained on; it saves labels as far as it follows the judge.
        folder: for the state.
        settings: labels.
        every: steps between looks.
        temperature, max_new_tokens: of the samples.
        kl_target: nats from the start: beyond them the trainer's `beta` is raised, within them it comes back to what it
            began with; None: it is left alone until the true reward stops gaining.
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
        reward: Reward,
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
        if len(prompts) < FEWEST_PROMPTS:
            raise ConfigError(
                f"{len(prompts)} held-out prompts, and a watch over a training wants at least {FEWEST_PROMPTS}: each "
                "judged pair should be of a prompt of its own. Hold out more."
            )
        self.prompts, self.judge, self.reward, self.folder = list(prompts), judge, reward, folder
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
        """Prompts that the looks took; more than there are: some were taken again."""
        return self._watch.prompts_used

    @property
    def labels_used(self) -> int:
        """Responses, or pairs where people judge, that were judged in the training."""
        return self._watch.labels_used + (2 * CALIBRATED if self.judge.calibrates else 0)

    def resume(self, model: Any, tokenizer: Any, *, step: int, max_steps: int) -> None:
        """Begin with the start policy, or with what an earlier call left at `step`; at step 0 the folder starts empty.

        Raises:
            ConfigError: the labels are too few for so many looks, too few prompts can be read, or the folder holds the
                watch of another training.
        """
        policy = policy_of(model, tokenizer) if self.policy is None else self.policy
        self._sampled = PolicyInTraining(policy, temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        num_looks = math.ceil(max_steps / self.every)
        require_labels(self.settings, num_looks, self.judge.labels_per_pair)
        self._keep_readable()
        self._require_prompts(num_looks)
        self._watch = Watch(
            self.settings.labels,
            num_looks=num_looks,
            limit=self.judge.limit,
            num_prompts=len(self.prompts),
            labels_per_pair=self.judge.labels_per_pair,
            unit=self.judge.unit,
            can_lower_kl=bool(getattr(self._trainer, "beta", 0.0)),
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
        self._watch.prompts_used = CALIBRATED
        self._rewind(step)

    def catch_up(self, model: Any, *, step: int, max_steps: int) -> bool:
        """Close the look of `step`, where an earlier call could not; whether the watch has ended the training there."""
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
    ) -> FinalGain | None:
        """Measure what the kept checkpoint, which `model` holds now, has gained; None where the start was kept.

        Args:
            model: after the training.
            prompts: fresh ones, as many as are to be judged.
            report: told how many pairs are judged.
        """
        if self.best == 0:
            return None
        folder = self.folder / "final"
        folder.mkdir(exist_ok=True)
        file = folder / "asked.json"
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
        return FinalGain(
            gain.mean,
            gain.interval,
            gain.path,
            gain.differences,
            self.judge.limit if gain.is_clipped else None,
            [
                {"prompt": prompt_text(prompt), "before": old, "after": new, "difference": difference}
                for prompt, old, new, difference in rows
            ],
        )

    def _due(self, step: int, max_steps: int) -> bool:
        return step > 0 and (step % self.every == 0 or step == max_steps)

    def _begin(self, model: Any, whose: dict[str, Any]) -> None:
        for place in [*self.folder.glob("look_*"), self.folder / "final"]:
            shutil.rmtree(place, ignore_errors=True)
        (self.folder / LOOKS).unlink(missing_ok=True)
        self._snapshots.keep(())
        self._snapshots.save(model, 0)
        if self.judge.calibrates:
            prompts = self._first_prompts()
            first, second = (self._sampled.answers(model, prompts, self.seed + 10 + number) for number in range(2))
            self.judge.calibrate(prompts, first, second)
        write_json(self.folder / STATE, {"scale": self.judge.scale, "whose": whose})

    def _keep_readable(self) -> None:
        """Leave out the prompts that the policy cannot answer, which are counted and said on stderr."""
        self.prompts = self._sampled.readable(self.prompts)
        if len(self.prompts) < FEWEST_PROMPTS:
            raise ConfigError(
                f"the policy can answer {len(self.prompts)} of the held-out prompts, and a watch wants at least "
                f"{FEWEST_PROMPTS}; hold out more, or shorter ones."
            )

    def _require_prompts(self, num_looks: int) -> None:
        """Refuse looks without a prompt of their own; say on stderr where prompts keep labels from being used."""
        pairs = (len(self.prompts) - CALIBRATED) // CANDIDATES
        wanted = self.settings.labels // self.judge.labels_per_pair
        if pairs < num_looks:
            raise ConfigError(
                f"{len(self.prompts)} held-out prompts, {CALIBRATED} of them for the unit, and each is judged once: "
                f"they are {pairs} groups of {CANDIDATES} for {num_looks} looks. Hold out more, or look "
                "more rarely (rlhf.measure_every)."
            )
        if pairs < wanted:
            print(
                f"warning: {len(self.prompts)} held-out prompts allow {pairs} judged pairs, not the {wanted} that "
                "rlhf.watch.labels are for: each prompt is judged once. Hold out more.",
                file=sys.stderr,
            )

    def _first_prompts(self) -> list[Prompt]:
        """Prompts for the unit and for distances, on which nothing is ever judged about the trained policy."""
        order = np.random.default_rng([self.seed, 0]).permutation(len(self.prompts))
        return [self.prompts[place] for place in order[:CALIBRATED]]

    def _look(self, model: Any, step: int) -> None:
        watch = self._watch
        folder = self.folder / f"look_{step}"
        folder.mkdir(exist_ok=True)
        number = len(watch.curve)
        # Not before: until the state of the last look's step is written, one before it may be resumed from.
        self._snapshots.keep(watch.kept)
        self._snapshots.save(model, number)
        file = folder / "asked.json"
        if file.is_file():
            asked = json.loads(file.read_text(encoding="utf-8"))
            watch.begin(step, asked["kl"], asked["reference"])
            watch.prompts_used = asked["prompts_used"]
        else:
            asked = self._ask(model, step, number)
            write_json(file, asked)
        chosen = Chosen(**{name: np.array(values) for name, values in asked["chosen"].items()})
        prompts = [self.prompts[place] for place in asked["prompts"]]
        name = f"step{step}-seed{self.seed}"
        later, earlier = asked["later"], asked["earlier"]
        pairs = iter(range(len(later)))
        for turn in judge_in_turns(self.judge, name, prompts, later, earlier, folder / "judged.jsonl"):
            more = True
            for difference, pair in zip(turn, pairs, strict=False):
                if not math.isnan(difference):
                    more = watch.see(chosen, pair, difference)
            if not more:
                break
        look = watch.end()
        watch.forget(KEPT)
        self._act(look)
        self.looks.append(look)
        row = {"step": step, "look": asdict(look), "state": watch.to_dict()}
        row |= {"kl_beta": getattr(self._trainer, "beta", None), "kl_target": self.kl_target}
        append_json_lines(self.folder / LOOKS, [row])

    def _ask(self, model: Any, step: int, number: int) -> dict[str, Any]:
        """Sample both policies and choose the pairs; JSON-ready, prompts by their places."""
        watch, size = self._watch, CANDIDATES
        places = self._fresh_places(watch.num_pairs() * size)
        prompts = [self.prompts[place] for place in places]
        seed = self.seed + 1000 * number
        # The distance decides whom to compare with, so it is not measured on the responses that are then compared.
        kl = self._sampled.distance(model, self._snapshots, 0, self._first_prompts(), seed + 2)
        reference = watch.begin(step, kl)
        later = self._sampled.answers(model, prompts, seed)
        with self._snapshots.inside(model, reference):
            earlier = self._sampled.answers(model, prompts, seed + 1)
        rewards = np.array(self.reward([*prompts, *prompts], [*later, *earlier]), dtype=np.float64).reshape(2, -1)
        if not np.isfinite(rewards).all():
            raise TrainingError("the reward gives numbers that are not finite, from which nothing can be expected.")
        rng = np.random.default_rng([self.seed, number])
        chosen = watch.chooser.choose((rewards[0] - rewards[1]).reshape(-1, size), rng)
        judged = [group * size + int(place) for group, place in enumerate(chosen.places)]
        return {
            "kl": kl,
            "reference": reference,
            "prompts_used": watch.prompts_used,
            "chosen": {name: np.asarray(values).tolist() for name, values in vars(chosen).items()},
            "prompts": [places[index] for index in judged],
            "later": [later[index] for index in judged],
            "earlier": [earlier[index] for index in judged],
        }

    def _act(self, look: Look) -> None:
        self.best = look.best
        if look.action == "stop":
            self.stopped = self._why(look)
        if look.action == "lower_kl":
            self.kl_target = min(self.kl_target or math.inf, max(self._watch.kls[look.best], LEAST_KL))
        beta = getattr(self._trainer, "beta", 0.0)
        if self.kl_target is not None and beta:
            # Never below the setting: a policy that is still on its way would be let loose, and overshoot.
            steered = beta * float(np.clip(max(look.kl, 0.0) / self.kl_target, *STEERED))
            self._trainer.beta = max(self._trainer.args.beta, steered)

    @staticmethod
    def _why(look: Look) -> str:
        return f"{look.reason} (step {look.step})"

    def _rewind(self, step: int) -> None:
        """Take up the state after the last look at or before `step`, and drop what came behind it."""
        every = read_json_lines(self.folder / LOOKS)
        rows = [row for row in every if row["step"] <= step]
        (self.folder / LOOKS).unlink(missing_ok=True)
        append_json_lines(self.folder / LOOKS, rows)
        for place in self.folder.glob("look_*"):
            if int(place.name.removeprefix("look_")) > step:
                shutil.rmtree(place)
        self.looks = [Look(**row["look"]) for row in rows]
        self.stopped = None if not rows or self.looks[-1].action != "stop" else self._why(self.looks[-1])
        self.best = 0
        if len(rows) < len(every):
            shutil.rmtree(self.folder / "final", ignore_errors=True)
        if rows:
            self._watch.restore(rows[-1]["state"])
            self._watch.kept = [number for number in self._watch.kept if self._snapshots.has(number)]
            self.best, self.kl_target = self.looks[-1].best, rows[-1]["kl_target"]
            if rows[-1]["kl_beta"] is not None and self._trainer is not None:
                self._trainer.beta = rows[-1]["kl_beta"]

    def _fresh_places(self, wanted: int) -> list[int]:
        """Places of prompts that no earlier look had, nor the unit; the watch asks for no more than there are."""
        used = self._watch.prompts_used
        self._watch.prompts_used += wanted
        order: list[int] = np.random.default_rng([self.seed, 0]).permutation(len(self.prompts)).tolist()
        return order[used : used + wanted]
