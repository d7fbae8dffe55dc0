"""Who says what really counts, of single responses and of pairs: the gold world, a function of the user's, or another
reward model. Imports no torch, unless that is asked for.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rmcore.config.data import GoldConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.named_function import call_named, load_function
from rmcore.data.gold.world import gold_reward, label_pair
from rmcore.data.pair import PreferencePair, Prompt, prompt_text

if TYPE_CHECKING:
    from rmcore.models.reward_model import BradleyTerryRM

JUDGE_SETTING = "policy.judge"
JUDGE_MEANING = "a function of (prompt, response) that returns a number"


class Judge(Protocol):
    """Gives the gold reward, and labels."""

    @property
    def name(self) -> str:
        """As people read it."""

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """The gold reward of N responses, (N,), finite.

        Raises:
            DataError: there is none for a response.
        """

    def label(self, prompt: Prompt, first: str, second: str, rng: random.Random) -> PreferencePair | None:
        """Which of two different responses is preferred; None where neither is.

        Raises:
            DataError: a response has no reward.
        """


@dataclass(frozen=True, slots=True)
class GoldJudge:
    """The gold world: its reward judges, and its annotator, who errs as in the training pairs, labels."""

    config: GoldConfig
    name: str = "the gold world"

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """See `Judge`."""
        both = zip(prompts, responses, strict=True)
        return np.array([gold_reward(prompt_text(prompt), response) for prompt, response in both], dtype=np.float64)

    def label(self, prompt: Prompt, first: str, second: str, rng: random.Random) -> PreferencePair | None:
        """See `Judge`."""
        return label_pair(prompt_text(prompt), first, second, self.config, rng, "refresh")


@dataclass(frozen=True, slots=True)
class HookJudge:
    """A function of (prompt, response) -> number; the prompt as it is in the data, text or turns."""

    name: str
    function: Callable[[Prompt, str], Any]

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """See `Judge`."""
        found = [self._reward(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        return np.array(found, dtype=np.float64)

    def label(self, prompt: Prompt, first: str, second: str, rng: random.Random) -> PreferencePair | None:
        """See `Judge`: the higher reward is preferred."""
        return _higher(prompt, first, second, [self._reward(prompt, text) for text in (first, second)])

    def _reward(self, prompt: Prompt, response: str) -> float:
        value = call_named(JUDGE_SETTING, self.name, self.function, prompt, response)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise DataError(
                f"{JUDGE_SETTING}={self.name} gave {value!r} for the response {response[:60]!r}; a finite number is "
                "expected for every response, empty ones included."
            )
        return float(value)


@dataclass(frozen=True, slots=True)
class ModelJudge:
    """Another reward model, whose reward stands in for the gold one (as in Gao, Schulman and Hilton 2023)."""

    name: str
    rm: "BradleyTerryRM"

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """See `Judge`."""
        return self.rm.score(prompts, responses).astype(np.float64)

    def label(self, prompt: Prompt, first: str, second: str, rng: random.Random) -> PreferencePair | None:
        """See `Judge`: the higher reward is preferred."""
        return _higher(prompt, first, second, self.rewards([prompt, prompt], [first, second]).tolist())


def _higher(prompt: Prompt, first: str, second: str, rewards: Sequence[float]) -> PreferencePair | None:
    if rewards[0] == rewards[1]:
        return None
    chosen, rejected = (first, second) if rewards[0] > rewards[1] else (second, first)
    return PreferencePair(prompt=prompt, chosen=chosen, rejected=rejected)


def is_function(named: str) -> bool:
    """Whether `policy.judge` names a function, and not a folder."""
    return ":" in named


def judge_name(named: str) -> str:
    """`policy.judge` as people read it: a function by its name, a reward model by that of its folder."""
    return named if is_function(named) else f"the reward model {Path(named).name}"


def require_named_judge(named: str) -> None:
    """Check that `policy.judge` is there.

    Raises:
        ConfigError: the function cannot be imported, or there is no such folder of a reward model.
    """
    if is_function(named):
        load_function(JUDGE_SETTING, named, JUDGE_MEANING)
    else:
        require_model_folder(named)


def require_people(folder: str) -> None:
    """Check a folder for the files of pairs that people judge, which is made where it is not there.

    Raises:
        ConfigError: it is a file, or is named relative to wherever the run may be.
    """
    if not Path(folder).is_absolute():
        raise ConfigError(f"the folder for people's files is {folder!r}; name it from the root (/…/{folder}).")
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"{folder} is a file, and people's files of pairs need a folder; name another place.")


def require_model_folder(named: str) -> None:
    """Check that `policy.judge`, which is no function, is the folder of a reward model.

    Raises:
        ConfigError: it is not.
    """
    if not (Path(named) / "config.json").is_file():
        raise ConfigError(
            f"{JUDGE_SETTING}={named} is neither module:function nor the folder of a reward model (config.json and "
            "weights, such as a checkpoint's best/)."
        )


def judge_of(named: str | None, gold: GoldConfig | None, device: str = "auto") -> Judge | None:
    """The judge of a run: the named function or reward model, else the gold world on its own data, else None.

    Args:
        named: `policy.judge`.
        gold: the gold world, where the pairs are its own.
        device: of a reward model that judges.

    Raises:
        ConfigError: what is named is not there.
        ModelError: the reward model cannot be loaded.
    """
    if named is None:
        return None if gold is None else GoldJudge(gold)
    if is_function(named):
        return HookJudge(named, load_function(JUDGE_SETTING, named, JUDGE_MEANING))
    require_model_folder(named)
    from rmcore.models.device import pick_device
    from rmcore.models.reward_model import BradleyTerryRM

    return ModelJudge(judge_name(named), BradleyTerryRM.from_pretrained(named, device=pick_device(device).type))
