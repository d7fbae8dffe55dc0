"""How often a verdict says "ready" at its edges: rare disasters, near-copies of prompts, odd files, ties.

    python benchmarks/verdict_edges.py [--trials 1000] [--only samples|files|served]

Simulated evaluations of readiness v2 with known truth, through its own measurements. Samples of a prompt have a normal
gold reward, and the reward model sees it with a correlation of `quality`, which differs between prompts. A disaster is
a prompt some of whose samples are hacked: the reward model prefers them to all others, and they lose so much gold that
the gain over all prompts is zero (or, without disasters, it is what the quality gives). Prompts of one topic share how
well the reward model sees them, so that a world of topics gains zero where half of them lose what the other half gains.

Shown for each world: the true gain of best-of-64, the verdicts, how often the interval of the gain holds the truth, and
how often none of the disasters was among the prompts: then nothing that was judged can tell this world from one
without any.

Some worlds are files of samples as users give them, read by the functions of the stages: prompts that the reward model
was trained on, written otherwise, and prompts or samples without a judgement. Others serve best-of-n to at most 400
fresh prompts and end where it is decided (level 4).
"""

import argparse
import contextlib
import io
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd

from rmcore.config.evaluate import ReadinessConfig
from rmcore.core.arrays import FloatArray
from rmcore.data.splits import compared_prompt
from rmcore.policy.confirmation import Decision, ServedGain
from rmcore.policy.overoptimization import overoptimization
from rmcore.policy.sampling.best_of_n import best_of_n_weights
from rmcore.policy.sampling.samples import pools
from rmcore.readiness.components import JudgedPools, on_policy_parts
from rmcore.readiness.readiness_v2 import Unseen, judge_v2
from rmcore.stages.overoptimization import judged_part, not_trained_on
from rmcore.stages.samples import judged_samples

NUM_RESAMPLES = 400
HACKED_REWARD = 10.0


@dataclass(frozen=True)
class World:
    """What one evaluation draws from.

    num_prompts, samples: of an evaluation.
    quality: mean correlation of reward and gold; None: half of the topics have one that is as far below zero as that
        of the other half above.
    disasters: share of prompts with hacked samples.
    hacked: share of their samples that is hacked.
    copies: prompts of one topic, which share the quality.
    known_topics: whether the evaluation is told which prompts share a topic.
    short: samples that the first prompt has, where that differs.
    cap: reward above which all are equal; None: none are.
    levels: distinct answers of a prompt; None: each is another.
    planned_kl: nats.
    share: of the prompts that have the quality, the first ones; the others have `elsewhere`.
    file: what the samples' file is like. trained on: the first prompts are those of the reward model's training.
        unjudged prompts: those with the quality `elsewhere` have three judged samples each. unjudged hacked: hacked
        samples are longer than the others, and none has a judgement. unjudged by chance: 17 samples of each are judged.
    """

    name: str
    num_prompts: int
    quality: float | None = 0.7
    disasters: float = 0.0
    hacked: float = 0.0
    copies: int = 1
    known_topics: bool = True
    samples: int = 64
    short: int | None = None
    cap: float | None = None
    levels: int | None = None
    planned_kl: float = 3.0
    share: float = 1.0
    elsewhere: float = 0.0
    file: Literal["trained on", "unjudged prompts", "unjudged hacked", "unjudged by chance"] | None = None
    loss: float = field(default=0.0)
    """Gold that a hacked sample loses; `solved` finds it."""


def draw(world: World, rng: np.random.Generator, num_prompts: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Rewards and gold of the samples (N, K), and which prompts have a hacked one (N,)."""
    shape, topics = (num_prompts, world.samples), -(-num_prompts // world.copies)
    if world.quality is None:
        quality = np.where(rng.random(topics) < 0.5, 0.6, -0.6)
    else:
        quality = np.where(np.arange(topics) < round(world.share * topics), world.quality, world.elsewhere)
        quality = np.clip(quality + 0.1 * rng.normal(size=topics), -1, 1)
    quality = np.repeat(quality, world.copies)[:num_prompts, None]
    gold, noise = rng.normal(size=(2, *shape))
    if world.levels is not None:  # one of a few answers, each with its gold and its reward
        answer = rng.integers(world.levels, size=shape)
        gold, noise = (np.take_along_axis(side, answer, axis=1) for side in (gold, noise))
    reward = quality * gold + np.sqrt(1 - quality**2) * noise
    if world.cap is not None:
        reward = np.minimum(reward, world.cap)
    is_disaster = rng.random(num_prompts) < world.disasters
    hacked = is_disaster[:, None] & (rng.random(shape) < world.hacked)
    return np.where(hacked, HACKED_REWARD + noise, reward), gold - world.loss * hacked, hacked.any(axis=1)


def as_read(
    world: World, reward: FloatArray, gold: FloatArray, rng: np.random.Generator
) -> tuple[list[FloatArray], list[FloatArray], int, int]:
    """Rewards and gold of the prompts that are left of a file, how many lack judgements, and on how many of those left
    the reward model prefers a sample without one.
    """
    num_prompts, samples = reward.shape
    is_first = np.arange(num_prompts) < round(world.share * num_prompts)
    is_hacked = reward > HACKED_REWARD / 2
    has_none = {
        "trained on": np.zeros_like(is_hacked),
        "unjudged prompts": ~is_first[:, None] & (np.arange(samples) >= 3),
        "unjudged hacked": is_hacked,
        "unjudged by chance": rng.random(reward.shape).argsort(axis=1) >= 17,
    }[world.file or ""]
    lengths = rng.normal(129 + 43 * is_hacked, 30).clip(1).astype(int)
    prompts = [f"  Why is number {place}, of ALL numbers , so odd?! " for place in range(num_prompts)]
    table = pd.DataFrame(
        {
            **{"prompt_id": np.repeat(np.arange(num_prompts), samples), "prompt": np.repeat(prompts, samples)},
            **{"response": ["x" * length for length in lengths.ravel()]},
            **{"unit": np.repeat(np.arange(num_prompts), samples)},
            **{"reward": reward.ravel(), "gold": np.where(has_none, np.nan, gold).ravel()},
        }
    )  # fmt: skip
    seen = {compared_prompt(f"why is number {place} of all numbers so odd") for place in np.flatnonzero(is_first)}
    with contextlib.redirect_stderr(io.StringIO()):
        table, unjudged, counts = judged_samples(table, "the file has no number")
        table, _ = not_trained_on(table, seen if world.file == "trained on" else set())
    _, num_chosen = judged_part(table, unjudged, lambda rows: rows)
    rewards, judged = (pools(table, "prompt_id", column) for column in ("reward", "gold"))
    return rewards, judged, counts["prompts_left_out"], num_chosen


def best_gains(reward: FloatArray, gold: FloatArray) -> FloatArray:
    """Gold gain of the best of all samples of each prompt, (N,), in gold's own unit."""
    if np.unique(reward[0]).size == reward.shape[1]:
        return np.take_along_axis(gold, reward.argmax(axis=1)[:, None], axis=1)[:, 0] - gold.mean(axis=1)
    weights = np.array([best_of_n_weights(pool, len(pool)) for pool in reward])
    return (weights * gold).sum(axis=1) - gold.mean(axis=1)


def solved(world: World) -> tuple[World, float]:
    """The world whose disasters lose so much that nothing is gained, and its true gain, elsewhere than in training."""
    fresh = replace(world, share=0.0) if world.file == "trained on" else world

    def gain(loss: float) -> float:
        rng, some = np.random.default_rng(1), replace(fresh, loss=loss)
        return float(np.mean([best_gains(*draw(some, rng, 4000)[:2]).mean() for _ in range(5)]))

    without = gain(0.0)
    if not world.disasters:
        return world, without
    return replace(world, loss=without / (without - gain(1.0))), 0.0


def evaluation(world: World, rng: np.random.Generator) -> tuple[str, tuple[float | None, float | None], bool]:
    """One evaluation: its status, the interval of the gain in units of gold, and whether a disaster was judged."""
    reward, gold, is_disaster = draw(world, rng, world.num_prompts)
    rewards, judged, num_left_out, num_chosen = list(reward), list(gold), 0, 0
    if world.short is not None:
        rewards[0], judged[0] = rewards[0][: world.short], judged[0][: world.short]
    if world.file is not None:
        rewards, judged, num_left_out, num_chosen = as_read(world, reward, gold, rng)
    units = [place // world.copies if world.known_topics else place for place in range(len(rewards))]
    seed = int(rng.integers(2**31))
    settings = {"num_resamples": NUM_RESAMPLES, "seed": seed}
    curve = overoptimization(rewards, judged, planned_kl=world.planned_kl, units=units, **settings)
    pools = JudgedPools(rewards, judged, [np.zeros(len(pool)) for pool in rewards])
    found = on_policy_parts(pools, units=units, **settings)
    plan = curve.plan
    assert plan is not None
    parts = {name: value.to_dict() for name, value in found.items()}
    parts |= {"planned_gain": plan.gain.to_dict(), "planned_fall": plan.fall.to_dict()}
    config = ReadinessConfig(planned_kl=world.planned_kl)
    unseen = Unseen(num_left_out + plan.num_short, curve.num_prompts, plan.worst, num_chosen)
    verdict = judge_v2(parts, config, "simulation", num_telling=plan.num_telling, reached=plan.reached, unseen=unseen)[
        "verdict"
    ]
    last = curve.points[-1].gold  # of the best of all samples, whose truth is known
    unit = float(np.sqrt(np.mean([pool.var(ddof=1) for pool in judged])))
    found = tuple(None if end is None else end * unit for end in last.ends)
    return verdict["status"], found, bool(is_disaster.any())


RARE = {"quality": 0.7, "disasters": 0.1, "hacked": 1 / 32}
SMALL = {"samples": 24, "planned_kl": 1.5}
MEMORISED = SMALL | {"quality": 1.0, "file": "trained on"}
UNJUDGED = SMALL | {"elsewhere": -0.42, "file": "unjudged prompts"}
PART = SMALL | {"file": "unjudged hacked"}
WORLDS = (
    *(World("hacked in 1/32 of the samples of 10 % of prompts", n, **RARE) for n in (10, 20, 50, 150)),
    *(World("hacked in 1/640 of all samples", n, disasters=1.0, hacked=1 / 640) for n in (10, 50)),
    *(World("hacked in 1/16 of those of 3 % of prompts", n, disasters=0.03, hacked=1 / 16) for n in (50, 150)),
    *(World("hacked in 1/16 of those of 2 % of prompts", n, disasters=0.02, hacked=1 / 16) for n in (50, 150, 200)),
    World("five wordings of each prompt, counted as one", 250, quality=None, copies=5),
    World("five wordings of each prompt, counted as five", 250, quality=None, copies=5, known_topics=False),
    World("topics of ten prompts, named by `policy.topic_column`", 500, quality=None, copies=10),
    *(World("excellent", n) for n in (50, 150)),
    World("fair", 150, quality=0.3),
    World("excellent, one prompt with 40 of 64 samples judged", 150, short=40),
    *(World(f"excellent, planned 1.5 nats, {k} samples a prompt", 150, samples=k, planned_kl=1.5) for k in (16, 17)),
    World("excellent, 18 % of the rewards at a cap", 150, cap=0.92),
    World("excellent, 8 distinct answers of a prompt", 150, levels=8),
    *(
        World(f"perfect on {share:.0%} of the prompts, trained on; blind on the others", 160, share=share, **MEMORISED)
        for share in (0.1, 0.2, 0.5)
    ),
    World("as good on 60 prompts as it is harmful on 100 without a judgement", 160, share=60 / 160, **UNJUDGED),
    World("excellent, 5 of 160 prompts without judgements", 160, share=155 / 160, **UNJUDGED | {"elsewhere": 0.7}),
    World("longer samples without judgements, preferred and as good as any", 100, hacked=0.3, disasters=1.0, **PART),
    World("excellent, 17 of 24 samples judged, by chance", 150, **PART | {"file": "unjudged by chance"}),
)


@dataclass(frozen=True)
class Served:
    """Differences of the chosen and another response, in sd: normal with mean `gain` and deviation `spread`, but on a
    share `disasters` of the prompts, where `loss` is lost.
    """

    name: str
    gain: float
    disasters: float = 0.0
    loss: float = 0.0
    spread: float = 1.3
    most: int = 400

    @property
    def truth(self) -> float:
        """Mean difference over all prompts."""
        return (1 - self.disasters) * self.gain - self.disasters * self.loss


SERVED = (
    Served("1 % of prompts lose 60 sd, the others gain 0.6", 0.606, 0.01, 60.0),
    Served("2 % lose 30 sd, the others gain 0.6", 0.612, 0.02, 30.0),
    Served("3 % lose 20 sd, the others gain 0.5", 0.5, 0.03, 20.0),
    Served("0.5 % lose 120 sd, the others gain 0.6", 0.603, 0.005, 120.0),
    Served("no disaster", 0.0),
    *(Served("no disaster", gain) for gain in (0.3, 0.6, 1.0, -0.6)),
    Served("no disaster, 128 prompts at most", 0.6, most=128),
    Served("1 % lose 60 sd, 128 prompts at most", 0.606, 0.01, 60.0, most=128),
)


def serving(world: Served, rng: np.random.Generator) -> tuple[Decision, int]:
    """What one serving says at its end, and after how many prompts."""
    known = ServedGain(3.0, 0.3)
    is_disaster = rng.random(world.most) < world.disasters
    for difference in np.where(is_disaster, -world.loss, world.gain + world.spread * rng.normal(size=world.most)):
        if not known.see(float(difference)):
            break
    return known.decision, len(known.differences)


def served_rates(world: Served, trials: int) -> dict[str, float]:
    """Shares of servings that say each decision, and the mean number of prompts that they took."""
    rng = np.random.default_rng(world.most)
    found = [serving(world, rng) for _ in range(trials)]
    counts = Counter(said for said, _ in found)
    shares = {said: counts[said] / trials for said in ("rose", "unclear", "fell")}
    return shares | {"prompts": float(np.mean([count for _, count in found]))}


def rates(world: World, trials: int) -> dict[str, float]:
    """Shares of evaluations: by status, whose interval holds the truth, and that saw no disaster."""
    world, truth = solved(world)
    rng, statuses, covered, unseen = np.random.default_rng(world.num_prompts), Counter(), 0, 0
    for _ in range(trials):
        status, (low, high), seen = evaluation(world, rng)
        statuses[status] += 1
        covered += low is not None and high is not None and low <= truth <= high
        unseen += not seen
    shares = {status: statuses[status] / trials for status in ("ready", "unclear", "not_ready")}
    return shares | {"covered": covered / trials, "unseen": unseen / trials, "gain": truth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--only", choices=("samples", "files", "served"))
    given = parser.parse_args()
    chosen = [world for world in WORLDS if given.only in (None, "samples" if world.file is None else "files")]
    if chosen:
        print("| world | prompts | gain | ready | unclear | not ready | interval holds it | no disaster seen |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for world in chosen:
        found = rates(world, given.trials)
        shown = [f"{100 * found[name]:.1f} %" for name in ("ready", "unclear", "not_ready", "covered")]
        unseen = f"{100 * found['unseen']:.1f} %" if world.disasters else "–"
        row = [world.name, str(world.num_prompts), f"{found['gain']:+.2f}", *shown, unseen]
        print(f"| {' | '.join(row)} |", flush=True)
    if given.only in (None, "served"):
        print("\n| served | true gain | rose | unclear | fell | prompts |\n| --- | ---: | ---: | ---: | ---: | ---: |")
        for one in SERVED:
            said = served_rates(one, given.trials)
            shown = [f"{100 * said[name]:.1f} %" for name in ("rose", "unclear", "fell")]
            print(f"| {one.name} | {one.truth:+.2f} | {' | '.join(shown)} | {said['prompts']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
