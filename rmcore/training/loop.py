"""The training loop: steps, evaluations, the best checkpoint, when to stop, and resuming after a kill.

The loop knows pairs, a model and a folder. What its numbers are sent to is the tracker's business.

Resuming is exact: a state holds everything that the next step depends on, and the data order is a pure function of the
seed, so on a CPU a training that was killed anywhere ends in the same bits as one that was not.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, silent
from rmcore.core.tracking import Tracker
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized_observations import TokenizedObservation, implied_pairs
from rmcore.evaluation.report_card import batch_metrics
from rmcore.models.batching import check_budget, distinct_sides
from rmcore.models.precision import Precision
from rmcore.models.reward_model import SCORING_TOKEN_BUDGET, BradleyTerryRM
from rmcore.training import resume
from rmcore.training import state as states
from rmcore.training.callbacks import Callback, Evaluation
from rmcore.training.checkpoint import CheckpointWriter, repair_interrupted
from rmcore.training.feed import LostWorkerError, make_feed, steps_from
from rmcore.training.length import planned_steps
from rmcore.training.memory import memory_metrics, peak_memory_bytes
from rmcore.training.optimizers import set_learning_rate
from rmcore.training.peak_memory import PeakMeter
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.record import MetricsTable, Progress, TrainResult, Window, reward_distribution
from rmcore.training.selection import LAST, Selection
from rmcore.training.setup import (
    choose_packing,
    make_context,
    narrows_base,
    restore_training,
    share_memory,
    with_precision,
)
from rmcore.training.sharding import reshard
from rmcore.training.state_transfer import write_parts
from rmcore.training.step import Batch, HalfUpdateError, StepContext
from rmcore.training.stepper import Stepper
from rmcore.training.train_mode import training_form

DISTRIBUTION_PAIRS = 100
"""Pairs trained on whose rewards are described where there are no validation pairs; of fewer, all. Scoring a pair costs
a third of training on it, so that a hundred cost what two steps of 16 do; their mean is known to a tenth of a standard
deviation."""
SCORED_TOGETHER = 16384
"""Pairs that are held in memory, and sorted by length, at a time; equal sides beyond them may differ by rounding."""
ALL_DONE = "all steps done"
CAUGHT = (signal.SIGINT, signal.SIGTERM)
ECHO_SECONDS = 1.0
"""A signal this soon after the first is the same request, passed on by the parent process as well as the terminal."""


class Trainer:
    """Trains one reward model into one folder.

    The folder then holds `metrics.csv` and `reward_distributions.json`, which can be followed as it trains, `best/`,
    `step_<last>/`, and `step_*/` every `save_every` steps or among the `keep_top_k` best. (The tracker writes
    `metrics.jsonl`.) While it trains, `resume/` holds the newest states; a Trainer made for such a folder resumes from
    there.

    Args:
        rm: the model; trained in place, and sharded in place where there are several ranks. `config.packing` holds
            for its scoring too, from then on, and its `beta` is `config.beta`.
        config: settings.
        train: P tokenized training pairs; or, after `likelihood.attached.attach`, observations of any kind.
        validation: held-out pairs for choosing the best step; may be empty, then best = last and nothing stops early,
            as with `best_metric="last"`.
        folder: where checkpoints go.
        tracker: receives numbers by step.
        seed: data order and dropout.
        report: called after each step, with the steps done and planned and the loss.
        callbacks: called after each evaluation.
        settings: whatever else made this training what it is, by dotted name; a state of other settings is refused.
        ranks: the processes that train together.

    Raises:
        ConfigError: a pair exceeds the token budget, the world size does not divide `pairs_per_step`, or the ranks
            differ in settings or pairs.
        ModelError: the weights are narrower than float32.
    """

    def __init__(
        self,
        rm: BradleyTerryRM,
        config: TrainConfig,
        *,
        train: Sequence[TokenizedPair] | Sequence[TokenizedObservation],
        validation: Sequence[TokenizedPair],
        folder: Path,
        tracker: Tracker,
        seed: int,
        report: Report = silent,
        callbacks: Sequence[Callback] = (),
        settings: Mapping[str, Any] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        rm.require_float32("trained: updates smaller than the rounding of its weights would be lost")
        ranks.check_divides(config.pairs_per_step)
        config = with_precision(config, rm, rm.device)
        self.rm, self.config, self.folder, self.tracker, self.seed = rm, config, folder, tracker, seed
        self.train, self.validation, self.ranks = train, validation, ranks
        self.report, self.callbacks = report, callbacks
        self.num_steps = planned_steps(config, len(train))
        self.settings = states.training_settings(config, seed, train, validation) | dict(settings or {})
        if len({states.settings_digest(one) for one in ranks.gather(self.settings)}) > 1:
            raise ConfigError(
                "the processes of this training have different settings or pairs, so they would not train one model: "
                "start the same command with the same data on all hosts."
            )
        rm.allow_packing = rm.allow_packing and config.packing
        rm.beta = config.beta
        self.packing = choose_packing(rm, config, ranks)
        if narrows_base(config, ranks) and (narrowed := rm.narrow_base()) and ranks.is_main:
            print(
                f"note: {narrowed / 1e6:.1f} M frozen weights stay bfloat16, as their files have them.", file=sys.stderr
            )
        try:
            self._choose_cut(config)
        except BaseException:
            rm.widen()
            raise
        self.writer = CheckpointWriter(rm, config, folder, self.at.selection, ranks)
        self.best_rewards = np.zeros((0, 2), dtype=np.float32)
        """(P, 2) rewards, chosen first, under the best weights; of the split named below."""
        self.best_rewards_split = "validation"
        self._table: MetricsTable | None = None
        self._chooses = bool(validation) and config.best_metric != LAST
        self._loss = ""  # of the last step that was read

    def _choose_cut(self, config: TrainConfig) -> None:
        """Decide, or read where an earlier run decided, how steps are cut; where this run begins."""
        rm, ranks = self.rm, self.ranks
        found = resume.read_beginning(self.folder, self.settings)
        # What the first rank finds counts for all: another may look while that one begins, and a state is long to read.
        point = resume.find_resume_point(self.folder) if found and ranks.is_main else None
        beginning, self.point = ranks.gather((found, point))[0]
        self.is_new = beginning is None
        if beginning is None:
            budget, recomputed = share_memory(rm, config, self.packing, ranks)
        else:  # of an earlier version: what the settings say
            budget = beginning["token_budget"]
            recomputed = beginning.get("recomputed_share", float(bool(config.gradient_checkpointing)))
        self.config = config.model_copy(update={"gradient_checkpointing": recomputed > 0})
        rm.recomputed_share = recomputed or 1.0
        self.at = (
            Progress(budget, Selection.of(config)) if self.point is None else Progress.from_dict(self.point.record)
        )
        self.feed = make_feed(
            self.train,
            config,
            num_steps=self.num_steps,
            seed=self.seed,
            token_budget=self.at.token_budget,
            pad_id=rm.pad_id,
            ranks=ranks,
            packing=self.packing,
        )
        check_budget(
            self.at.token_budget, self.feed.least_budget(), self.feed.named
        )  # refuses now what would fail later

    def run(self) -> TrainResult:
        """Train to the end, to early stopping, or to an error; the last good state is always on disk.

        Raises:
            TrainingError: loss or gradient is not finite, memory does not suffice, a worker process failed.
            KeyboardInterrupt: after Ctrl-C or SIGTERM, when the step is done (or a worker process has failed) and the
                state saved.
        """
        try:
            return self._run()
        finally:
            self.rm.widen()

    def _run(self) -> TrainResult:
        with ExitStack() as stack:
            interruption = stack.enter_context(deferred_interruption())
            stack.enter_context(training_form(self.rm, self.config))
            context = self._start()
            if self.ranks.is_main:
                self._table = MetricsTable(self.folder / "metrics.csv", self.at.rows)
                stack.callback(self._table.close)
            stepper = Stepper(context, self.feed)
            try:
                stop_reason = self._steps(stepper, interruption)
            except LostWorkerError as error:
                # Among several processes one alone has failed, and cannot gather the others' part of a state.
                if self.at.step and self.ranks.world == 1:
                    self._settle(stepper)
                    self._save_state(context)
                if interruption.asked:
                    raise KeyboardInterrupt from error
                raise
        return self._finish(context, stop_reason)

    def probe(self, num_steps: int) -> tuple[int, float]:
        """Run the first steps to see what they cost; weights change, but stay float32, and nothing is saved.

        Returns:
            Tokens computed, and seconds of one update, which is not among the steps.
        """
        with ExitStack() as stack:
            stack.callback(self.rm.join)
            stack.enter_context(training_form(self.rm, self.config))
            stepper = Stepper(make_context(self.rm, self.config, self.ranks), self.feed)
            for step in range(min(num_steps, self.num_steps)):
                stepper.run(step + 1, *stepper.feed[step])
            num_tokens = sum(result.num_tokens for result, _ in stepper.results())
            started = time.perf_counter()
            stepper.context.optimizer.step(skip=stepper.context.failed)
            if self.rm.device.type == "cuda":
                torch.cuda.synchronize(self.rm.device)
            return num_tokens, time.perf_counter() - started

    def _start(self) -> StepContext:
        """Begin, or resume from the newest state."""
        if self.ranks.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            repair_interrupted(self.folder)
            if self.is_new:
                share = self.rm.recomputed_share if self.config.gradient_checkpointing else 0.0
                chosen = {"token_budget": self.at.token_budget, "recomputed_share": share}
                resume.begin(self.folder, self.settings, chosen)
            else:
                self.writer.go_back(self.point)
        states.seed_everything(self.seed, self.ranks)
        context = make_context(self.rm, self.config, self.ranks)
        self._peak = PeakMeter(context, self.at, self.num_steps)
        if self.point is not None:
            self.best_rewards = restore_training(self.point, self.folder, self.rm, context, num_steps=self.num_steps)
            self.at.resumed_from.append(self.point.step)
        return context

    def _steps(self, stepper: Stepper, interruption: "Interruption") -> str:
        """Run the steps that are left; why they ended."""
        context = stepper.context
        if (reason := self._reason_to_stop()) is not None:  # interrupted just then
            return reason
        if self.config.stop_step is not None and self.config.stop_step <= self.at.step < self.num_steps:
            return resume.CUT_OFF
        saved_at = time.monotonic()
        with steps_from(stepper.feed, self.at.step, self.config, self.rm.device) as steps:
            for step, (indices, batches) in enumerate(steps, self.at.step + 1):
                lr = set_learning_rate(context.optimizer, self.config, step - 1, self.num_steps)
                self._step(stepper, step, indices, batches)
                if not context.deferred or self._is_due(step):
                    self._settle(stepper)
                    self._after_step(step, lr)
                self.report(step, self.num_steps, self._loss)
                stop = self.ranks.agree(interruption.asked)
                stop_reason = self._reason_to_stop()
                if stop_reason is None and step == self.config.stop_step and step < self.num_steps:
                    stop_reason = resume.CUT_OFF
                due = stop_reason is None and time.monotonic() - saved_at >= self.config.resume_every_seconds
                # What resumes from here later needs the state, also to see that it has stopped early.
                kept = stop_reason is not None and self.config.stop_step is not None
                if self.ranks.agree(stop or due or kept):
                    self._settle(stepper)
                    self._save_state(context)
                    saved_at = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
                if stop_reason is not None:
                    return stop_reason
        return ALL_DONE

    def _reason_to_stop(self) -> str | None:
        """Why no further step is worth it, if so."""
        patience = self.config.early_stopping_patience
        if patience is None or self.at.selection.evaluations_since < patience or self.at.step == self.num_steps:
            return None
        return f"{self.config.best_metric} did not improve for {patience} evaluations"

    def _step(self, stepper: Stepper, step: int, indices: Sequence[int], batches: Sequence[Batch]) -> None:
        try:
            with self._peak.around(step):
                stepper.run(step, indices, batches)
        except TrainingError as error:
            self._settle(stepper)  # where a step before this one failed, that is the error to tell
            self._keep_weights(error)
            raise
        self.at.token_budget = stepper.token_budget

    def _settle(self, stepper: Stepper) -> None:
        """Count the steps that were not read yet; waits for the device. Then `at` tells of the present weights."""
        try:
            for result, seconds in stepper.results():
                self.at.add(result, seconds)
                self._loss = f"loss {result.loss:.3f} at step {self.at.step}"
        except TrainingError as error:
            self._keep_weights(error)
            raise

    def _keep_weights(self, error: TrainingError) -> None:
        """After an update that was not applied the weights are still worth keeping."""
        # Among several processes one alone may have failed, and could not gather the others' weights.
        if self.at.step and self.ranks.world == 1 and not isinstance(error, HalfUpdateError):
            self.writer.save_step(self.at.step)

    def _is_due(self, step: int) -> bool:
        """Whether what comes after a step logs, evaluates or saves."""
        every = (self.config.log_every, self.config.eval_every if self.validation else None, self.config.save_every)
        return step == self.num_steps or any(number and step % number == 0 for number in every)

    def _after_step(self, step: int, lr: float) -> None:
        """Log, evaluate and save what is due after a step."""
        last = step == self.num_steps
        try:
            if step % self.config.log_every == 0 or last:
                memory = memory_metrics(self.rm.device) if self.config.profile_memory else {}
                self._log(step, self.at.window.summary(lr) | memory)
                self.at.window = Window()
            if self.validation and (step % self.config.eval_every == 0 or last):
                self._evaluate(step)
        finally:  # an evaluation that fails ends the training, whose last step is told of all the same
            if self._table is not None and step in self.at.rows:
                self._table.add(step, self.at.rows[step])
        if not last:
            self.writer.stepped(step)

    def _evaluate(self, step: int) -> None:
        rewards = self._score(self.validation)
        if not np.isfinite(rewards).all():
            raise TrainingError(
                f"step {step}: rewards of held-out pairs are not finite, so the last updates blew the weights up; the "
                "best checkpoint so far is kept. Lower the learning rate, lengthen the warm-up, or clip harder."
            )
        measured = batch_metrics(
            rewards, self.config.calibration_bins, self.config.eval_thresholds, beta=self.config.beta
        )
        values = {f"eval/{name.replace('@', '_at_')}": value for name, value in measured.items()}
        values["eval/num_pairs"] = float(len(rewards))
        values["cost/train_seconds"] = self.at.totals.seconds
        for callback in self.callbacks:
            values |= callback(Evaluation(step, self.rm, self.validation, rewards, self.config.calibration_bins))
        self._log(step, values)
        if not self._chooses or self.writer.evaluated(step, values[self.config.best_metric]):
            self.best_rewards = rewards
            self._describe_rewards()

    def _describe_rewards(self) -> None:
        if self.ranks.is_main:
            described = {self.best_rewards_split: reward_distribution(self.best_rewards)}
            write_json(self.folder / "reward_distributions.json", described)

    def _score(self, pairs: Sequence[TokenizedPair]) -> np.ndarray:
        budget = min(
            SCORING_TOKEN_BUDGET[self.rm.device.type], self.at.token_budget
        )  # what training fits into, scoring does
        return score_tokenized(
            self.rm, pairs, token_budget=budget, precision=self.config.chosen_precision, ranks=self.ranks
        )

    def _some_trained_on(self) -> list[TokenizedPair]:
        """The first DISTRIBUTION_PAIRS that steps were made of: a short training costs no more than its own pairs."""
        seen = dict[int, None]()
        for step in range(self.at.step):
            seen |= dict.fromkeys(self.feed.order[step])
            if len(seen) >= DISTRIBUTION_PAIRS:
                break
        return implied_pairs([self.train[index] for index in list(seen)[:DISTRIBUTION_PAIRS]])

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self.ranks.is_main:
            self.tracker.metrics(step, values)
        self.at.rows.setdefault(step, {}).update(values)
        self.at.num_rows += 1

    def _save_state(self, context: StepContext) -> None:
        """Write a resumable state of the present step."""
        self._peak.note()
        randoms = self.ranks.gather(states.random_state(context.device))
        tensors = states.collect_state(self.rm.model, context.optimizer, randoms, self.best_rewards)
        write = partial(write_parts, tensors, self.folder, ranks=self.ranks)
        if self.ranks.is_main:
            resume.publish_state(self.folder, self.at.step, write, self.at.to_dict(), self.writer.chosen())
        else:
            write(None)
        self.ranks.wait()

    def _finish(self, context: StepContext, stop_reason: str) -> TrainResult:
        self._peak.note()
        if stop_reason == resume.CUT_OFF:
            self.writer.cut_off(self.at.step)
        else:
            self.writer.finished(self.at.step)
        if not len(self.best_rewards):  # nothing was evaluated, or the metric was never defined
            self.best_rewards = self._score(self._some_trained_on())
            self.best_rewards_split = "train"
        if len(self.best_rewards):
            self._describe_rewards()
        return self.at.result(
            planned_steps=self.num_steps,
            stop_reason=stop_reason,
            best_metric=self.config.best_metric if self._chooses else None,
            peak_memory_bytes=peak_memory_bytes(self.rm.device),
            num_processes=self.ranks.world,
            compiled=context.compiled is not None and context.compiled.works,
        )


def score_tokenized(
    rm: BradleyTerryRM,
    pairs: Sequence[TokenizedPair],
    *,
    token_budget: int,
    precision: Precision = "fp32",
    ranks: Ranks = ALONE,
) -> np.ndarray:
    """Rewards of both sides of P tokenized pairs: (P, 2) float32, chosen first.

    On several ranks each computes a share and all get the result; they compute equally many micro-batches, because
    sharded weights are gathered by all ranks together.
    """
    parts = range(0, len(pairs), SCORED_TOGETHER)
    scored = [_score_part(rm, pairs[at : at + SCORED_TOGETHER], token_budget, precision, ranks) for at in parts]
    return np.concatenate([np.zeros((0, 2), dtype=np.float32), *scored])


def _score_part(
    rm: BradleyTerryRM, pairs: Sequence[TokenizedPair], token_budget: int, precision: Precision, ranks: Ranks
) -> np.ndarray:
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    if ranks.world == 1:
        return rm.score_sides(sides, token_budget=token_budget, precision=precision).reshape(-1, 2)
    sides, which = distinct_sides(sides)
    chunks = rm.scoring_chunks(sides, token_budget=token_budget, precision=precision)
    rewards = torch.zeros(len(sides), dtype=torch.float64, device=rm.device)
    was_training = rm.model.training
    rm.model.eval()
    for start in range(0, len(chunks), ranks.world):
        mine = start + ranks.rank
        chunk = chunks[min(mine, len(chunks) - 1)]
        scored = rm.score_chunk(sides, chunk, precision=precision)
        if mine < len(chunks):
            rewards[[index for group in chunk for index in group]] = scored.double()
    rm.model.train(was_training)
    reshard(rm.model)
    return ranks.sum(rewards).cpu().numpy().astype(np.float32)[which].reshape(-1, 2)


class Interruption:
    """Whether a signal asked this training to stop.

    Ctrl-C and SIGTERM wait for the end of the step, so that what is saved is a whole step and nothing between.
    """

    def __init__(self) -> None:
        self.since: float | None = None

    @property
    def asked(self) -> bool:
        """Whether a signal came."""
        return self.since is not None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal: the first is noted, the second one ends the training at once."""
        if self.since is not None:
            if time.monotonic() - self.since > ECHO_SECONDS:
                raise KeyboardInterrupt
            return
        self.since = time.monotonic()
        # Not print: it would raise RuntimeError where it interrupts a print to the same stream, a progress bar's.
        os.write(2, b"stopping after this step; its state is saved. Once more ends at once.\n")


@contextmanager
def deferred_interruption() -> Iterator[Interruption]:
    """Defer Ctrl-C and SIGTERM (a scheduler's notice) inside the block; in other threads than the main one, nothing.

    What is ignored stays so: a job that a shell started in the background is not to hear the terminal's Ctrl-C.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    heard = [number for number in CAUGHT if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interruption.note) for number in heard}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
