"""One training of a policy against a reward model, which a second call continues with where the first was cut off.

Its folder holds

- `checkpoint-STEP/`: TRL's states, the newest two
- `progress.jsonl`: a row a measured step and prompt
- `samples.jsonl`: the samples of each measurement
- `rollouts.jsonl`: every sample that was trained on, with its reward and the weight version that gave it
- `watch/`: the state of a watch, and what it asked (`rmcore.policy.grpo.hack_stop`)
- `over.json`: written when the last step is done, and what follows it is not
- `finished.json`: written when all the rest is
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import TrainerCallback, TrainerState

from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import RmcoreError
from rmcore.core.files import append_json_lines, read_json_lines, write_json
from rmcore.core.progress import Report
from rmcore.core.saving import save_pretrained
from rmcore.core.tracking import Tracker
from rmcore.data.pair import Prompt, prompt_text
from rmcore.judging.judge import Judge
from rmcore.policy.grpo.credit import LengthCredit, RewardModelCreditAssigner
from rmcore.policy.grpo.group_reward import REWARDS_KEY, SCORE_KEY, WAIT_SECONDS, RolloutScorer
from rmcore.policy.grpo.grpo import make_grpo_with_rm
from rmcore.policy.grpo.hack_stop import HackStop
from rmcore.policy.grpo.policy_meter import PolicyMeter
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.served_policy import ServedPolicy
from rmcore.serving.scorer import Rollout

FINISHED, OVER = "finished.json", "over.json"
PROGRESS, SAMPLES, ROLLOUTS = "progress.jsonl", "samples.jsonl", "rollouts.jsonl"
MODEL_FOLDER = "model"
PARITY = {
    "sampling/sampling_logp_difference/mean": "rollout_difference_mean",
    "sampling/sampling_logp_difference/max": "rollout_difference_max",
}
"""Numbers that TRL logs of steps whose samples vLLM drew: how far its log-probabilities were from the trainer's, in
nats a token; and our names."""


@dataclass(frozen=True)
class TrainingPlan:
    """The parts of a training: policy, prompts, rewards, measurements and settings.

    policy: that it starts from.
    prompts: that it is trained on.
    scorer: gives the rewards.
    meter: measures; its reward model is the one in use.
    settings: of the training.
    device: auto, cpu or cuda.
    served: the vLLM that draws the samples; None: `generate` in the process.
    further: rewards next to the scorer's.
    watch: makes the watch over a training of a folder and a seed; None: only the steps end the training.
    final_prompts: fresh, for what the watched policy has gained in the end.
    wait_seconds: how long a step waits for a scorer that is away or fails.
    """

    policy: Policy
    prompts: Sequence[Prompt]
    scorer: RolloutScorer
    meter: PolicyMeter
    settings: RlhfConfig
    device: str
    served: ServedPolicy | None = None
    further: Sequence[Judge] = ()
    watch: Callable[[Path, int], HackStop] | None = None
    final_prompts: Sequence[Prompt] = ()
    wait_seconds: float = WAIT_SECONDS


def train_policy(plan: TrainingPlan, folder: Path, *, seed: int, tracker: Tracker, report: Report) -> None:
    """Train to the end, to the stopping rule, or to an error; then the state of the last whole step is on disk.

    Writes the files named above and `model/`, the trained policy. A finished training is left as it is.

    Raises:
        TrainingError: the reward server stayed away, or a reward is not finite.
        RequestError: the server refused samples or weights.
    """
    if (folder / FINISHED).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    state = _rewind(folder)
    run, price = _Run(plan, folder, seed, tracker, report), plan.settings.length_penalty
    watch = None if plan.watch is None else plan.watch(folder / "watch", seed)
    trainer = make_grpo_with_rm(
        plan.policy,
        plan.prompts,
        plan.scorer,
        out=folder,
        settings=plan.settings,
        credit=RewardModelCreditAssigner(LengthCredit(price), mode="add") if price else None,
        further=plan.further,
        temperature=plan.meter.temperature,
        max_new_tokens=plan.meter.max_new_tokens,
        seed=seed,
        device=plan.device,
        served=plan.served,
        wait_seconds=plan.wait_seconds,
        callbacks=[run] if watch is None else [run, watch],
        record=run.record,
    )
    started = time.perf_counter()
    if watch is not None:
        watch.attach(trainer)
    try:
        _train(trainer, watch, state, plan, folder / OVER)
    except RmcoreError:
        if trainer.state.global_step:  # the step that failed changed no weight
            trainer._save_checkpoint(trainer.model, trial=None)
        raise
    seconds = time.perf_counter() - started
    if not (folder / OVER).is_file():
        stopped = None if watch is None else watch.stopped
        write_json(folder / OVER, {"num_steps": trainer.state.global_step, "stopped": stopped})
    watched = None if watch is None else _conclude(watch, trainer.model, plan.final_prompts, report)
    save_pretrained(trainer.model, folder / MODEL_FOLDER)
    save_pretrained(plan.policy.tokenizer, folder / MODEL_FOLDER)
    outcome = json.loads((folder / OVER).read_text(encoding="utf-8")) | {
        "watch": watched,
        "seconds": seconds,
        "measuring_seconds": run.measuring_seconds,
        "num_tokens": run.num_tokens,
        "parity": [
            {name: row[key] for key, name in PARITY.items()}
            for row in trainer.state.log_history
            if PARITY.keys() <= row.keys()
        ],
    }
    write_json(folder / FINISHED, outcome)
    for checkpoint in folder.glob("checkpoint-*"):  # from here on nothing continues from them
        shutil.rmtree(checkpoint)


def _train(trainer: Any, watch: HackStop | None, state: Path | None, plan: TrainingPlan, over: Path) -> None:
    """Train on from `state`, unless all that is left is a look that waited, or what comes after the last step: TRL,
    asked to resume from there, takes one step more.
    """
    if state is not None:
        step, steps = _step(state), plan.settings.steps
        is_over = step >= steps or (
            over.is_file() and json.loads(over.read_text(encoding="utf-8"))["num_steps"] == step
        )
        trainer._load_from_checkpoint(str(state))
        if watch is not None:
            watch.resume(trainer.model, plan.policy.tokenizer, step=step, max_steps=steps)
            is_over = watch.catch_up(trainer.model, step=step, max_steps=steps) or is_over
        if is_over:
            trainer.state = TrainerState.load_from_json(str(state / "trainer_state.json"))
            if watch is not None:
                watch.roll_back(trainer.model, watch.best)
            return
    over.unlink(missing_ok=True)  # of an end whose state was not saved
    trainer.train(resume_from_checkpoint=None if state is None else str(state))


def _conclude(watch: HackStop, model: Any, prompts: Sequence[Prompt], report: Report) -> dict[str, Any]:
    """Measure what the kept policy has gained, and go back to the start where that is a loss; JSON-ready."""
    gain = None
    if prompts:
        gain = watch.final_gain(
            model, prompts, lambda done, of: report(done, of, f"judging what was gained: {done} of {of} pairs")
        )
    lost = gain is not None and gain["interval"][1] < 0
    if lost:
        watch.roll_back(model, 0)
    return {
        "looks": [asdict(look) for look in watch.looks],
        "unit": watch.judge.unit,
        "labels": watch.labels_used,
        "final_labels": 0 if gain is None else watch.judge.labels_per_pair * len(gain["path"]),
        "kept_step": 0 if lost else watch.best_step,
        "kept_kl": 0.0 if lost else watch.best_kl,
        "num_prompts": len(watch.prompts),
        "prompts_used": watch.prompts_used,
        "final": gain,
    }


class _Run(TrainerCallback):
    """Measures, stops and writes down between the steps of one training."""

    def __init__(self, plan: TrainingPlan, folder: Path, seed: int, tracker: Tracker, report: Report) -> None:
        self.plan, self.folder, self.seed, self.tracker, self.report = plan, folder, seed, tracker, report
        self.measuring_seconds = 0.0
        """Seconds spent on measurements."""
        self.num_tokens = 0
        """Tokens of the responses that were trained on since this process began."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 0:
            self._measure(given["model"], 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        step, settings = state.global_step, self.plan.settings
        self.report(step, settings.steps, f"seed {self.seed}")
        if step % settings.measure_every == 0 or step == state.max_steps:
            self._measure(given["model"], step)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        logs = given["logs"]
        self._track(state.global_step, {name: logs[key] for key, name in PARITY.items() if key in logs})

    def record(self, step: int, rollouts: Sequence[Rollout], credits: Sequence[float]) -> None:
        """Write down what a step was trained on; `step` counts the steps before it."""
        rows = [
            {
                "step": step + 1,
                "prompt": prompt_text(self.plan.prompts[rollout.meta["place"]]),
                "response": rollout.steps[0].completion,
                "num_tokens": rollout.meta["num_tokens"],
                "finished": rollout.meta["finished"],
                "reward": rollout.meta[SCORE_KEY],
                "num_cut": rollout.meta.get(f"{SCORE_KEY}_num_cut", 0),
                "weight_version": rollout.meta[f"{SCORE_KEY}_version"],
                "credit": credit,
                REWARDS_KEY: rollout.meta[REWARDS_KEY],
            }
            for rollout, credit in zip(rollouts, credits, strict=True)
        ]
        append_json_lines(self.folder / ROLLOUTS, rows)
        self.num_tokens += sum(rollout.meta["num_tokens"] for rollout in rollouts)
        table = pd.DataFrame(rows)
        given = pd.DataFrame(table[REWARDS_KEY].tolist())  # (N, K)
        within = given.groupby(table["prompt"]).std(ddof=0)
        values = {
            "reward": table["reward"].mean(),
            "reward_std_within": within[0].mean(),
            "groups_without_signal": (within == 0).all(axis=1).mean(),
            "tokens": table["num_tokens"].mean(),
            "weight_version": float(table["weight_version"].iloc[0]),
        }
        if self.plan.further:
            values |= {f"reward_{place}": mean for place, mean in given.mean().items()}
        self._track(step + 1, values)

    def _measure(self, model: Any, step: int) -> None:
        started = time.perf_counter()
        rows, samples = self.plan.meter.measure(model, seed=self.seed)
        append_json_lines(self.folder / PROGRESS, _json_rows(rows.assign(seed=self.seed, step=step)))
        append_json_lines(self.folder / SAMPLES, _json_rows(samples.assign(seed=self.seed, step=step)))
        self._track(step, {f"measured_{name}": rows[name].mean() for name in ("kl", "proxy", "gold", "win_rate")})
        self.measuring_seconds += time.perf_counter() - started

    def _track(self, step: int, values: Mapping[str, float]) -> None:
        self.tracker.metrics(step, {f"policy/{name}_seed{self.seed}": value for name, value in values.items()})


def _rewind(folder: Path) -> Path | None:
    """The newest state, after dropping what was written behind it; None: from the start."""
    states = sorted(folder.glob("checkpoint-*"), key=_step)
    whole = [place for place in states if (place / "trainer_state.json").is_file()]
    for place in set(states) - set(whole):
        shutil.rmtree(place)
    last = _step(whole[-1]) if whole else -1
    for name in (PROGRESS, SAMPLES, ROLLOUTS):
        kept = [row for row in read_json_lines(folder / name) if row["step"] <= last]
        if (folder / name).is_file():
            (folder / name).unlink()
            append_json_lines(folder / name, kept)
    return whole[-1] if whole else None


def _step(place: Path) -> int:
    """Read the step from the name of a state's folder."""
    return int(place.name.rpartition("-")[2])


def _json_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """With null where there is no number: JSON has no NaN."""
    return table.astype(object).where(table.notna(), None).to_dict("records")
