"""The training loop: feed, step, evaluate, save; when to stop, and how to resume.

`Trainer._train` is the loop; the methods below it are in the order in which it calls them, and behind the class is what
precedes the first step: the form of the rows, the token budget, what all steps share. The loop knows pairs, a model and
a folder; a tracker receives its numbers.

Resuming is exact. A saved state holds everything that the next step depends on, and the order of the data is a pure
function of the seed, so on a CPU a training that was killed at any point ends with the same bits as one that was not.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, ModelError, TrainingError
from rmcore.core.files import write_json
from rmcore.core.hardware import choose_precision
from rmcore.core.progress import Report, silent
from rmcore.core.tracking import Tracker
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized_observations import TokenizedObservation, implied_pairs
from rmcore.evaluation.report_card import batch_metrics
from rmcore.models.batching import check_budget
from rmcore.models.compiling import CompiledLayers
from rmcore.models.device import total_bytes
from rmcore.models.layers import recompute_layers
from rmcore.models.packing.layout import Packing
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.scoring import SCORING_TOKEN_BUDGET
from rmcore.training import resume
from rmcore.training import state as states
from rmcore.training.evaluation import Callback, Evaluation, reward_distribution, score_tokenized
from rmcore.training.feed import make_feed, steps_from
from rmcore.training.interruption import Interruption, deferred_interruption
from rmcore.training.losses import make_bradley_terry
from rmcore.training.material import make_observation_forward
from rmcore.training.memory import choose_memory
from rmcore.training.optimizers import OptimizerSet, make_optimizer, set_learning_rate
from rmcore.training.profiling import PeakMeter, memory_metrics, peak_memory_bytes, step_profiler
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.record import LAST, MetricsTable, Progress, Selection, TrainResult, Window, planned_steps
from rmcore.training.resume import RESUME_FOLDER, ResumePoint
from rmcore.training.saving import CheckpointWriter, StateSaver, repair_interrupted, require_shared
from rmcore.training.sharding import reshard, shard
from rmcore.training.step import PartialUpdateError, StepContext, Stepper, make_forward
from rmcore.training.train_mode import HalfWeights, find_half_weights, training_form, uses_half_weights

DISTRIBUTION_PAIRS = 100
"""Number of training pairs whose rewards are described where there are no validation pairs. Scoring a pair costs a
third of training on it, so a hundred cost as much as two steps of 16, and give the mean to a tenth of a standard
deviation."""
ALL_DONE = "all steps done"
BF16_NOTE = "note: trains in bf16, with weights, reward head and loss in float32; train.precision=fp32 rounds nothing."
WHOLE_SHARE = 0.25
"""Share of the memory besides a rank's slices that gathered weights and gradients may take: activations have half."""
TINY_PARAMETERS = 5_000_000
"""Parameters below which a model counts as tiny where its name is not known; `tiny-wide`, the largest, has 3.3 M."""
SCORES_COMPILED = {"cuda": True, "cpu": False}
"""Whether the evaluations of a training that compiles its layers use them, too; compiling again, without gradients,
takes longer on a CPU than it saves."""


class Trainer:
    """Trains one reward model into one folder.

    The folder then holds `metrics.csv` and `reward_distributions.json`, which grow during the training, `best/`,
    `step_<last>/`, and `step_*/` every `save_every` steps or among the `keep_top_k` best. (The tracker writes
    `metrics.jsonl`.) During the training, `resume/` holds the newest states; a Trainer for such a folder resumes from
    the newest valid one.

    Args:
        rm: the model; trained in place, and sharded in place on several ranks. From then on `config.packing` holds for
            its scoring too, and its `beta` is `config.beta`.
        config: settings.
        train: P tokenized training pairs; or, after `rmcore.training.material.attach`, observations of any kind.
        validation: held-out pairs for choosing the best step. May be empty: then best is the last step and nothing
            stops early, as with `best_metric="last"`.
        folder: where checkpoints are written.
        tracker: receives metrics by step.
        seed: seed of data order and dropout.
        report: called after each step, with the steps done, the steps planned and the loss.
        callbacks: called after each evaluation.
        settings: further settings that determine the result, by dotted name; a state with other settings is refused.
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
        if any(others != self.settings for others in ranks.gather(self.settings)):
            raise ConfigError(
                "the processes of this training have different settings or pairs, so they would not train one model. "
                "Start the same command with the same data on all hosts."
            )
        rm.allow_packing = rm.allow_packing and config.packing
        rm.beta = config.beta
        self.packing = choose_packing(rm, config, ranks)
        # Autocast rounds the same, so the base's format changes no number.
        may_narrow = config.chosen_precision == "bf16" and ranks.world == 1
        if may_narrow and (narrowed := rm.narrow_base()):
            print(f"note: {narrowed / 1e6:.1f} M frozen weights stay bfloat16, as in their files.", file=sys.stderr)
        try:
            self._choose_micro_batches(config)
        except BaseException:
            rm.widen()
            raise
        self.writer = CheckpointWriter(rm, config, folder, self.progress.selection, ranks)
        self.best_rewards = np.zeros((0, 2), dtype=np.float32)
        """(P, 2) rewards, chosen first, under the best weights; of the split named below."""
        self.best_rewards_split = "validation"
        self._table: MetricsTable | None = None
        self._chooses = bool(validation) and config.best_metric != LAST
        self._loss = ""  # the loss of the newest step whose results were read, for the progress line

    def _choose_micro_batches(self, config: TrainConfig) -> None:
        """Choose token budget and recomputed layers, or read what an earlier attempt chose; find where to resume."""
        rm, ranks = self.rm, self.ranks
        found = resume.read_beginning(self.folder, self.settings)
        # Only rank 0 looks for a state, and all ranks use what it finds: reading a state takes long, and another rank
        # might look at the folder after rank 0 has changed it.
        point = resume.find_resume_point(self.folder) if found and ranks.is_main else None
        beginning, self.point = ranks.gather((found, point))[0]
        self.is_new = beginning is None
        if beginning is None:
            budget, recomputed = share_memory(rm, config, self.packing, ranks)
        else:
            budget, recomputed = beginning["token_budget"], beginning["recomputed_share"]
        self.config = config.model_copy(update={"gradient_checkpointing": recomputed > 0})
        rm.recomputed_share = recomputed or 1.0
        self.progress = (
            Progress(budget, Selection.of(config)) if self.point is None else Progress.from_dict(self.point.record)
        )
        self.feed = make_feed(
            self.train,
            config,
            num_steps=self.num_steps,
            seed=self.seed,
            token_budget=self.progress.token_budget,
            pad_id=rm.pad_id,
            ranks=ranks,
            packing=self.packing,
        )
        # Refuses a pair that is too large now, and not in the middle of the training.
        check_budget(self.progress.token_budget, self.feed.least_budget(), self.feed.named)

    def run(self) -> TrainResult:
        """Train to the end, to early stopping, or to an error; the last good state is always on disk.

        Raises:
            TrainingError: loss or gradient is not finite, memory is insufficient, or a worker process failed.
            ConfigError: several processes do not see the same folder.
            KeyboardInterrupt: after Ctrl-C or SIGTERM, once the current step is done and the state is saved.
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
                self._table = MetricsTable(self.folder / "metrics.csv", self.progress.rows)
                stack.callback(self._table.close)
            self._saver = stack.enter_context(StateSaver(self.folder, self.config.resume_every_seconds, self.ranks))
            stepper = Stepper(context, self.feed)
            profiles = self.config.profile_gpu and self.ranks.is_main
            left = self.num_steps - self.progress.step
            self._profiled = stack.enter_context(step_profiler(self.folder, context.device, left)) if profiles else None
            stop_reason = self._train(stepper, interruption)
        return self._finish(context, stop_reason)

    def _start(self) -> StepContext:
        """Begin the training, or restore the newest state."""
        require_shared(self.folder, self.ranks)
        if self.ranks.is_main:
            repair_interrupted(self.folder)
            if self.is_new:
                share = self.rm.recomputed_share if self.config.gradient_checkpointing else 0.0
                chosen = {"token_budget": self.progress.token_budget, "recomputed_share": share}
                resume.begin(self.folder, self.settings, chosen)
            else:
                self.writer.go_back(self.point)
        states.seed_everything(self.seed, self.ranks)
        context = make_context(self.rm, self.config, self.ranks)
        self._peak = PeakMeter(context, self.progress, self.num_steps)
        if self.point is not None:
            self.best_rewards = restore_training(self.point, self.folder, self.rm, context, num_steps=self.num_steps)
            self.progress.resumed_from.append(self.point.step)
        return context

    def _train(self, stepper: Stepper, interruption: Interruption) -> str:
        """Run the remaining steps and return why they ended."""
        context, config = stepper.context, self.config
        # An earlier attempt may have been killed after its last step and before its end was recorded.
        if (reason := self._reason_to_stop(self.progress.step)) is not None:
            return reason
        with steps_from(stepper.feed, self.progress.step, config, self.rm.device) as steps:
            for step, (indices, batches) in enumerate(steps, self.progress.step + 1):
                # 1. Forward, backward, update.
                lr = set_learning_rate(context.optimizer, config, step - 1, self.num_steps)
                try:
                    with self._peak.around(step):
                        stepper.run(step, indices, batches)
                    if self._profiled is not None:
                        self._profiled()
                except TrainingError as error:
                    self._read_results(stepper)  # raises instead if an earlier step had failed already
                    self._keep_weights(error)
                    raise
                self.progress.token_budget = stepper.token_budget

                # 2. Log, evaluate, keep checkpoints.
                logs, evaluates, saves = self._is_due(step)
                # On a GPU, results are read only when they are needed: reading waits for the device.
                if logs or evaluates or saves or not context.deferred:
                    self._read_results(stepper)
                    try:
                        if logs:
                            self._log_window(step, lr)
                        if evaluates:
                            self._evaluate(step)
                    finally:  # the step is recorded even if its evaluation fails and ends the training
                        self._tabulate(step)
                    if saves and step < self.num_steps:  # `_finish` saves the last step
                        self.writer.save_step(step)
                self.report(step, self.num_steps, self._loss)

                # 3. Save a state to resume from; stop where the training ends early or a signal asks for it.
                reason = self._reason_to_stop(step)
                interrupted = self.ranks.agree(interruption.requested)
                due = reason is None and self._saver.is_due()
                if self.ranks.agree(interrupted or due):
                    self._read_results(stepper)
                    self._save_state(context, last=interrupted)
                if interrupted:
                    raise KeyboardInterrupt
                if reason is not None:
                    return reason
        return ALL_DONE

    def _is_due(self, step: int) -> tuple[bool, bool, bool]:
        """Return whether a step is followed by a log line, an evaluation and a checkpoint of its own."""
        config, last = self.config, step == self.num_steps
        logs = last or step % config.log_every == 0
        evaluates = bool(self.validation) and (last or step % config.eval_every == 0)
        return logs, evaluates, self.writer.is_periodic(step)

    def _reason_to_stop(self, step: int) -> str | None:
        """Return why the training ends after `step` although more steps are planned; None if it does not."""
        if step == self.num_steps:
            return None
        patience = self.config.early_stopping_patience
        if patience is not None and self.progress.selection.evaluations_since >= patience:
            return f"{self.config.best_metric} did not improve for {patience} evaluations"
        return None

    def _read_results(self, stepper: Stepper) -> None:
        """Wait for the device and record all steps so far. From then on `progress` describes the current weights."""
        try:
            for result, seconds in stepper.results():
                self.progress.add(result, seconds)
                self._loss = f"loss {result.loss:.3f} at step {self.progress.step}"
        except TrainingError as error:
            self._keep_weights(error)
            raise

    def _keep_weights(self, error: TrainingError) -> None:
        """Save the weights after an update that was not applied: they are those of the step before it."""
        # With several processes only one may have failed, and it could not gather the others' weights.
        if self.progress.step and self.ranks.world == 1 and not isinstance(error, PartialUpdateError):
            self.writer.save_step(self.progress.step)

    def _log_window(self, step: int, lr: float) -> None:
        """Log the averages since the last log line."""
        memory = memory_metrics(self.rm.device) if self.config.profile_memory else {}
        self._log(step, self.progress.window.summary(lr) | memory)
        self.progress.window = Window()

    def _evaluate(self, step: int) -> None:
        """Evaluate the held-out pairs, log the metrics, and keep the checkpoint if it is the best so far."""
        rewards = self._score(self.validation)  # (V, 2)
        if not np.isfinite(rewards).all():
            raise TrainingError(
                f"step {step}: the rewards of held-out pairs are not finite, so the last updates made the weights "
                "diverge. The best checkpoint so far is kept. Lower the learning rate, lengthen the warm-up, or clip "
                "the gradient harder."
            )
        measured = batch_metrics(rewards, beta=self.config.beta)
        values = {f"eval/{name.replace('@', '_at_')}": value for name, value in measured.items()}
        values["eval/num_pairs"] = float(len(rewards))
        values["cost/train_seconds"] = self.progress.totals.seconds
        for callback in self.callbacks:
            values |= callback(Evaluation(step, self.rm, self.validation, rewards))
        self._log(step, values)
        if not self._chooses or self.writer.evaluated(step, values[self.config.best_metric]):
            self.best_rewards = rewards
            self._describe_rewards()

    def _score(self, pairs: Sequence[TokenizedPair]) -> np.ndarray:
        # What fits into memory with gradients fits without them.
        budget = min(SCORING_TOKEN_BUDGET[self.rm.device.type], self.progress.token_budget)
        return score_tokenized(
            self.rm, pairs, token_budget=budget, precision=self.config.chosen_precision, ranks=self.ranks
        )

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self.ranks.is_main:
            self.tracker.metrics(step, values)
        self.progress.rows.setdefault(step, {}).update(values)
        self.progress.num_rows += 1

    def _tabulate(self, step: int) -> None:
        if self._table is not None and step in self.progress.rows:
            self._table.add(step, self.progress.rows[step])

    def _describe_rewards(self) -> None:
        if self.ranks.is_main:
            described = {self.best_rewards_split: reward_distribution(self.best_rewards)}
            write_json(self.folder / "reward_distributions.json", described)

    def _save_state(self, context: StepContext, *, last: bool) -> None:
        """Save a state of the current step that a later attempt can resume from; wait for it if it is the `last`."""
        self._peak.note()
        randoms = self.ranks.gather(states.random_state(context.device))
        tensors = states.collect_state(self.rm.model, context.optimizer, randoms, self.best_rewards)
        self._saver.save(self.progress.step, tensors, self.progress.to_dict(), self.writer.chosen(), last=last)

    def _finish(self, context: StepContext, stop_reason: str) -> TrainResult:
        self._peak.note()
        self.writer.finished(self.progress.step)
        if not len(self.best_rewards):  # nothing was evaluated, or the metric was never defined
            self.best_rewards = self._score(self._first_trained_pairs())
            self.best_rewards_split = "train"
        if len(self.best_rewards):
            self._describe_rewards()
        return self.progress.result(
            planned_steps=self.num_steps,
            stop_reason=stop_reason,
            best_metric=self.config.best_metric if self._chooses else None,
            peak_memory_bytes=peak_memory_bytes(self.rm.device),
            num_processes=self.ranks.world,
            compiled=context.compiled is not None and context.compiled.works,
        )

    def _first_trained_pairs(self) -> list[TokenizedPair]:
        """Return the first DISTRIBUTION_PAIRS of the training pairs, in the order of the steps."""
        seen = dict[int, None]()
        for step in range(self.progress.step):
            seen |= dict.fromkeys(self.feed.order[step])
            if len(seen) >= DISTRIBUTION_PAIRS:
                break
        return implied_pairs([self.train[index] for index in list(seen)[:DISTRIBUTION_PAIRS]])

    def probe(self, num_steps: int) -> int:
        """Run the first steps to measure their cost. The weights change, end as float32, and nothing is saved.

        Returns:
            Number of computed tokens.
        """
        with ExitStack() as stack:
            stack.callback(self.rm.join)
            stack.enter_context(training_form(self.rm, self.config))
            stepper = Stepper(make_context(self.rm, self.config, self.ranks), self.feed)
            for step in range(min(num_steps, self.num_steps)):
                stepper.run(step + 1, *stepper.feed[step])
            # Reading the results waits for the device, so the caller's timing includes all of the work.
            return sum(result.num_tokens for result, _ in stepper.results())


def with_precision(config: TrainConfig, rm: BradleyTerryRM, device: torch.device) -> TrainConfig:
    """The same settings, with what `precision=auto` stands for where `rm` trains on `device`, which is said."""
    if config.precision != "auto":
        return config
    chosen = choose_precision(device.type, tiny=rm.num_parameters < TINY_PARAMETERS)
    if chosen == "bf16":
        print(BF16_NOTE, file=sys.stderr)
    return config.model_copy(update={"precision": chosen})


def choose_packing(rm: BradleyTerryRM, config: TrainConfig, ranks: Ranks) -> Packing | None:
    """How rows are packed in training; None: padded. All ranks must ask: weights that are sharded are gathered for it.

    Raises:
        ConfigError: some ranks can pack and others cannot, so they would cut a step differently and wait for ever.
    """
    found = _own_packing(rm, config)
    by_rank = ranks.gather(found)
    if any(other != found for other in by_rank):
        raise ConfigError(
            f"of {ranks.world} processes some can pack rows and some cannot ({by_rank}): their devices or libraries "
            "differ. Train with packing=false, or on machines that are alike."
        )
    return found


def _own_packing(rm: BradleyTerryRM, config: TrainConfig) -> Packing | None:
    if config.batching == "plain":  # which is padded by definition
        return None
    found = rm.packing(config.chosen_precision)
    reshard(rm.model)
    if found is None:
        return None
    reason = None
    if config.compile and found.kernel == "sdpa":
        reason = "torch.compile needs attention as one operation"
    elif config.dropout and found.kernel == "varlen":
        reason = "the kernel that packs on a GPU has no dropout (train.dropout=false)"
    if reason:
        print(f"note: pairs are padded, not packed: {reason}.", file=sys.stderr)
        return None
    if config.compile and found.reads_last:
        print("note: the last layer is computed for all tokens: its two parts are not compiled.", file=sys.stderr)
        return replace(found, reads_last=False)
    return found


def share_memory(rm: BradleyTerryRM, config: TrainConfig, packing: Packing | None, ranks: Ranks) -> tuple[int, float]:
    """Tokens of a micro-batch, and the share of recomputed layers: the same on all ranks, which must all ask.

    Raises:
        ConfigError: see `choose_memory`.
    """
    own = choose_memory(
        rm.model, config, packing, max_seq_len=rm.renderer.rendering.max_seq_len, device=rm.device, world=ranks.world
    )
    chosen = ranks.gather(own)  # GPUs may differ, and all must cut a step alike
    return min(budget for budget, _ in chosen), max(share for _, share in chosen)


def make_context(rm: BradleyTerryRM, config: TrainConfig, ranks: Ranks) -> StepContext:
    """Bring the model into its training form, sharded where there are several ranks; what all steps share."""
    recompute_layers(rm.model, rm.recomputed_share if config.gradient_checkpointing else 0.0)
    shard(rm, ranks, config.chosen_precision)
    device = rm.device
    optimizer = make_optimizer(rm.model, config)
    if config.optimizer == "adamw8bit":  # the weights are narrow now
        rm.split = optimizer
    weights = _half_weights(rm, device) if uses_half_weights(config, device) and ranks.world == 1 else None
    computes_as_it_is = weights is not None or ranks.world > 1  # see `shard`
    precision = "fp32" if computes_as_it_is else config.chosen_precision
    if rm.companion is None:
        forward = make_forward(rm.model, make_bradley_terry(config), precision, device)
    else:
        forward = make_observation_forward(rm, precision, device)
    compiled = CompiledLayers(rm.model) if config.compile else None
    # One of several ranks that failed to compile would compute again alone, and the others would wait for ever.
    rm.compiled = compiled if SCORES_COMPILED[device.type] and ranks.world == 1 else None
    return StepContext(
        model=rm.model,
        forward=forward,
        optimizer=optimizer,
        clip=config.clip,
        device=device,
        ranks=ranks,
        failed=torch.zeros((), device=device) if can_defer(optimizer, device) else None,
        compiled=compiled,
        half=weights,
        holds_whole=_holds_whole(rm, config, ranks),
    )


def _half_weights(rm: BradleyTerryRM, device: torch.device) -> HalfWeights | None:
    try:
        return find_half_weights(rm.model, device)
    except ModelError as reason:
        print(f"note: {reason}; it trains by autocast.", file=sys.stderr)
        return None


def _holds_whole(rm: BradleyTerryRM, config: TrainConfig, ranks: Ranks) -> bool:
    """Whether memory takes the whole model's gathered weights and float32 gradients on each rank, activations aside."""
    if ranks.world == 1:
        return True
    gathered = (2 if config.chosen_precision == "bf16" else 4) + 4
    state = 16 * rm.num_parameters // ranks.world  # weights, gradients and two moments, in float32
    room = WHOLE_SHARE * max(0, total_bytes(rm.device) - state)
    return all(ranks.gather(gathered * rm.num_parameters <= room))


def can_defer(optimizer: OptimizerSet, device: torch.device) -> bool:
    """Whether steps need not be read before their update. On a CPU reading is free, so a bad step ends at once."""
    return device.type == "cuda" and optimizer.can_skip


def restore_training(
    point: ResumePoint, folder: Path, rm: BradleyTerryRM, context: StepContext, *, num_steps: int
) -> np.ndarray:
    """Put weights, optimizer and, for as many ranks as then, random states back; the rewards under the best weights."""
    ranks = context.ranks
    randoms, rewards = states.load_state(folder / RESUME_FOLDER / point.state.name, rm.model, context.optimizer)
    ranks.wait()  # until everybody has read it
    if len(randoms) == ranks.world:
        states.set_random_state(randoms[ranks.rank], context.device)
    if ranks.is_main:
        for note in point.notes:
            print(f"warning: {note}", file=sys.stderr)
        print(f"resumed from step {point.step} of {num_steps} ({point.state.parent})", file=sys.stderr)
    return rewards
