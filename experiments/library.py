"""Experiments by name: the shipped ones in four sizes, and anybody's own from a YAML file."""

from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypedDict, Unpack

from experiments.schema import Experiment
from experiments.shipped import SHIPPED
from experiments.sizes import Size
from rmcore.config.files import read_mapping
from rmcore.core.errors import ConfigError


class Chosen(TypedDict, total=False):
    """The part of an experiment that is run, and what it is run on; left out, or None: as declared. See `restrict`."""

    arms: Sequence[str] | None
    seeds: int | None
    """Replicates of every arm."""
    budget_minutes: float | None
    model: str | None
    data: str | None
    epochs: float | None
    device: str | None


def load_experiment(name: str, size: Size = "smoke") -> Experiment:
    """A shipped experiment by name, or one declared in a YAML file shaped like `experiments.schema.Experiment`.

    Raises:
        ConfigError: neither is there, or the file cannot be read.
        pydantic.ValidationError: the declaration does not hold together; names the field.
    """
    if name in SHIPPED:
        return SHIPPED[name](size)
    if Path(name).suffix in (".yaml", ".yml"):
        return Experiment.model_validate(read_mapping(Path(name), "an experiment is a mapping, see experiments/README"))
    raise ConfigError(f"no experiment {name!r}; there are {', '.join(SHIPPED)}, and files that end in .yaml.")


def restrict(experiment: Experiment, **chosen: Unpack[Chosen]) -> Experiment:
    """The same experiment with some of its arms, other seeds, another budget, or on something else.

    Fewer seeds are the first of the declared ones, more are those and the smallest others.

    Hypotheses about arms that are left out are left out too. If the control is, the first arm named takes its place.
    Arms stay in declared order, so that the same choice is the same registration.

    `model`, `data`, `epochs` and `device` change what all arms share: the model's name, the pairs (of which a share of
    the prompts is then held out), the length of the training, and where it runs.

    Raises:
        ConfigError: there is no such arm, or arms are chosen of several factors.
        pydantic.ValidationError: what is left is no experiment.
    """
    seeds, arms = chosen.get("seeds"), chosen.get("arms")
    changed = experiment.model_dump()
    if seeds is not None:
        spare = (seed for seed in range(seeds + len(experiment.seeds)) if seed not in experiment.seeds)
        changed["seeds"] = tuple(islice(chain(experiment.seeds, spare), seeds))
    if chosen.get("budget_minutes") is not None:
        changed["budget_minutes"] = chosen["budget_minutes"]
    changed["base"] |= _shared_changes(changed["base"], chosen)
    if arms is not None:
        changed |= _with_arms(experiment, arms)
    return Experiment.model_validate(changed)


def _shared_changes(base: dict[str, Any], chosen: Chosen) -> dict[str, Any]:
    model, data, epochs, device = (chosen.get(name) for name in ("model", "data", "epochs", "device"))
    own_pairs = {"source": data, "eval_source": None, "eval_split": None}
    return {
        "model": base["model"] | ({} if model is None else {"name": model}),
        "data": base["data"] | ({} if data is None else own_pairs),
        "train": base["train"] | ({} if epochs is None else {"epochs": epochs, "steps": None}),
        **({} if device is None else {"device": device}),
    }


def _with_arms(experiment: Experiment, arms: Sequence[str]) -> dict[str, Any]:
    if len(experiment.factors) != 1:
        raise ConfigError(
            f"arms can be chosen of an experiment with one factor; {experiment.name} varies "
            f"{', '.join(factor.name for factor in experiment.factors)}. Declare your own in a YAML file."
        )
    [factor] = experiment.factors
    unknown = [arm for arm in arms if arm not in factor.levels]
    if unknown or not arms:
        named = f"no {factor.name} {', '.join(map(repr, unknown))}" if unknown else f"no {factor.name} was named"
        raise ConfigError(f"{named} in {experiment.name}; there are {', '.join(factor.levels)}.")
    control = experiment.control if experiment.control in arms else arms[0]
    kept = [
        hypothesis.model_dump()
        for hypothesis in experiment.hypotheses
        if hypothesis.arm in arms and (hypothesis.comparison == "level" or (hypothesis.versus or control) in arms)
        if hypothesis.comparison == "level" or hypothesis.versus or control == experiment.control
    ]
    levels = {arm: changes for arm, changes in factor.levels.items() if arm in arms}
    return {"factors": ({"name": factor.name, "levels": levels},), "control": control, "hypotheses": kept}
