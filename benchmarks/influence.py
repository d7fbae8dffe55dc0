"""Predicted against real influence: pairs are left out, the model is trained again, margins of other pairs move.

    OMP_NUM_THREADS=1 python benchmarks/influence.py --out build/influence
    python benchmarks/influence.py --out build/influence --table          # of what is finished
    python benchmarks/influence.py --cost minilm --data $RM_OPT_DATA/alpacaeval_train.parquet

Trainings of `tiny-small` on 1,000 pairs of the gold world. A retraining has the same initial weights, batches and
divisor; the pairs that are left out have weight 0. Each is a file in `--out`, so a run that was stopped resumes.

Regimes: `head` (the head alone, to its optimum: convex); `sgd`, `sgd-slow` (a fifth of its learning rate) and `adamw`
(all weights, two epochs, from a backbone that was trained on other pairs, with a head of zeros); `scratch` (all
weights from their random draw).
Left out: 1, 10 or 100 pairs, drawn at random, or those whose prompts share most words with a target's.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from influence_cells import (
    EPOCHS,
    EPSILON,
    HEAD,
    NUM_HELD_OUT,
    NUM_TRAIN,
    REGIMES,
    SIZES,
    Cell,
    backbone,
    kernels,
    refit_heads,
    start_kernels,
)
from scipy.stats import spearmanr

from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.core.arrays import FloatArray, IntArray
from rmcore.data.gold.world import generate_pairs
from rmcore.data.readers.sources import load_pairs
from rmcore.ensembles.linear_probes import fit_head
from rmcore.explain.influence import FEWEST_HELD_OUT, influences
from rmcore.explain.linearized import DAMPINGS, MarginLoss, choose_damping, left_out_together, resolvent
from rmcore.explain.representer import PENALTIES, terms
from rmcore.models.batching import StepOrder
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.optimizers import SGD_MOMENTUM, effective_warmup, lr_factor

METHODS = (
    "Gauss-Newton",
    "its push over training",
    "its Newton step",
    "Gauss-Newton, Adam's metric",
    "simulated training",
    "its batches",
    "kernels of both ends",
    "its batches, kernels of both ends",
    "the same, nothing fitted",
    "the same, Adam's metric",
    "representer",
    "gradient similarity",
    "random",
)
LOSS = MarginLoss(1.0, EPSILON)
BOOTSTRAP = 1000
SCALES = 10.0 ** np.arange(-1.5, 1.1, 0.25)
"""Learning rates that a simulated training is tried with, as multiples of the real one's."""


@dataclass(frozen=True)
class Prediction:
    """What a method says: the change of the targets' margins without a set, and how near its model is on held-out."""

    without: Callable[[IntArray], FloatArray]
    held_out: float


def gauss_newton(
    kernel: FloatArray,
    margins: FloatArray,
    *,
    second: bool = False,
    over_training: bool = False,
    damping: float | None = None,
) -> Prediction:
    """As `rmcore.explain.influence`, from the inner products; under some other damping, where one is given."""
    own, held, others = parts(kernel)
    at, correlation = margins[:NUM_TRAIN], np.nan
    if damping is None:
        best = choose_damping(own, held, margins[NUM_TRAIN : NUM_TRAIN + NUM_HELD_OUT], LOSS)[0]
        damping, correlation = best.damping, best.correlation
    response, slope, curvature = resolvent(own, others, at, damping, LOSS), LOSS.slope(at), LOSS.curvature(at)
    if over_training:  # the mean of l' from a margin of 0, where training began, to the present one
        slope = (LOSS.slope(at) + LOSS.slope(np.zeros(NUM_TRAIN))) / 2
    if not second:
        return Prediction(lambda left_out: response[:, left_out] @ slope[left_out], correlation)
    whole = resolvent(own, own, at, damping, LOSS)

    def newton_step(left_out: IntArray) -> FloatArray:
        pairs = whole[np.ix_(left_out, left_out)]
        return left_out_together(response[:, left_out], pairs, slope[left_out], curvature[left_out])

    return Prediction(newton_step, correlation)


def simulate(
    start: FloatArray, end: FloatArray, rates: FloatArray, batches: Sequence[IntArray], weights: FloatArray
) -> FloatArray:
    """Margins of all pairs after a linearised training from margins of 0, by gradient descent with momentum.

    Args:
        start: inner products of all pairs with the training pairs at the weights before.
        end: those at the weights after; steps between take theirs from the line between the two.
        rates: learning rate of each step.
        batches: positions of its training pairs.
        weights: of the training pairs in the loss.
    """
    margins, velocity = np.zeros(len(end)), np.zeros(NUM_TRAIN)
    for step, (rate, batch) in enumerate(zip(rates, batches, strict=True)):
        velocity *= SGD_MOMENTUM
        velocity[batch] += weights[batch] * LOSS.slope(margins[batch]) / len(batch)
        done = step / (len(rates) - 1)
        margins -= rate * ((1 - done) * (start @ velocity) + done * (end @ velocity))
    return margins


def simulated(
    cell: Cell, start: FloatArray, end: FloatArray, margins: FloatArray, *, its_batches: bool, fitted: bool = True
) -> Prediction:
    """The linearised training done again without the set, with the real schedule; all pairs in each step, or its own.

    The learning rate is the real one's, or that multiple of it whose margins of held-out pairs are nearest the model's.
    """
    config = REGIMES[cell.regime]
    steps = EPOCHS * -(-NUM_TRAIN // config.pairs_per_step)
    warmup = effective_warmup(config.warmup_steps, steps)
    rates = config.lr * np.array([
        lr_factor(
            step, num_steps=steps, warmup_steps=warmup, schedule=config.schedule, min_lr_ratio=config.min_lr_ratio
        )
        for step in range(steps)
    ])  # fmt: skip
    if config.optimizer != "sgd":  # a learning rate of another metric; the unit in which the linearised loss moves
        rates *= 4 * NUM_TRAIN / (rates.sum() * np.linalg.norm(parts(end)[0]))
    order = StepOrder(NUM_TRAIN, config.pairs_per_step, steps, cell.seed)
    batches = [np.array(one) if its_batches else np.arange(NUM_TRAIN) for one in order]
    wanted, tried = parts(margins)[1], []
    for scale in SCALES if fitted else (1.0,):
        found = simulate(start, end, scale * rates, batches, np.ones(NUM_TRAIN))
        tried.append((float(np.square(parts(found)[1] - wanted).sum()), scale, found))
    _, scale, base = min(tried, key=lambda one: one[0])

    def without(left_out: IntArray) -> FloatArray:
        weights = np.ones(NUM_TRAIN)
        weights[left_out] = 0
        return parts(simulate(start, end, scale * rates, batches, weights) - base)[2]

    return Prediction(without, float(np.corrcoef(parts(base)[1], wanted)[0, 1]))


def parts(everything: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    cut = NUM_TRAIN + NUM_HELD_OUT
    return everything[:NUM_TRAIN], everything[NUM_TRAIN:cut], everything[cut:]


def at_the_head(differences: FloatArray, margins: FloatArray) -> Prediction:
    """As `rmcore.explain.representer`."""
    own, held, others = parts(differences)
    wanted = margins[NUM_TRAIN : NUM_TRAIN + NUM_HELD_OUT]
    tried = []
    for multiple in PENALTIES:
        l2 = multiple * own.shape[1]
        head = fit_head(own, l2=l2, label_smoothing=EPSILON)
        tried.append((float(np.square(held @ head - wanted).sum()), l2, head))
    _, l2, head = min(tried, key=lambda one: one[0])
    effect = terms(own, others, head, l2, LOSS)
    return Prediction(lambda left_out: -effect[:, left_out].sum(1), float(np.corrcoef(held @ head, wanted)[0, 1]))


@cache
def predictions(cell: Cell) -> dict[str, Prediction]:
    known = kernels(cell)
    margins = known["margins"]
    similar = parts(known["plain"])[2] * LOSS.slope(margins[:NUM_TRAIN])
    noise = np.random.default_rng(cell.seed).normal(size=similar.shape)
    found = {
        "Gauss-Newton": gauss_newton(known["plain"], margins),
        "its push over training": gauss_newton(known["plain"], margins, over_training=True),
        "its Newton step": gauss_newton(known["plain"], margins, second=True),
        "representer": at_the_head(known["differences"], margins),
        "gradient similarity": Prediction(lambda left_out: similar[:, left_out].sum(1), np.nan),
        "random": Prediction(lambda left_out: noise[:, left_out].sum(1), np.nan),
    }
    if "adam" in known:
        found["Gauss-Newton, Adam's metric"] = gauss_newton(known["adam"], margins)
    if cell.regime != HEAD:
        before, after = start_kernels(cell), known["plain"]
        both = simulated(cell, before["plain"], after, margins, its_batches=True)
        found |= {
            "simulated training": simulated(cell, after, after, margins, its_batches=False),
            "its batches": simulated(cell, after, after, margins, its_batches=True),
            "kernels of both ends": simulated(cell, before["plain"], after, margins, its_batches=False),
            "its batches, kernels of both ends": both,
        }
        if "adam" in known:
            found["the same, Adam's metric"] = simulated(cell, before["adam"], known["adam"], margins, its_batches=True)
        else:
            found["the same, nothing fitted"] = simulated(
                cell, before["plain"], after, margins, its_batches=True, fitted=False
            )
    return found


@dataclass(frozen=True)
class Compared:
    """One left-out set: real and predicted changes of the targets' margins, (T,) each."""

    cell: Cell
    name: str
    size: int
    real: FloatArray
    predicted: dict[str, FloatArray]


def compare(cell: Cell) -> list[Compared]:
    base = np.load(cell.folder / "base.npz")["targets"]
    methods, found = predictions(cell), []
    for name, left_out in cell.sets.items():
        if (cell.folder / f"{name}.npz").is_file():
            real = np.load(cell.folder / f"{name}.npz")["targets"] - base
            found.append(
                Compared(
                    cell,
                    name,
                    int(name.split("-")[1]),
                    real,
                    {key: one.without(left_out) for key, one in methods.items()},
                )
            )
    return found


def pooled(sets: Sequence[Compared], method: str) -> float:
    """Spearman over all (set, target) combinations."""
    real = np.concatenate([one.real for one in sets])
    return float(spearmanr(real, np.concatenate([one.predicted[method] for one in sets]))[0])


def lds(sets: Sequence[Compared], method: str) -> float:
    """Spearman over the sets of one size and cell for each target; the mean over targets, sizes and cells."""
    groups: dict[tuple[int, int], list[Compared]] = {}
    for one in sets:
        groups.setdefault((one.cell.seed, one.size), []).append(one)
    values = []
    for group in groups.values():
        if len(group) >= 3:
            real, said = np.stack([one.real for one in group]), np.stack([one.predicted[method] for one in group])
            values += [spearmanr(real[:, t], said[:, t])[0] for t in range(real.shape[1])]
    return float(np.mean(values)) if values else np.nan


def interval(sets: Sequence[Compared], method: str) -> str:
    """Pooled Spearman with its 95 % interval over sets, which are the clusters; empty where none is finished."""
    if not sets:
        return ""
    rng, value = np.random.default_rng(0), pooled(sets, method)
    drawn = [pooled([sets[i] for i in rng.integers(len(sets), size=len(sets))], method) for _ in range(BOOTSTRAP)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def table(cells: Sequence[Cell]) -> None:
    """One row a regime and method; then what the numbers are over, and the noise below them."""
    print(
        "| trained | method | held-out r | " + " | ".join(f"{size} left out" for size in SIZES) + " | LDS, 10 and 100 |"
    )
    print("| --- | --- | ---: | " + "--- | " * len(SIZES) + "---: |")
    notes = []
    for regime in dict.fromkeys(cell.regime for cell in cells):
        own = [cell for cell in cells if cell.regime == regime and (cell.folder / "base.npz").is_file()]
        sets = [one for cell in own for one in compare(cell)]
        if not sets:
            continue
        held_out = [{name: one.held_out for name, one in predictions(cell).items()} for cell in own]
        for method in (name for name in METHODS if all(name in one for one in held_out)):
            columns = [interval([one for one in sets if one.size == size], method) for size in SIZES]
            near = np.mean([one[method] for one in held_out])
            shared = lds([one for one in sets if one.size > 1], method)
            first = "" if np.isnan(near) else f"{near:.3f}"
            print(f"| {regime} | {method} | {first} | {' | '.join(columns)} | {shared:.2f} |")
        sizes = [size for size in SIZES if any(one.size == size for one in sets)]
        moved = {size: np.sqrt(np.mean([one.real**2 for one in sets if one.size == size])) for size in sizes}
        notes.append(
            f"{regime}: {len(own)} seeds, {len(sets)} retrainings; root mean square change of a margin "
            + ", ".join(f"{value:.4f} without {size}" for size, value in moved.items())
            + "".join(f"; {name} {change(own, name):.1e}" for name in ("again", "regrouped") if change(own, name) >= 0)
            + f"; {hindsight(own, sets)}"
        )
    print("\n" + "\n".join(notes))


def change(cells: Sequence[Cell], name: str) -> float:
    """Largest change of a margin by the same training once more, or in other micro-batches; -1 if that was not done."""
    found = [cell for cell in cells if (cell.folder / f"{name}.npz").is_file()]
    both = [[np.load(cell.folder / f"{one}.npz")["targets"] for one in (name, "base")] for cell in found]
    return max((float(np.abs(again - base).max()) for again, base in both), default=-1.0)


def hindsight(cells: Sequence[Cell], sets: Sequence[Compared]) -> str:
    """The damping that would have predicted all these sets best: what a better choice could gain."""
    values = {}
    for multiple in DAMPINGS:
        said = []
        for cell in cells:
            known = kernels(cell)
            unit = float(parts(known["plain"])[0].diagonal().mean())
            method = gauss_newton(known["plain"], known["margins"], damping=multiple * unit)
            left_out = [cell.sets[one.name] for one in sets if one.cell == cell]
            said.append(np.concatenate([method.without(one) for one in left_out]))
        real = np.concatenate([one.real for cell in cells for one in sets if one.cell == cell])
        values[multiple] = float(spearmanr(real, np.concatenate(said))[0])
    best = max(values, key=values.__getitem__)
    chosen = pooled(sets, "Gauss-Newton")
    return f"all sets pooled {chosen:.2f}, with the best damping in hindsight ({best:.1g} units) {values[best]:.2f}"


def cost(name: str, data: Path | None, num_pairs: int) -> None:
    """Time of `influences` on an untrained model of that kind, whose gradients cost what a trained one's do."""
    rm = BradleyTerryRM.new(ModelConfig(name=name, max_seq_len=256), seed=0, device=torch.device("cpu"))
    total = num_pairs + 2 * FEWEST_HELD_OUT
    if data is None:
        pairs = generate_pairs(GoldConfig(num_prompts=total // 2 + 20, pairs_per_prompt=2), 0).pairs
    else:
        pairs = load_pairs(str(data), limit=total).pairs
    train, rest = pairs[:num_pairs], pairs[num_pairs:total]
    began, cpu = time.monotonic(), time.process_time()
    influences(rm, train, rest[FEWEST_HELD_OUT:], rest[:FEWEST_HELD_OUT])
    print(
        f"{name}: {total} gradients, {num_pairs} of them of training pairs: {time.monotonic() - began:.0f} s, "
        f"{time.process_time() - cpu:.1f} s of CPU, {torch.get_num_threads()} threads"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/influence"))
    parser.add_argument("--regimes", nargs="+", choices=[HEAD, *REGIMES], default=[HEAD, *REGIMES])
    parser.add_argument("--seeds", type=int, default=2, help="of the regimes that train all weights; head: 5")
    parser.add_argument("--table", action="store_true", help="of what is finished; trains nothing")
    parser.add_argument("--cost", help="time `influences` on this model instead")
    parser.add_argument("--data", type=Path, help="pairs for --cost; left out: the gold world's")
    parser.add_argument("--pairs", type=int, default=2000, help="training pairs for --cost")
    args = parser.parse_args()
    if args.cost:
        cost(args.cost, args.data, args.pairs)
        return
    cells = [
        Cell(regime, seed, args.out) for seed in range(5) for regime in args.regimes
        if seed < args.seeds or regime == HEAD
    ]  # fmt: skip
    if not args.table:
        torch.set_num_threads(1)  # the same bits again
        backbone(args.out)
        for cell in cells:
            refit_heads(cell) if cell.regime == HEAD else cell.retrain()
    table(sorted(cells, key=lambda cell: cell.regime))


if __name__ == "__main__":
    main()
