"""Reward models of different origin, and their scores of one policy's judged samples.

    python benchmarks/one_policy.py --out FOLDER [--minutes 60]     # train and score; the same call continues
    python benchmarks/verdict_one_policy.py --out FOLDER            # judge the claims, draw the figure

A public policy (tulu-2-dpo-13b) wrote eleven samples for each AlpacaEval prompt that a GPT-4-Turbo judge scored
(`policy_samples.parquet`). Reward models are trained on pairs of 56 other models' answers to other prompts, as users
have them, and each scores the samples once, with answers of the 56 models to the same prompts, whose pairs are the
labelled ones. Claims and statistics are in `verdict_one_policy.py`; all of it is frozen with hash and time before the
first score (`rmcore.study.registration`). Recipes run in the order in which they are declared until the time is over.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.files import atomic_file, write_json
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.pair import PreferencePair
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.features import features
from rmcore.ensembles.linear_probes import bootstrap_heads, fit_head
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.order import training_of
from rmcore.stages.train import train_into

FEWEST_MODELS = 28
TRAINING_PROMPTS = 120
LABELLED_ANSWERS = 5
"""Answers of other models to each judged prompt; their pairs are the labelled ones."""
LEAST_MARGIN = 2.0
"""Log-odds by which the answers of a labelled pair differ, as in the training pairs."""

Side = tuple[str, str]


def response_only(prompt: str, completion: str) -> str:
    """Render for a model that does not read the prompt."""
    return completion


@dataclass(frozen=True)
class Recipe:
    """How one reward model is made.

    kind: cluster of the analysis: recipes of one kind share a backbone and a defect.
    backbone: minilm, tiny, tiny-small; or features without one: words, style, length, noise.
    frozen: a head is fitted on fixed features; else the whole model is trained.
    tokens: longest side that is read.
    pairs: training pairs, at most, drawn under the seed.
    labels: the file's, or who of the two answers is longer or shorter, for a share `relabelled` of the pairs.
    flipped: share of labels that are turned round.
    layout: the tokenizer's chat template, `Prompt: … Response: …`, or the response without its prompt.
    members: heads whose mean is taken, each fitted on prompts drawn with replacement.
    passes: through the pairs.
    """

    kind: str
    backbone: str
    frozen: bool = True
    tokens: int = 128
    pairs: int = 2500
    labels: Literal["given", "longer", "shorter"] = "given"
    relabelled: float = 1.0
    flipped: float = 0.0
    layout: Literal["chat", "plain", "response"] = "chat"
    members: int = 1
    passes: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        """Unique, and a file's name."""
        usual = asdict(Recipe(self.kind, self.backbone))
        return "_".join(
            [self.backbone, *(f"{key}={value}" for key, value in asdict(self).items() if value != usual[key])]
        )


def _defects(clean: Recipe) -> list[Recipe]:
    """Labels flipped in 20 and 40 %, and labels by length alone."""
    flipped = replace(clean, kind=f"{clean.kind}, flipped")
    by_length = replace(clean, kind=f"{clean.kind}, by length")
    return [
        replace(flipped, flipped=0.2),
        replace(flipped, flipped=0.4),
        replace(by_length, labels="longer"),
        replace(by_length, labels="shorter", relabelled=0.6),
    ]


def _recipes() -> tuple[Recipe, ...]:
    words, style, minilm = (Recipe(one, one) for one in ("words", "style", "minilm"))
    few, flipped = replace(minilm, kind="minilm, few"), replace(minilm, kind="minilm, flipped")
    small = Recipe("tiny-small", "tiny-small", frozen=False, pairs=1000)
    tiny = Recipe("tiny", "tiny", frozen=False, tokens=96, pairs=800)
    whole = Recipe("minilm whole", "minilm", frozen=False, tokens=64, pairs=480)
    return (
        Recipe("length", "length", pairs=0),
        Recipe("length", "length", pairs=0, labels="shorter"),
        Recipe("noise", "noise", pairs=0),
        style,
        replace(style, kind="style, few", pairs=100),
        replace(style, kind="style, flipped", flipped=0.4),
        words,
        *(replace(words, kind="words, few", pairs=number) for number in (300, 100)),
        *_defects(words),
        minilm,
        *(replace(few, pairs=number) for number in (1000, 300, 100, 30)),
        *_defects(minilm),
        replace(minilm, kind="minilm, by length", labels="longer", relabelled=0.5),
        replace(few, pairs=1000, members=5),
        *(replace(few, pairs=number, seed=1) for number in (300, 100)),
        replace(flipped, pairs=1000, flipped=0.2, seed=1),
        replace(flipped, flipped=0.4, seed=1),
        small,
        *_defects(small),
        replace(small, kind="tiny-small, layout", layout="response"),
        replace(small, kind="tiny-small, layout", layout="plain"),
        tiny,
        replace(tiny, kind="tiny, by length", labels="longer"),
        whole,
        replace(small, kind="tiny-small, few", pairs=300),
        replace(small, kind="tiny-small, few", pairs=300, passes=4),
        replace(tiny, kind="tiny, flipped", flipped=0.4),
        replace(whole, kind="minilm whole, by length", labels="longer"),
        replace(small, seed=1),
    )


RECIPES = _recipes()


@dataclass(frozen=True)
class Data:
    """Samples to score, labelled pairs of the same prompts, and training pairs of other prompts.

    samples: rows prompt, response, judge; eleven a prompt, in the order of `prompts`.
    pairs: labelled, of the judged prompts; rows prompt, chosen, rejected.
    training: rows prompt, chosen, rejected, in a random order.
    """

    samples: pd.DataFrame
    pairs: pd.DataFrame
    training: pd.DataFrame

    @property
    def prompts(self) -> list[str]:
        """The judged prompts."""
        return list(self.samples["prompt"].drop_duplicates())

    @cached_property
    def scored(self) -> list[Side]:
        """What each model scores: the samples, then the distinct labelled answers."""
        return [*zip(self.samples["prompt"], self.samples["response"], strict=True), *_sides(self.pairs)]


def _sides(pairs: pd.DataFrame) -> list[Side]:
    every = [side for one in ("chosen", "rejected") for side in zip(pairs["prompt"], pairs[one], strict=True)]
    return list(dict.fromkeys(every))


def read_data(folder: Path) -> Data:
    """Split the train prompts by hash: those of the training pairs, and those whose samples are judged."""
    pairs = pd.read_parquet(folder / "alpacaeval_train.parquet", columns=["prompt", "chosen", "rejected"])
    pairs = pairs.sample(frac=1.0, random_state=0, ignore_index=True)
    answers = pd.read_parquet(folder / "alpacaeval_answers_train.parquet", columns=["prompt", "response", "judge"])
    order = sorted(answers["prompt"].unique(), key=lambda prompt: hashlib.sha256(prompt.encode()).hexdigest())
    paired = set(pairs["prompt"])
    training = set([prompt for prompt in order if prompt in paired][:TRAINING_PROMPTS])
    place = {prompt: number for number, prompt in enumerate(prompt for prompt in order if prompt not in training)}
    samples = pd.read_parquet(folder / "policy_samples.parquet").dropna(subset="judge")
    samples = samples[samples["prompt"].isin(place)]
    samples = samples.iloc[np.lexsort((samples["sample"], samples["prompt"].map(place)))]
    labelled = pairs[pairs["prompt"].isin(place)]
    answers = answers[answers["prompt"].isin(place) & answers["response"].str.len().between(20, 1800)]
    some = answers.sample(frac=1.0, random_state=0).groupby("prompt", sort=False).head(LABELLED_ANSWERS)
    both = some.merge(some, on="prompt", suffixes=("", "_worse"))
    both = both[both["judge"] - both["judge_worse"] >= LEAST_MARGIN]
    labelled = both.rename(columns={"response": "chosen", "response_worse": "rejected"})[
        ["prompt", "chosen", "rejected"]
    ]
    return Data(samples, labelled, pairs[pairs["prompt"].isin(training)].reset_index(drop=True))


def training_pairs(recipe: Recipe, data: Data) -> list[tuple[str, str, str]]:
    """The pairs (prompt, better, worse) that a recipe trains on, with its defects."""
    rng = np.random.default_rng(recipe.seed)
    found = []
    for row in rng.permutation(len(data.training))[: recipe.pairs]:
        prompt, good, bad = data.training.iloc[row]
        if recipe.labels != "given" and rng.random() < recipe.relabelled:
            good, bad = sorted((good, bad), key=len, reverse=recipe.labels == "longer")
        found.append((prompt, bad, good) if rng.random() < recipe.flipped else (prompt, good, bad))
    return found


def style_features(sides: Sequence[Side]) -> FloatArray:
    """(N, 13) of what an answer looks like: length, lines, lists, emphasis, marks."""
    counted = ("\n", "\n- ", "\n* ", "\n1.", "**", "#", "?", "!", "`", "I ")
    rows = [
        [
            np.log1p(len(text)),
            len(text) / 1000,
            len(set(text.split())) / 100,
            *(np.log1p(text.count(c)) for c in counted),
        ]
        for _, text in sides
    ]
    return np.array(rows)


def word_features(sides: Sequence[Side], size: int = 512) -> FloatArray:
    """(N, size) log counts of the words of an answer, hashed."""
    found = np.zeros((len(sides), size))
    for row, (_, text) in zip(found, sides, strict=True):
        for word in text.lower().split():
            row[zlib.crc32(word.strip(".,:;!?()\"'*").encode()) % size] += 1
    return np.log1p(found)


class Scores:
    """Features and scores of one folder; what is there is not computed again."""

    def __init__(self, data: Data, out: Path) -> None:
        self.data, self.out = data, out
        out.mkdir(parents=True, exist_ok=True)

    def of(self, recipe: Recipe) -> FloatArray | None:
        """Rewards of `Data.scored`; None where the recipe was not run."""
        file = self.out / f"{recipe.name}.npy"
        return np.load(file) if file.is_file() else None

    def run(self, recipe: Recipe) -> None:
        """Train a recipe and score everything."""
        if self.of(recipe) is not None:
            return
        used, began = time.process_time(), time.perf_counter()
        found = self._head(recipe) if recipe.frozen else self._trained(recipe)
        with atomic_file(self.out / f"{recipe.name}.npy") as temporary, temporary.open("wb") as handle:
            np.save(handle, found)
        seconds = {"cpu_seconds": time.process_time() - used, "wall_seconds": time.perf_counter() - began}
        write_json(self.out / f"{recipe.name}.json", {"recipe": asdict(recipe), **seconds})
        print(time.strftime("%H:%M:%S"), recipe.name, *(f"{value:.0f} s" for value in seconds.values()), flush=True)

    def _head(self, recipe: Recipe) -> FloatArray:
        scored = self.data.scored
        if recipe.backbone == "length":
            return np.array([len(text) for _, text in scored], float) * (-1 if recipe.labels == "shorter" else 1)
        if recipe.backbone == "noise":
            return np.array([zlib.crc32("\n".join(side).encode()) for side in scored], float)
        pairs, known = training_pairs(recipe, self.data), self._features(recipe.backbone)
        x = np.stack([known[prompt, good] - known[prompt, bad] for prompt, good, bad in pairs]).astype(np.float64)
        if recipe.members > 1:
            head = bootstrap_heads(x, [one[0] for one in pairs], recipe.members, recipe.seed).mean(axis=0)
        else:
            head = fit_head(x)
        return np.stack([known[side] for side in scored]) @ head

    def _features(self, backbone: str) -> dict[Side, FloatArray]:
        sides = list(dict.fromkeys([*_sides(self.data.training), *self.data.scored]))
        if backbone != "minilm":
            found = style_features(sides) if backbone == "style" else word_features(sides)
            return dict(zip(sides, found, strict=True))
        file = self.out / "features.npy"
        if not file.is_file():
            config = ModelConfig(name="minilm", max_seq_len=Recipe("", "minilm").tokens)
            rm = BradleyTerryRM.new(config, seed=0, device=pick_device("cpu"))
            found = features(rm, [side for side in rm.renderer.try_sides(sides) if isinstance(side, TokenizedSide)])
            with atomic_file(file) as temporary, temporary.open("wb") as handle:
                np.save(handle, found)
        return dict(zip(sides, np.load(file), strict=True))

    def _trained(self, recipe: Recipe) -> FloatArray:
        pairs = [PreferencePair(*one) for one in training_pairs(recipe, self.data)]
        rate, steps = 5e-5 if recipe.backbone == "minilm" else 1e-3, recipe.passes * len(pairs) // 16
        train = TrainConfig(lr=rate, steps=steps, warmup_steps=steps // 10, eval_every=steps, precision="bf16")
        render_fn = "one_policy:response_only" if recipe.layout == "response" else None
        model = ModelConfig(
            name=recipe.backbone,
            max_seq_len=recipe.tokens,
            use_chat_template=recipe.layout == "chat",
            render_fn=render_fn,
        )
        config = PipelineConfig(seed=recipe.seed, device="cpu", model=model, train=train)
        with tempfile.TemporaryDirectory() as folder:
            train_into(training_of(config), pairs, [], Path(folder), NullTracker(), silent)
            rm = BradleyTerryRM.from_pretrained(Path(folder) / "best", device="cpu", render_fn=render_fn)
        prompts, responses = zip(*self.data.scored, strict=True)
        return rm.score(prompts, responses).astype(np.float64)


def given_options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the options of a script of this study: --out, --data, and those that have a default here."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RM_OPT_DATA", "../shared/data")))
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def main() -> None:
    from verdict_one_policy import register_claims  # it reads the scores that are made here

    given = given_options(__doc__, minutes=60.0)
    frozen = register_claims(given.out)
    print(f"registration {frozen['number']}, {frozen['hash'][:12]}, {frozen['frozen_at']}", flush=True)
    end, scores = time.monotonic() + 60 * given.minutes, Scores(read_data(given.data), given.out)
    for recipe in RECIPES:
        if time.monotonic() < end:
            scores.run(recipe)
    print(json.dumps({"models": sum(scores.of(one) is not None for one in RECIPES), "of": len(RECIPES)}))


if __name__ == "__main__":
    main()
