"""Does the verdict hold on real answers? Reward models of real text, and what they make of 56 models' judged answers.

    python benchmarks/real_answers.py --out FOLDER [--minutes 75]     # train and score; the same call continues
    python benchmarks/real_answers_verdict.py --out FOLDER            # judge the claims, draw the figure

The gold world is synthetic. Here prompts, answers and judge are real: AlpacaEval's prompts, the answers of 56 public
models to each, and a GPT-4-Turbo judge's log-odds against one baseline. Reward models that differ in backbone, length
read, pairs, labels and training are fitted to pairs of the train prompts; each scores every answer to the test prompts
once, and everything that is claimed follows from those scores. Groups of the 56 models stand for policies of different
strength: what a policy says to a prompt are its group's answers.

`CLAIMS`, `STATISTICS` and `RECIPES` are frozen with hash and time before the first score (`rmcore.study.registration`).
Recipes run in the order in which they are declared until the time is over, which depends on no score; those that
finished are the study, and fewer than `FEWEST_MODELS` are none.
"""

import argparse
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.files import atomic_file, write_json
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.features import features
from rmcore.ensembles.linear_probes import bootstrap_heads, fit_head
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.train import train_into
from rmcore.study.registration import register

FEWEST_MODELS = 32
GROUPS = ("weak", "middle", "best", "all")
"""Thirds of the models by their mean judge score on the train prompts, and all of them."""

CLAIMS: tuple[dict[str, str], ...] = (
    {
        "name": "R1",
        "claim": "The best-of-16 win rate ranks reward models better than accuracy on labelled pairs.",
        "statistic": "rho(win_rate_16) - rho(pair_accuracy)",
        "supported": "interval above 0",
    },
    {
        "name": "R2",
        "claim": "The best-of-16 win rate ranks reward models better than on-policy accuracy.",
        "statistic": "rho(win_rate_16) - rho(on_policy_accuracy)",
        "supported": "interval above 0",
    },
    {
        "name": "R3",
        "claim": "Length-matched accuracy adds nothing beyond the win rate.",
        "statistic": "partial rho of length_matched_accuracy with the gain, given win_rate_16",
        "supported": "interval within -0.2 and +0.2",
    },
    {
        "name": "R4",
        "claim": "Accuracy on adversarial pairs (the better answer is the shorter one) says less than on-policy "
        "accuracy.",
        "statistic": "rho(on_policy_accuracy) - rho(adversarial_accuracy)",
        "supported": "interval above 0",
    },
    {
        "name": "R5",
        "claim": "Readiness' gain interval on one half of the prompts covers the other half's gain (with that one's "
        "own interval) at its rate of 95 %.",
        "statistic": "coverage over models, groups and splits, minus 0.93",
        "supported": "interval above 0: two points below the rate are let pass",
    },
    {
        "name": "R6",
        "claim": "Of verdicts 'ready', at most 10 % gain nothing on the other half of the prompts.",
        "statistic": "0.10 - share of 'ready' whose gain on the other half is at most 0",
        "supported": "interval above 0",
    },
    {
        "name": "R7",
        "claim": "Of verdicts 'not ready', at most 10 % gain what was requested (0.3 sd) on the other half.",
        "statistic": "0.10 - share of 'not_ready' whose gain on the other half is 0.3 sd or more",
        "supported": "interval above 0",
    },
    {
        "name": "R8",
        "claim": "Of claims of the second rung (better up to k), at most 10 % win no more than half of the time on the "
        "other half of the prompts at that k.",
        "statistic": "0.10 - share of claims whose win rate at best_k on the other half is at most 0.5",
        "supported": "interval above 0",
    },
)
"""Eight confirmatory claims, corrected together by Holm. A claim whose interval lies wholly on the other side is
refuted, one that neither is inconclusive."""

STATISTICS: dict[str, Any] = {
    "alpha": 0.05,
    "correction": "Holm over R1 to R8",
    "truth": "gain of best-of-16 by the judge on the half that the estimate did not see, in standard deviations of the "
    "judge within prompts of the group",
    "also shown": "gains of best-of-4, 8 and of all answers; by rank; above the longest answer's; of the judge with "
    "log length regressed out within prompts; none of them decides",
    "splits of the prompts for ranks": 20,
    "splits of the prompts for verdicts": 2,
    "groups of R1 to R4": "weak, middle and best, averaged; their models are disjoint",
    "groups of R5 to R8": "weak, middle, best and all",
    "rho": "Spearman's, over models, averaged over groups, splits and both directions of a split",
    "resamples": 1000,
    "resampled": "R1 to R4: prompts, and kinds of model as a whole, together; R5 to R8: cells of a kind and a "
    "group, with all models and splits in them",
    "interval": "expanded percentile interval for as many clusters as there are kinds, or cells; of a share that is 0 "
    "or 1 everywhere the interval of Clopper and Pearson over cells",
    "plan of the verdict": "best-of-16: log 16 - 15/16 nats, min_gain 0.3, thresholds as shipped",
    "left out": "whole kinds, one at a time: the statistic without each is shown",
}

Labels = Literal["given", "longer", "shorter"]
Training = Literal["frozen", "full", "lora"]


@dataclass(frozen=True)
class Recipe:
    """How one reward model is made.

    kind: cluster of the analysis: recipes of one kind share a backbone and a defect.
    backbone: minilm, tiny, or features that need none: words, style, length.
    tokens: longest side that is read.
    pairs: training pairs, drawn under the seed.
    labels: the file's, or who of the two answers is longer or shorter, for a share `relabelled` of the pairs.
    flipped: share of labels that are turned round.
    only: pairs of two models of that group only.
    members: heads whose mean is taken, each fitted on prompts drawn with replacement.
    stop: share of the planned steps after which training stops.
    """

    kind: str
    backbone: str
    training: Training = "frozen"
    tokens: int = 64
    pairs: int = 3000
    labels: Labels = "given"
    relabelled: float = 1.0
    flipped: float = 0.0
    only: str | None = None
    smoothing: float = 0.0
    l2: float | None = None
    members: int = 1
    stop: float = 1.0
    seed: int = 0

    @property
    def name(self) -> str:
        """Unique, and a file's name."""
        usual = asdict(Recipe(self.kind, self.backbone))
        parts = [
            f"{key}={value}"
            for key, value in asdict(self).items()
            if key not in ("kind", "backbone") and value != usual[key]
        ]
        return "_".join([self.backbone, *parts])


def _minilm(tokens: int) -> list[Recipe]:
    """The recipes on frozen MiniLM features of one length."""
    own = f"minilm {tokens}"
    clean, most = Recipe(f"{own} clean", "minilm", tokens=tokens), {64: 10000, 32: 3000, 128: 3000, 256: 1500}[tokens]
    few = replace(clean, kind=f"{own} few pairs")
    flipped = replace(clean, kind=f"{own} flipped labels", pairs=most)
    by_length = replace(clean, kind=f"{own} labels by length", pairs=most)
    found = [
        replace(clean, pairs=most),
        replace(few, pairs=300),
        replace(flipped, flipped=0.3),
        replace(by_length, labels="longer"),
    ]
    if tokens in (64, 128):
        found += [
            replace(clean, pairs=1000),
            replace(clean, pairs=1000, seed=1),
            replace(few, pairs=100),
            replace(few, pairs=100, seed=1),
            replace(flipped, flipped=0.4),
            replace(by_length, labels="shorter", relabelled=0.6),
        ]
    if tokens == 64:
        found += [
            replace(clean, smoothing=0.2),
            replace(clean, l2=20.0),
            replace(few, pairs=30),
            replace(few, pairs=300, seed=1),
            replace(flipped, flipped=0.2),
            replace(flipped, flipped=0.45, seed=1),
            replace(by_length, labels="longer", relabelled=0.5),
            replace(clean, kind=f"{own} narrow pairs", only="weak", pairs=1000),
            replace(clean, kind=f"{own} narrow pairs", only="best", pairs=1000),
            replace(clean, kind=f"{own} ensembles", members=5, pairs=1000),
            replace(clean, kind=f"{own} ensembles", members=5, pairs=300),
            replace(clean, kind=f"{own} ensembles", members=5, flipped=0.3, pairs=3000),
        ]
    return found


def _recipes() -> tuple[Recipe, ...]:
    words, style = Recipe("words", "words", pairs=10000), Recipe("style", "style", pairs=10000)
    tiny = Recipe("tiny clean", "tiny", "full", tokens=128, pairs=1600)
    full = Recipe("minilm trained", "minilm", "full", tokens=64, pairs=1600)
    return (
        Recipe("length", "length", pairs=0),
        Recipe("length", "length", pairs=0, labels="shorter"),
        style,
        replace(style, pairs=100),
        replace(style, flipped=0.4, pairs=1000),
        words,
        replace(words, pairs=1000),
        replace(words, pairs=100),
        replace(words, kind="words defects", flipped=0.3),
        replace(words, kind="words defects", labels="longer"),
        replace(words, kind="words defects", only="weak", pairs=1000),
        *_minilm(64),
        tiny,
        replace(tiny, kind="tiny defects", labels="longer"),
        replace(full, kind="minilm trained"),
        *_minilm(128),
        replace(tiny, seed=1),
        replace(tiny, stop=0.2),
        replace(tiny, kind="tiny defects", flipped=0.3),
        replace(full, kind="minilm trained defects", flipped=0.3),
        replace(full, stop=0.2),
        replace(full, training="lora"),
        *_minilm(32),
        replace(full, kind="minilm trained defects", labels="longer"),
        *_minilm(256),
    )


RECIPES = _recipes()
TRAIN_FEATURES = {32: 3000, 64: 10_591, 128: 3000, 256: 1500}
"""Pairs whose MiniLM features are computed, by tokens read; recipes draw from these."""


@dataclass(frozen=True)
class Data:
    """Answers to test prompts, pairs of other prompts, and the groups of models.

    answers: rows prompt, response, model, judge; sorted by prompt and model.
    pairs: rows prompt, chosen, rejected, chosen_model, rejected_model; none of a test prompt; in a random order.
    group_of: third that each model is in.
    """

    answers: pd.DataFrame
    pairs: pd.DataFrame
    group_of: Mapping[str, str]

    @cached_property
    def distinct(self) -> tuple[list[tuple[str, str]], IntArray]:
        """Distinct sides of the pairs, and (2, P) which of them are chosen and rejected."""
        sides = [
            *zip(self.pairs["prompt"], self.pairs["chosen"], strict=True),
            *zip(self.pairs["prompt"], self.pairs["rejected"], strict=True),
        ]
        places = {side: place for place, side in enumerate(dict.fromkeys(sides))}
        return list(places), np.array([places[side] for side in sides]).reshape(2, -1)

    @property
    def answered(self) -> list[tuple[str, str]]:
        """(prompt, response) of each answer."""
        return list(zip(self.answers["prompt"], self.answers["response"], strict=True))


def read_data(folder: Path) -> Data:
    """Read the files of a folder and check that no test prompt is in the training pairs.

    Args:
        folder: with alpacaeval_train.parquet, alpacaeval_answers_train.parquet and alpacaeval_answers_test.parquet.
    """
    answers = pd.read_parquet(folder / "alpacaeval_answers_test.parquet")
    answers = answers.sort_values(["prompt", "model"], ignore_index=True)
    pairs = pd.read_parquet(folder / "alpacaeval_train.parquet").sample(frac=1.0, random_state=0)
    shared = set(answers["prompt"]) & set(pairs["prompt"])
    if shared:
        raise SystemExit(f"{len(shared)} test prompts are in the training pairs; take another split.")
    strength = (
        pd.read_parquet(folder / "alpacaeval_answers_train.parquet").groupby("model")["judge"].mean().sort_values()
    )
    third = np.arange(len(strength)) * 3 // len(strength)
    return Data(
        answers,
        pairs.reset_index(drop=True),
        {str(model): GROUPS[place] for model, place in zip(strength.index, third, strict=True)},
    )


def training_pairs(recipe: Recipe, data: Data) -> tuple[IntArray, IntArray]:
    """Which pairs a recipe trains on, and whether each label is kept (1) or turned round (-1)."""
    available = data.pairs.head(TRAIN_FEATURES[recipe.tokens]) if recipe.backbone == "minilm" else data.pairs
    if recipe.only is not None:
        inside = [data.group_of[one] == recipe.only for one in available["chosen_model"]]
        inside &= np.array([data.group_of[one] == recipe.only for one in available["rejected_model"]])
        available = available[inside]
    rng = np.random.default_rng(recipe.seed)
    rows = rng.permutation(available.index.to_numpy())[: recipe.pairs]
    longer = (data.pairs["chosen"].str.len() - data.pairs["rejected"].str.len()).to_numpy()[rows]
    sign = np.ones(len(rows), dtype=np.int64)
    if recipe.labels != "given":
        by_length = np.where(longer >= 0, 1, -1) * (1 if recipe.labels == "longer" else -1)
        sign = np.where(rng.random(len(rows)) < recipe.relabelled, by_length, sign)
    return rows, np.where(rng.random(len(rows)) < recipe.flipped, -sign, sign)


def style_features(sides: Sequence[tuple[str, str]]) -> FloatArray:
    """(N, 13) of what an answer looks like: length, lines, lists, emphasis, marks."""
    counted = ("\n", "\n- ", "\n* ", "\n1.", "**", "#", "?", "!", "`", "I ")
    rows = [
        [
            np.log1p(len(answer)),
            len(answer) / 1000,
            len(set(answer.split())) / 100,
            *(np.log1p(answer.count(one)) for one in counted),
        ]
        for _, answer in sides
    ]
    return np.array(rows)


def word_features(sides: Sequence[tuple[str, str]], size: int = 512) -> FloatArray:
    """(N, size) log counts of the words of an answer, hashed."""
    found = np.zeros((len(sides), size))
    for row, (_, answer) in zip(found, sides, strict=True):
        for word in answer.lower().split():
            row[zlib.crc32(word.strip(".,:;!?()\"'*").encode()) % size] += 1
    return np.log1p(found)


def new_model(recipe: Recipe) -> BradleyTerryRM:
    """The backbone as it is before training."""
    return BradleyTerryRM.new(model_config(recipe), seed=recipe.seed, device=pick_device("cpu"))


def model_config(recipe: Recipe) -> ModelConfig:
    lora = LoraSettings() if recipe.training == "lora" else None
    return ModelConfig(name=recipe.backbone, max_seq_len=recipe.tokens, lora=lora)


def tokenized(rm: BradleyTerryRM, sides: Sequence[tuple[str, str]]) -> list[TokenizedSide]:
    """Sides as a model reads them; one that cannot be read ends the study."""
    found = list(rm.renderer.try_sides(sides))
    for side in found:
        if not isinstance(side, TokenizedSide):
            raise side
    return [side for side in found if isinstance(side, TokenizedSide)]


class Study:
    """Features and scores of one folder; whatever is there is not computed again."""

    def __init__(self, data: Data, out: Path) -> None:
        self.data, self.out = data, out
        (out / "features").mkdir(parents=True, exist_ok=True)
        (out / "scores").mkdir(exist_ok=True)

    def scores(self, recipe: Recipe) -> FloatArray | None:
        """(A,) rewards of all answers, None where the recipe was not run."""
        file = self.out / "scores" / f"{recipe.name}.npy"
        return np.load(file) if file.is_file() else None

    def run(self, recipe: Recipe) -> None:
        """Train a recipe and score every answer."""
        if self.scores(recipe) is not None:
            return
        began, used = time.perf_counter(), time.process_time()
        found = self._trained(recipe) if recipe.training != "frozen" else self._head(recipe)
        self._keep(self.out / "scores" / f"{recipe.name}.npy", found)
        seconds = {"wall_seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}
        write_json(self.out / "scores" / f"{recipe.name}.json", {"recipe": asdict(recipe), **seconds})
        print(f"{time.strftime('%H:%M:%S')} {recipe.name}: {seconds['wall_seconds']:.0f} s", flush=True)

    def _head(self, recipe: Recipe) -> FloatArray:
        """Scores by a head that is fitted on fixed features."""
        if recipe.backbone == "length":
            sign = -1.0 if recipe.labels == "shorter" else 1.0
            return sign * self.data.answers["response"].str.len().to_numpy(dtype=np.float64)
        sides, both = self.data.distinct
        rows, sign = training_pairs(recipe, self.data)
        used, place = np.unique(both[:, : TRAIN_FEATURES[recipe.tokens]], return_inverse=True)
        place = place.reshape(2, -1)
        train = self._features(recipe, [sides[one] for one in used], "train")
        x = sign[:, None] * (train[place[0, rows]] - train[place[1, rows]]).astype(np.float64)
        answers = self._features(recipe, self.data.answered, "answers").astype(np.float64)
        if recipe.members > 1:
            prompts = self.data.pairs["prompt"].iloc[rows].tolist()
            return answers @ bootstrap_heads(x, prompts, recipe.members, recipe.seed).mean(axis=0)
        return answers @ fit_head(x, l2=recipe.l2, label_smoothing=recipe.smoothing)

    def _features(self, recipe: Recipe, sides: Sequence[tuple[str, str]], of: str) -> FloatArray:
        file = self.out / "features" / f"{recipe.backbone}-{recipe.tokens}-{of}.npy"
        if not file.is_file():
            plain: dict[str, Callable[[Sequence[tuple[str, str]]], FloatArray]]
            plain = {"style": style_features, "words": word_features}
            if recipe.backbone in plain:
                found = plain[recipe.backbone](sides)
            else:
                rm = new_model(replace(recipe, seed=0))
                found = features(rm, tokenized(rm, sides), precision="bf16")
            self._keep(file, found)
        return np.load(file)

    def _trained(self, recipe: Recipe) -> FloatArray:
        """Scores by a model whose backbone is trained, too, for one epoch."""
        rows, sign = training_pairs(recipe, self.data)
        chosen = self.data.pairs.iloc[rows]
        pairs = [
            PreferencePair(prompt, *((good, bad) if one > 0 else (bad, good)))
            for prompt, good, bad, one in zip(chosen["prompt"], chosen["chosen"], chosen["rejected"], sign, strict=True)
        ]
        steps = max(1, len(pairs) // 16)
        train = TrainConfig(
            lr={"tiny": 1e-3, "minilm": 5e-5}[recipe.backbone] * (10 if recipe.training == "lora" else 1),
            steps=steps,
            stop_step=None if recipe.stop == 1 else max(1, round(recipe.stop * steps)),
            warmup_steps=max(1, steps // 10),
            eval_every=steps,
            precision="fp32" if recipe.backbone == "tiny" else "bf16",
            callbacks=(),
        )
        config = PipelineConfig(seed=recipe.seed, device="cpu", model=model_config(recipe), train=train)
        with tempfile.TemporaryDirectory() as folder:
            train_into(config, pairs, [], Path(folder), NullTracker(), silent)
            rm = BradleyTerryRM.from_pretrained(Path(folder) / "best", device="cpu")
        return rm.score_sides(tokenized(rm, self.data.answered), precision=train.precision).astype(np.float64)

    def _keep(self, file: Path, values: FloatArray) -> None:
        with atomic_file(file) as temporary, temporary.open("wb") as handle:
            np.save(handle, values)


def frozen(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """What a registration holds."""
    return {
        "claims": list(CLAIMS),
        "statistics": STATISTICS,
        "fewest_models": FEWEST_MODELS,
        "recipes": [asdict(one) | {"name": one.name} for one in recipes],
    }


def collect(data: Data, out: Path, recipes: Sequence[Recipe], minutes: float) -> int:
    """Register, then train and score recipes in their order until the time is over; how many there are."""
    end = time.monotonic() + 60 * minutes
    registration = register(out / "registration", frozen(recipes))
    print(
        f"registration {registration['number']}, {registration['hash'][:12]}, {registration['frozen_at']}", flush=True
    )
    study = Study(data, out)
    for recipe in recipes:
        if time.monotonic() < end:
            study.run(recipe)
    return sum(study.scores(recipe) is not None for recipe in recipes)


def given_options(description: str | None, minutes: float | None = None) -> argparse.Namespace:
    """Read the options of a script of this study: --out, --data and, with a default for them, --minutes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RM_OPT_DATA", "../shared/data")))
    if minutes is not None:
        parser.add_argument("--minutes", type=float, default=minutes)
    return parser.parse_args()


def main() -> None:
    given = given_options(__doc__, minutes=75)
    number = collect(read_data(given.data), given.out, RECIPES, given.minutes)
    print(json.dumps({"models": number, "of": len(RECIPES)}))


if __name__ == "__main__":
    main()
