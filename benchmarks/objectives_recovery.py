"""Are true parameters found from each kind of judgement? Errors against the number of labels, in the gold world.

    python benchmarks/objectives_recovery.py --out recovery.png

A gold reward is a sum of eight parts, so a linear model of these parts is the right one, and what is left is the
likelihood: the same module that trains a model is maximised here (L-BFGS, float64). Judgements are drawn by the
textbook formulas of their kind, written out below and not taken from the library. Weights have a weak normal prior (sd
3, they are 1 in truth), as with few labels some rare part always is on the better side. Shown is, over seeds, the root
mean square error of reward differences between answers to held-out prompts, in logits, and the errors of tie widths,
thresholds, offsets and reliabilities.
"""

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rmcore.config.train import TrainConfig
from rmcore.data.gold.prompts import draw_prompt
from rmcore.data.gold.world import gold_parts, sample_response
from rmcore.data.observation import Observation
from rmcore.data.rendering import TokenizedSide
from rmcore.models.observation_batching import label
from rmcore.reporting.figures.style import MUTED, dress, headline, new_figure, save, shared_legend
from rmcore.training.likelihood.designs import make_design
from rmcore.training.likelihood.grades import thresholds
from rmcore.training.likelihood.observed import Likelihood

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIE = {2: 0.5, 3: 0.2, 4: 0.1}
CUTS = (-1.0, 1.0, 2.5, 4.0)
SIGMA, TAU = 1.5, 1.0
CARELESS = tuple(number / 20 for number in range(12))
NUM_ANSWERS = 4
LABELS = (300, 1200, 4800)
PARTS = 8
PRIOR = 3.0
"""Standard deviation of a normal prior of the weights, 1 in truth: rare parts are perfectly separated in few labels."""


@dataclass(frozen=True)
class World:
    """Prompts with four answers each, and the parts of their gold rewards."""

    answers: list[tuple[str, tuple[str, ...]]]
    parts: np.ndarray  # (N, 4, 8)

    @property
    def gold(self) -> np.ndarray:
        """(N, 4) gold rewards."""
        return self.parts.sum(-1)


def draw_world(num_prompts: int, seed: int) -> World:
    rng = random.Random(f"recovery {seed}")  # noqa: S311 - data
    answers, parts = [], []
    seen: set[str] = set()
    while len(answers) < num_prompts:
        prompt = draw_prompt(rng, ood=False)
        if prompt in seen and len(seen) < 500:
            continue
        seen.add(prompt)
        given: dict[str, None] = {}
        while len(given) < NUM_ANSWERS:
            given[sample_response(prompt, rng, ood=rng.random() < 0.3, shortcut="length")] = None
        answers.append((prompt, tuple(given)))
        parts.append([list(gold_parts(prompt, answer).values()) for answer in given])
    return World(answers, np.array(parts))


def _softmax_choice(weights: Sequence[float], rng: random.Random) -> int:
    return rng.choices(range(len(weights)), weights)[0]


def pair(gold: Sequence[float], rng: random.Random) -> dict:
    wins = rng.random() < 1 / (1 + math.exp(gold[1] - gold[0]))
    return {"ranks": (1, 2) if wins else (2, 1)}


def pair_or_tie(gold: Sequence[float], rng: random.Random) -> dict:
    first, second = math.exp(gold[0]), math.exp(gold[1])
    outcome = _softmax_choice([first, second, TIE[2] * math.sqrt(first * second)], rng)
    return {"ranks": ((1, 2), (2, 1), (1, 1))[outcome]}


def ranking(gold: Sequence[float], rng: random.Random) -> dict:
    left, ranks, rank = list(range(len(gold))), [0] * len(gold), 1
    while left:
        sets = [one for size in range(1, len(left) + 1) for one in itertools.combinations(left, size)]
        weights = [TIE.get(len(one), 1.0) * math.exp(sum(gold[at] for at in one) / len(one)) for one in sets]
        for at in sets[_softmax_choice(weights, rng)]:
            ranks[at] = rank
            left.remove(at)
        rank += 1
    return {"ranks": tuple(ranks)}


def best(gold: Sequence[float], rng: random.Random) -> dict:
    top = _softmax_choice([math.exp(one) for one in gold], rng)
    return {"ranks": tuple(1 if at == top else 2 for at in range(len(gold))), "top_only": True}


def ordinal(gold: Sequence[float], rng: random.Random, offset: float = 0.0) -> dict:
    def one(reward: float) -> float:
        latent = reward + offset + math.log(1 / rng.random() - 1)  # with logistic noise
        return float(sum(cut < latent for cut in CUTS))

    return {"grades": {"overall": tuple(map(one, gold))}}


def ordinal_with_offset(gold: Sequence[float], rng: random.Random) -> dict:
    return ordinal(gold, rng, rng.gauss(0, TAU))


def binary(gold: Sequence[float], rng: random.Random) -> dict:
    return {"grades": {"overall": tuple(float(rng.random() < 1 / (1 + math.exp(1.0 - one))) for one in gold)}}


def real(gold: Sequence[float], rng: random.Random) -> dict:
    return {"grades": {"overall": tuple(one + rng.gauss(0, SIGMA) for one in gold)}}


def careless_pair(gold: Sequence[float], rng: random.Random) -> dict:
    who = rng.randrange(len(CARELESS))
    said = {"ranks": rng.choice([(1, 2), (2, 1)])} if rng.random() < CARELESS[who] else pair(gold, rng)
    return said | {"annotator": f"annotator {who}"}


@dataclass(frozen=True)
class Kind:
    """How judgements of a kind are drawn: of so many answers, one label or `answers` of them an observation."""

    draw: Callable[[Sequence[float], random.Random], dict]
    answers: int
    labels: int = 1
    settings: tuple[tuple[str, bool], ...] = ()


KINDS = {
    "pairs": Kind(pair, 2),
    "pairs with ties": Kind(pair_or_tie, 2),
    "rankings of 4": Kind(ranking, 4),
    "best of 4": Kind(best, 4),
    "grades 0 to 4": Kind(ordinal, 1),
    "grades, offset": Kind(ordinal_with_offset, 4, 4, (("grade_offset", True),)),
    "thumbs": Kind(binary, 1),
    "real grades": Kind(real, 1),
    "12 annotators": Kind(careless_pair, 2, 1, (("reliability", True),)),
}
MIXED = ("pairs with ties", "rankings of 4", "grades 0 to 4")
PART = "its third alone: "


def observe(world: World, kind: Kind, num_labels: int, rng: random.Random, start: int = 0) -> list[Observation]:
    found = []
    for at in range(start, start + num_labels // kind.labels):
        prompt, answers = world.answers[at % len(world.answers)]
        places = rng.sample(range(NUM_ANSWERS), kind.answers)
        said = kind.draw([world.gold[at % len(world.answers), place] for place in places], rng)
        texts = tuple(answers[place] for place in places)
        found.append(Observation(prompt, texts, observation_id=f"{at}", **said))
    return found


def fit(world: World, observations: list[Observation], settings: dict) -> tuple[np.ndarray, Likelihood]:
    """Maximum likelihood: the (8,) weights of the parts, and the likelihood with what it learned."""
    config = TrainConfig(label_smoothing=0, regularization_lambda=0, **settings)
    design = make_design(config, observations, None)
    coding = design.coding
    known = {
        (prompt, answer): parts
        for (prompt, given), row in zip(world.answers, world.parts, strict=True)
        for answer, parts in zip(given, row, strict=True)
    }
    tokenized = [coding.judge(one, [TokenizedSide([1], 0)] * len(one.answers)) for one in observations]
    labels = label(tokenized)
    parts = torch.from_numpy(np.array([known[one.prompt, answer] for one in observations for answer in one.answers]))
    weights = torch.zeros(PARTS, dtype=torch.float64, requires_grad=True)
    likelihood = Likelihood(design).double()
    terms = sum(one.num_terms for one in tokenized)
    optimizer = torch.optim.LBFGS(
        [weights, *likelihood.parameters()], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss, _ = likelihood((parts @ weights)[:, None], labels)
        loss = (loss + weights.square().sum() / (2 * PRIOR**2)) / terms
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach().numpy(), likelihood.eval()


def reward_error(weights: np.ndarray, held_out: World) -> float:
    """Root mean square error of the differences between answers to a prompt, logits."""
    wrong = held_out.parts @ (weights - 1)  # (N, 4)
    gaps = wrong[:, :, None] - wrong[:, None, :]
    return float(np.sqrt((gaps[:, *np.triu_indices(NUM_ANSWERS, 1)] ** 2).mean()))


def beside_errors(name: str, likelihood: Likelihood, scale: float) -> dict[str, float]:
    """Errors of what is learned beside the rewards: root mean squares of logits, of logarithms, or of shares."""
    with torch.no_grad():
        found = {}
        if len(likelihood.log_tie):
            true = torch.tensor([math.log(TIE[size]) for size in range(2, 2 + len(likelihood.log_tie))])
            found["log tie width"] = float((likelihood.log_tie - true).square().mean().sqrt())
        if name in ("grades 0 to 4", "grades, offset", "mixture"):
            # The likelihood of a mixture has a scale of its own for grades, 1 in truth.
            true = torch.tensor(CUTS, dtype=torch.float64)
            found["thresholds, logits"] = float((thresholds(likelihood.cuts[0]) - true).square().mean().sqrt())
        if name == "real grades":
            found["sigma"] = abs(float(likelihood.log_sigma.exp()) * scale - SIGMA)
        if len(likelihood.log_tau):
            found["offset's sd, logits"] = abs(float(likelihood.log_tau.exp()) - TAU)
        if len(likelihood.carelessness):
            shares = likelihood.learned()["reliability"]
            wrong = [1 - shares[f"annotator {who}"] - true for who, true in enumerate(CARELESS)]
            found["share at random"] = math.sqrt(sum(one * one for one in wrong) / len(wrong))
    return found


def measure(name: str, num_labels: int, world: World, held_out: World, seed: int) -> dict[str, float]:
    rng = random.Random(f"{name} {num_labels} {seed}")  # noqa: S311 - data
    if name == "mixture":
        each = num_labels // len(MIXED)
        observations = [
            one for at, kind in enumerate(MIXED) for one in observe(world, KINDS[kind], each, rng, at * each)
        ]
        settings: dict = {}
    elif name.startswith(PART):  # what the mixture has of this kind
        kind = KINDS[name.removeprefix(PART)]
        observations, settings = observe(world, kind, num_labels // len(MIXED), rng), dict(kind.settings)
    else:
        observations, settings = observe(world, KINDS[name], num_labels, rng), dict(KINDS[name].settings)
    weights, likelihood = fit(world, observations, settings)
    scale = likelihood.design.scales[0].deviation if likelihood.design.scales else 1.0
    if name == "real grades":  # the grades were standardised, and so is what is said of them
        weights = weights * scale
    return {"rewards, logits": reward_error(weights, held_out)} | beside_errors(name, likelihood, scale)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("recovery.png"), help="the figure")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--labels", type=int, nargs="+", default=list(LABELS))
    args = parser.parse_args()
    names = [*KINDS, "mixture", *(PART + name for name in MIXED)]
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
    for seed in range(args.seeds):
        world, held_out = draw_world(2000, seed), draw_world(500, 1000 + seed)
        for name in names:
            for at, number in enumerate(args.labels):
                for what, value in measure(name, number, world, held_out, seed).items():
                    cells = found[name].setdefault(what, np.full((args.seeds, len(args.labels)), np.nan))
                    cells[seed, at] = value
        print(f"seed {seed} of {args.seeds}", file=sys.stderr, flush=True)
    print("| kind | parameter | " + " | ".join(f"{number:,} labels" for number in args.labels) + " | slope |")
    print("| --- | --- | " + " | ".join("---:" for _ in args.labels) + " | ---: |")
    slopes = {}
    for name in names:
        for what, cells in found[name].items():
            means = np.sqrt((cells**2).mean(0))
            slope = float(np.polyfit(np.log(args.labels), np.log(means), 1)[0])
            slopes[name, what] = slope
            print(f"| {name} | {what} | " + " | ".join(f"{mean:.3f}" for mean in means) + f" | {slope:.2f} |")
    save(draw(args.labels, found), args.out)
    print(f"figure: {args.out}", file=sys.stderr)
    return 0


def draw(labels: Sequence[int], found: dict[str, dict[str, np.ndarray]]) -> "Figure":
    """The errors of reward differences against the number of labels, with the rate 1/sqrt(n) to compare with."""
    figure = new_figure(8.4, 5.0)
    headline(figure, "True rewards are found from every kind of judgement, with errors that fall as 1/√n")
    axes = figure.subplots()
    for number, (name, errors) in enumerate(found.items()):
        if name.startswith(PART):
            continue
        cells = errors["rewards, logits"]
        means = np.sqrt((cells**2).mean(0))
        line = (
            {"color": "#000000", "linewidth": 2.2} if name == "mixture" else {"color": f"C{number}", "linewidth": 1.2}
        )
        axes.plot(labels, means, "o-", label=name, markersize=3.5, **line)
        axes.fill_between(labels, cells.min(0), cells.max(0), alpha=0.08, color=line["color"])
    first = float(np.sqrt((found["pairs"]["rewards, logits"] ** 2).mean(0))[0])
    axes.plot(labels, [first * math.sqrt(labels[0] / one) for one in labels], "--", color=MUTED, label="1/√n")
    axes.set(xscale="log", yscale="log")
    dress(
        axes,
        title="root mean square over seeds; shaded: least to greatest",
        x="labels",
        y="error of reward differences, logits",
    )
    shared_legend(figure, 4)
    return figure


if __name__ == "__main__":
    sys.exit(main())
