"""Refreshing a reward model while a policy is trained on it: new labels where the policy is now.

A reward model is right where its labels are. As the policy moves away from there, labels on its present samples bring
the reward model after it (iterated RLHF: Bai et al. 2022, arXiv:2204.05862, section 4.5).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rmcore.config.rlhf import RlhfConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.core.files import write_json
from rmcore.core.tracking import NullTracker
from rmcore.data.integrity import select_training_pairs
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.table import read_pairs, write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.local_reward import LocalReward
from rmcore.policy.judge import Judge
from rmcore.training.loop import Trainer

PAIRS_FILE = "pairs.parquet"
REFRESH_FILE = "refresh.json"
"""Written last: a folder without it is of a refresh that was cut off."""
TESTED_SHARE = 0.25
"""Share of the new labels that are only tested on: the training would flatter itself on the others."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """The outcome of one refresh of the reward model.

    step: of the policy.
    weight_version: that the refreshed reward model is served as.
    num_pairs: new labels.
    accuracy_before, accuracy_after: of the reward model on those of them that it was not trained on. Where a watch has
        asked for the refresh, they are among the judgements that convinced it, so `before` is low by selection.
    """

    step: int
    weight_version: int
    num_pairs: int
    accuracy_before: float
    accuracy_after: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True)
class Refresher:
    """Renews the reward model in use.

    reward: in use; its weights are changed in place.
    judge: who labels samples; None: labels come from elsewhere alone.
    prompts: that samples are drawn for.
    old: pairs of the first training.
    train: settings of the first training.
    settings: of the refreshes.
    publish: brings the present weights to who serves them and gives their version; None: nobody serves them.
    labelled: what earlier refreshes were trained on.
    """

    reward: LocalReward
    judge: Judge | None
    prompts: Sequence[Prompt]
    old: Sequence[PreferencePair]
    train: TrainConfig
    settings: RlhfConfig
    publish: Callable[[BradleyTerryRM], int] | None
    labelled: list[PreferencePair] = field(default_factory=list)

    def ask(
        self, sample: Callable[[Sequence[Prompt]], Sequence[Sequence[str]]], step: int, seed: int
    ) -> list[PreferencePair]:
        """Have pairs of the policy's present samples labelled.

        Args:
            sample: two or more responses of the policy to each prompt.
            step: of the policy.
            seed: of the run; each step draws its own prompts.

        Raises:
            ConfigError: there is no judge.
        """
        if self.judge is None:
            raise ConfigError("there is no judge to label the policy's samples: name one, or give labelled pairs.")
        rng = random.Random(f"refresh {seed} {step}")  # noqa: S311 - data, not cryptography
        asked = rng.sample(list(self.prompts), min(len(self.prompts), self.settings.refresh_pairs))
        return label_samples(asked, sample(asked), self.judge, self.settings.refresh_pairs, rng)

    def __call__(self, labelled: Sequence[PreferencePair], step: int, folder: Path, seed: int) -> Refresh:
        """Train on labelled pairs, save to `folder`, publish.

        Args:
            labelled: where the policy is now; a quarter of them, drawn at random, is only tested on.
            step: of the policy.
            folder: for the checkpoint (`best/`), the pairs that were trained on (`pairs.parquet`), and what came out
                (`refresh.json`), before it is published.
            seed: of the run.

        Raises:
            TrainingError: too few pairs are labelled.
            ServingError, RequestError: the server did not take the weights.
        """
        order = list(dict.fromkeys(pair.prompt_id for pair in labelled))
        random.Random(f"tested {seed} {step}").shuffle(order)  # noqa: S311 - data, not cryptography
        places = {prompt: place for place, prompt in enumerate(order)}
        new = sorted(labelled, key=lambda pair: places[pair.prompt_id])
        before, after, trained = train_further(
            self.reward.rm, new, self.old, self.train, self.settings,
            earlier=self.labelled, folder=folder, seed=seed + step,
        )  # fmt: skip
        write_pairs(trained, folder / PAIRS_FILE)
        found: dict[str, Any] = {
            "step": step, "num_pairs": len(new), "accuracy_before": before, "accuracy_after": after,
        }  # fmt: skip
        write_json(folder / REFRESH_FILE, found)
        return Refresh(weight_version=self._adopt(self.reward.rm, trained), **found)

    def restore(self, folders: Sequence[Path]) -> None:
        """Put the reward model of the last of some refreshes into use, as it was after it.

        Args:
            folders: of all refreshes so far, oldest first.
        """
        for folder in folders[:-1]:
            self.labelled.extend(read_pairs(folder / PAIRS_FILE))
            self.reward.version += 1
        if folders:
            rm = self.reward.rm
            kept = BradleyTerryRM.from_pretrained(
                folders[-1] / "best", device=rm.device.type, render_fn=rm.renderer.rendering.render_fn
            )
            self._adopt(kept, read_pairs(folders[-1] / PAIRS_FILE))

    def _adopt(self, rm: BradleyTerryRM, trained: Sequence[PreferencePair]) -> int:
        """Use `rm` from now on, fit its members, and publish it; the version that it is served as."""
        self.labelled.extend(trained)
        self.reward.rm = rm
        self.reward.refit([*self.old, *self.labelled], self.reward.version + 1)
        return self.reward.version if self.publish is None else self.publish(rm)


def label_samples(
    prompts: Sequence[Prompt], responses: Sequence[Sequence[str]], judge: Judge, num_pairs: int, rng: random.Random
) -> list[PreferencePair]:
    """Have pairs of samples labelled: two different, non-empty ones of each prompt, until there are `num_pairs`.

    Args:
        prompts: in the order in which they are asked for.
        responses: the samples of each prompt, two or more.
        judge: who labels; a pair without a preference is passed over.
        num_pairs: at most.
        rng: source of the annotator's noise.
    """
    pairs: list[PreferencePair] = []
    for prompt, pool in zip(prompts, responses, strict=True):
        different = [text for text in dict.fromkeys(pool) if text.strip()]
        if len(different) >= 2 and len(pairs) < num_pairs:
            labelled = judge.label(prompt, different[0], different[1], rng)
            pairs += [] if labelled is None else [labelled]
    return pairs


def train_further(
    rm: BradleyTerryRM,
    new: Sequence[PreferencePair],
    old: Sequence[PreferencePair],
    config: TrainConfig,
    settings: RlhfConfig,
    *,
    earlier: Sequence[PreferencePair] = (),
    folder: Path,
    seed: int,
) -> tuple[float, float, list[PreferencePair]]:
    """Train `rm` in place on the labels of all refreshes and as many old ones, and save it to `folder/best`.

    Args:
        rm: the reward model in use.
        new: labelled where the policy is now, those of a prompt together; the last quarter is tested on.
        old: pairs of the first training, of which some are mixed in lest they be forgotten.
        config: of the first training; optimizer and batch are its.
        settings: steps and learning rate.
        earlier: pairs that earlier refreshes were trained on.
        folder: for the checkpoint.
        seed: of the choice and the order.

    Returns:
        Accuracy on the tested pairs before and after, and the new pairs that were trained on.

    Raises:
        TrainingError: too few of the policy's samples could be labelled.
    """
    num_tested = int(len(new) * TESTED_SHARE)
    while num_tested and new[-num_tested].prompt_id == new[-num_tested - 1].prompt_id:
        num_tested -= 1  # no prompt is on both sides
    trained, tested = list(new[: len(new) - num_tested]), new[len(new) - num_tested :]
    if not tested:
        raise TrainingError(
            f"only {len(new)} pairs of the policy's samples could be labelled, too few to refresh the reward model "
            "with: its samples are all alike, empty, or judged equal. Refresh sooner, so that it has not collapsed yet "
            "(rlhf.refresh_every), or with more labels (rlhf.refresh_pairs)."
        )
    before = _accuracy(rm, tested)
    rng = random.Random(f"refresh {seed}")  # noqa: S311 - data, not cryptography
    labelled = [*trained, *earlier]
    mixed = labelled + rng.sample(list(old), min(len(old), len(labelled)))
    quick = config.to_the_end(
        steps=settings.refresh_steps, lr=settings.refresh_lr, warmup_steps=min(5, settings.refresh_steps)
    )
    kept, _ = select_training_pairs(rm.renderer.tokenize_readable(mixed).tokenized, over_length=config.over_length)
    Trainer(rm, quick, train=kept, validation=[], folder=folder, tracker=NullTracker(), seed=seed).run()
    return before, _accuracy(rm, tested), trained


def _accuracy(rm: BradleyTerryRM, pairs: Sequence[PreferencePair]) -> float:
    """Share of pairs ranked as labelled, ties half."""
    rewards = rm.score_pairs(pairs).astype(np.float64)
    margin = rewards[:, 0] - rewards[:, 1]
    return float((margin > 0).mean() + (margin == 0).mean() / 2)
