"""Reward models from preference pairs: trained, measured with honest intervals, and judged.

    import rmcore

    pairs = rmcore.load_pairs("pairs.csv")
    splits = rmcore.split_by_prompt(pairs, fractions={"train": 0.75, "validation": 0.1, "test": 0.15}, seed=0)
    rm = rmcore.train(splits["train"], "minilm", validation=splits["validation"], output_dir="out")
    metrics = rmcore.evaluate(rm, splits["test"])
    print(rmcore.verdict(metrics, rmcore.evaluate(rm, splits["train"]))["headline"])
    print(rmcore.score(rm, "What is 2 + 2?", "It is 4."))

The names below are imported when they are used, so `import rmcore` loads neither torch nor transformers.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmcore.active.learner import ActiveLearner
    from rmcore.data.pair import PreferencePair
    from rmcore.data.splits import split_by_prompt
    from rmcore.ensembles.ensemble import RewardModelEnsemble
    from rmcore.frontdoor import evaluate, load_pairs, score, train, verdict
    from rmcore.models.reward_model import BradleyTerryRM
    from rmcore.readiness.original_score import RLReadinessScorer
    from rmcore.tutorial import create_dataloader, train_reward_model

    __all__ = [
        "ActiveLearner",
        "BradleyTerryRM",
        "PreferencePair",
        "RLReadinessScorer",
        "RewardModelEnsemble",
        "create_dataloader",
        "evaluate",
        "load_pairs",
        "score",
        "split_by_prompt",
        "train",
        "train_reward_model",
        "verdict",
    ]

_PLACES = {
    **dict.fromkeys(("load_pairs", "train", "evaluate", "score", "verdict"), "rmcore.frontdoor"),
    "PreferencePair": "rmcore.data.pair",
    "split_by_prompt": "rmcore.data.splits",
    "BradleyTerryRM": "rmcore.models.reward_model",
    "RewardModelEnsemble": "rmcore.ensembles.ensemble",
    "RLReadinessScorer": "rmcore.readiness.original_score",
    "ActiveLearner": "rmcore.active.learner",
    "create_dataloader": "rmcore.tutorial",
    "train_reward_model": "rmcore.tutorial",
}
"""Modules of the public names, but for those of capabilities."""


@cache
def _places() -> dict[str, str]:
    """Modules of all public names. Capabilities are asked when a name needs it: each process imports this package."""
    from rmcore.core.capabilities import capabilities

    folders = capabilities().items()
    return _PLACES | {name: f"rmcore.{folder}.{file}" for folder, one in folders for name, file in one.public.items()}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_places())
    place = _PLACES.get(name) or _places().get(name)
    if place is None:
        raise AttributeError(f"module 'rmcore' has no attribute {name!r}; public names: {', '.join(sorted(_places()))}")
    return getattr(import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_places()})
