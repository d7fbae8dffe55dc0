"""Find planted wrong labels: how many, at what rate, how many in clean data, and what cleaning does to accuracy.

    python benchmarks/label_noise.py --seeds 5 --out noise_cells
    python benchmarks/label_noise.py --seeds 5 --out noise_cells --parts oracle alpaca      (minutes)

Three parts, each with labels turned round at known rates:

- oracle: the gold world, margins by the true reward. Labels are drawn from it, so close calls go against it without
  being wrong: this is the limit of any model, and the test of the rate and its interval where the model is right.
- gold: the same world, margins by `tiny-small` trained on each of three folds.
- alpaca: AlpacaEval pairs of $RM_OPT_DATA, exact heads on MiniLM's frozen features, ten folds; up to 4 pairs of 400
  prompts. The judge's labels have a rate of their own, by its stated preferences; heads fitted on cleaned pairs are
  judged on pairs of other prompts.
- alpaca-all: the same with all pairs of 150 prompts, whose answers recur more often.

Margins are with the other labels of the prompt; "by margins alone" is what they find without them.

Beside ours stands cleanlab on the same probabilities (`pip install --no-deps --target FOLDER cleanlab==2.9.0 termcolor
tqdm`, FOLDER in PYTHONPATH); where it is not installed its columns are empty.
A finished fold or cell is a file in --out; run again, it goes on.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit, stdtrit
from sklearn.metrics import roc_auc_score

from rmcore.cli.data_noise import TRAINING
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.arrays import BoolArray, FloatArray
from rmcore.core.files import write_json
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import PreferencePair, cap_pairs
from rmcore.data.readers.sources import load_pairs
from rmcore.ensembles.features import pair_features
from rmcore.ensembles.linear_probes import fit_head
from rmcore.evaluation.uncertainty import t_interval
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.noise.contradictions import couples
from rmcore.noise.crossfit import Heads, Trainings, cross_fit, deal_folds, in_one_unit
from rmcore.noise.ledger import FALSE_SHARE
from rmcore.noise.rate import LabelModel, called, fit_labels, flipped
from rmcore.noise.strengths import with_other_labels

RATES = (0.0, 0.05, 0.1, 0.25)
PROMPTS = {"train": 400, "all": 150, "test": 137}
PAIRS_A_PROMPT = {"train": 4, "all": None, "test": 3}
FOLDS = {"gold": 3, "alpaca": 10}
LEARNED_FROM = {"alpaca": "train", "alpaca-all": "all"}


def gold_pairs(args: argparse.Namespace, rate: float, seed: int) -> list[PreferencePair]:
    """Pairs of the gold world with turned labels."""
    config = GoldConfig(num_prompts=args.prompts, pairs_per_prompt=3, flip_rate=rate)
    return generate_pairs(config, seed).pairs


def gold_truth(pairs: Sequence[PreferencePair]) -> tuple[BoolArray, FloatArray]:
    """Which labels were turned, and the true margins in favour of the labels."""
    turned = np.array([pair.metadata["flipped"] for pair in pairs], dtype=bool)
    return turned, np.array([pair.metadata["gold_chosen"] - pair.metadata["gold_rejected"] for pair in pairs])


def judged(alone: FloatArray, pairs: Sequence[PreferencePair], turned: BoolArray, own: float) -> dict[str, Any]:
    """What the ledger says, against the truth; `own` is the rate that the labels have before any was turned."""
    margins, strengths = with_other_labels(alone, couples(pairs))
    model = fit_labels(margins, [pair.prompt_id for pair in pairs])
    wrong = called_wrong(margins, model)
    planted = float(turned.mean())
    truth = planted + own - 2 * planted * own
    found: dict[str, Any] = {
        "spread": None if strengths is None else strengths.spread,
        "agrees_alone": float((alone > 0).mean()),
        "auroc_alone": float(roc_auc_score(turned, -alone)) if turned.any() else None,
        "agrees": float((margins > 0).mean()),
        "auroc": float(roc_auc_score(turned, -margins)) if turned.any() else None,
        "truth": truth,
        "rate": model.rate.value,
        "covered": bool(model.rate.low <= truth <= model.rate.high),
        "low": model.rate.low,
        "high": model.rate.high,
        "called": int(wrong.sum()),
        "called_right": int((wrong & ~turned).sum()),
    }
    issues = cleanlab_issues(alone)
    if issues is not None:
        found |= {
            "cleanlab_rate": float(issues.mean()),
            "cleanlab_called": int(issues.sum()),
            "cleanlab_right": int((issues & ~turned).sum()),
        }
    return found


def called_wrong(margins: FloatArray, model: LabelModel) -> BoolArray:
    """Labels that are called, as the ledger does."""
    cautious = flipped(margins, model.scale_at_low, model.rate.low)
    return called(cautious, FALSE_SHARE) & (cautious > 0)


def cleanlab_issues(margins: FloatArray) -> BoolArray | None:
    """Pairs that cleanlab finds wrong, with its defaults; None where it is not installed.

    Which side is called class 1 is drawn for each pair, as a pair has no order of its own.
    """
    if importlib.util.find_spec("cleanlab") is None:
        return None
    from cleanlab.filter import find_label_issues

    labels = np.random.default_rng(0).integers(2, size=len(margins))
    first = expit(np.where(labels == 1, margins, -margins))
    return np.asarray(find_label_issues(labels, np.stack([1 - first, first], axis=1), n_jobs=1), dtype=bool)


def oracle(args: argparse.Namespace, rate: float, seed: int) -> dict[str, Any]:
    """The true reward's margins."""
    pairs = gold_pairs(args, rate, seed)
    turned, margins = gold_truth(pairs)
    return judged(margins, pairs, turned, own=0.0)


def gold(args: argparse.Namespace, rate: float, seed: int) -> dict[str, Any]:
    """Trainings by fold; finished folds are kept."""
    pairs = gold_pairs(args, rate, seed)
    turned, truth = gold_truth(pairs)
    model = ModelConfig(name="tiny-small", max_seq_len=256)
    scorer = Trainings(pairs, model, TrainConfig.model_validate(TRAINING), device="cpu", seed=seed)
    folds = deal_folds(pairs, FOLDS["gold"], seed=seed)
    margins = cross_fit(pairs, scorer, folds, folder=args.out / f"gold_{rate}_{seed}")
    found = judged(margins, pairs, turned, own=0.0)
    return found | {"limit": float(roc_auc_score(turned, -truth)) if turned.any() else None}


class Alpaca:
    """Pairs and features, read or computed once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.pairs: dict[str, list[PreferencePair]] = {}
        self.x: dict[str, FloatArray] = {}
        for split in ("test", *(LEARNED_FROM[part] for part in args.parts if part in LEARNED_FROM)):
            file = "test" if split == "test" else "train"
            every = list(load_pairs(str(args.data / f"alpacaeval_{file}.parquet")).pairs)
            kept = set(sorted({pair.prompt_id for pair in every})[: PROMPTS[split]])
            of_prompts, most = [p for p in every if p.prompt_id in kept], PAIRS_A_PROMPT[split]
            self.pairs[split] = of_prompts if most is None else cap_pairs(of_prompts, most)
            place = args.out / f"alp_{split}.npz"
            if not place.is_file():
                rm = BradleyTerryRM.new(ModelConfig(name="minilm", max_seq_len=256), seed=0, device=torch.device("cpu"))
                chosen, rejected = pair_features(rm, self.pairs[split])
                np.savez(place, d=(chosen - rejected).astype(np.float32))
            self.x[split] = np.load(place)["d"].astype(np.float64)

    def own(self, part: str) -> float:
        """The judge's own rate of wrong labels, by its stated preferences."""
        return float(np.mean([expit(-(pair.target_margin or 0.0)) for pair in self.pairs[LEARNED_FROM[part]]]))

    def cell(self, part: str, rate: float, seed: int) -> dict[str, Any]:
        """Plant, find, clean, and train on what is left."""
        pairs = self.pairs[LEARNED_FROM[part]]
        turned = np.random.default_rng(seed).random(len(pairs)) < rate
        x = np.where(turned, -1.0, 1.0)[:, None] * self.x[LEARNED_FROM[part]]
        pairs = [
            PreferencePair(one.prompt, one.rejected, one.chosen) if is_turned else one
            for one, is_turned in zip(pairs, turned, strict=True)
        ]
        folds = deal_folds(pairs, FOLDS["alpaca"], seed=seed)
        heads, margins = Heads(x, folds, {}), np.zeros(len(pairs))
        for fold in range(FOLDS["alpaca"]):
            margins[folds == fold] = heads.margins(np.flatnonzero(folds != fold), np.flatnonzero(folds == fold))
        alone = in_one_unit(margins, folds)
        found = judged(alone, pairs, turned, self.own(part))
        margins, _ = with_other_labels(alone, couples(pairs))
        model = fit_labels(margins, [pair.prompt_id for pair in pairs])
        posterior = flipped(margins, model.scale, model.rate.value)
        wrong = called_wrong(margins, model)
        every = np.ones(len(pairs))
        arms = {
            "as it is": (x, every),
            "drop": (x, np.where(wrong, 0.0, 1.0)),
            "flip": (np.where(wrong, -1.0, 1.0)[:, None] * x, every),
            "weight": (x, 1 - posterior if model.is_shown else every),
            "turned ones left out": (x, np.where(turned, 0.0, 1.0)),
        }
        issues = cleanlab_issues(alone)
        if issues is not None:
            arms["cleanlab, drop"] = (x, np.where(issues, 0.0, 1.0))
        right = {name: (self.x["test"] @ fit_head(z, weights=w) > 0).tolist() for name, (z, w) in arms.items()}
        return found | {"right": right}


def cells(part: str, args: argparse.Namespace, made: Any) -> dict[float, list[dict[str, Any]]]:
    """All finished cells of a part, by rate; those that are missing are computed, unless --finished."""
    found: dict[float, list[dict[str, Any]]] = {}
    for rate in args.rates:
        for seed in range(args.seeds if part != "oracle" else args.oracle_seeds):
            place = args.out / f"{part}_{rate}_{seed}.json"
            if not place.is_file() and not args.finished:
                write_json(place, made(rate, seed))
            if place.is_file():
                found.setdefault(rate, []).append(json.loads(place.read_text()))
                print(f"{part} {rate} {seed}", file=sys.stderr)
    return found


def show(part: str, found: dict[float, list[dict[str, Any]]]) -> None:
    """One row a rate: means over seeds, AUROC and the rate's error with t intervals."""
    for rate, some in sorted(found.items()):
        aurocs = [one["auroc"] for one in some if one["auroc"] is not None]
        without = [one["auroc_alone"] for one in some if one["auroc_alone"] is not None]
        limits = [one["limit"] for one in some if one.get("limit") is not None]
        errors = t_interval([100 * (one["rate"] - one["truth"]) for one in some])
        worst = max(abs(one["rate"] - one["truth"]) for one in some)
        row = [
            part,
            f"{rate:.0%}",
            str(len(some)),
            f"{np.mean([one['agrees_alone'] for one in some]):.3f}, {np.mean([one['agrees'] for one in some]):.3f}",
            f"{np.mean(without):.3f}" if without else "",
            _interval(aurocs, 3) if aurocs else "",
            f"{np.mean(limits):.3f}" if limits else "",
            f"{errors.value:+.1f} {_ends(errors.ci_low, errors.ci_high, 1)}, at most {100 * worst:.1f}",
            f"{sum(one['covered'] for one in some)} of {len(some)}",
            _called(some, "called", "called_right"),
            _called(some, "cleanlab_called", "cleanlab_right"),
        ]
        print("| " + " | ".join(row) + " |")


def _called(some: Sequence[dict[str, Any]], called_as: str, right_as: str) -> str:
    if called_as not in some[0]:
        return ""
    number, right = sum(one[called_as] for one in some), sum(one[right_as] for one in some)
    share = f", {right / number:.0%} not planted" if number else ""
    return f"{number / len(some):.1f}{share}"


def _interval(values: Sequence[float], digits: int) -> str:
    value = t_interval(values)
    return f"{value.value:.{digits}f} {_ends(value.ci_low, value.ci_high, digits)}"


def _ends(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None or high is None else f"[{low:.{digits}f}, {high:.{digits}f}]"


def show_cleaning(found: dict[float, list[dict[str, Any]]], prompts: Sequence[str]) -> None:
    """Accuracy on held-out pairs, cleaned minus as it is, with an interval over prompts and seeds."""
    _, prompt = np.unique(np.asarray(prompts), return_inverse=True)
    pairs_of = np.bincount(prompt)
    for rate, some in sorted(found.items()):
        right = {
            name: np.array([one["right"][name] for one in some], dtype=float) for name in some[0]["right"]
        }  # (S, P)
        base = right["as it is"]
        row = [f"{rate:.0%}", f"{100 * base.mean():.1f}"]
        for name in ("drop", "flip", "weight", "cleanlab, drop", "turned ones left out"):
            row.append("" if name not in right else _change(100 * (right[name] - base), prompt, pairs_of))
        print("| " + " | ".join(row) + " |")


def _change(changes: FloatArray, prompt: Any, pairs_of: Any) -> str:
    """Mean of (S, P) changes; variances over seeds and over prompts are added, which is on the safe side."""
    value, num = changes.mean(), len(changes)
    by_prompt = np.bincount(prompt, changes.mean(axis=0) - value) / pairs_of.mean()
    variance = changes.mean(axis=1).var(ddof=1) / num if num > 1 else 0.0
    variance += by_prompt.var(ddof=1) / len(pairs_of)
    half = stdtrit(max(num - 1, 1), 0.975) * np.sqrt(variance)
    return f"{value:+.1f} [{value - half:+.1f}, {value + half:+.1f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("noise_cells"), help="finished cells")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("oracle", "gold", "alpaca", "alpaca-all"),
        default=["oracle", "alpaca", "alpaca-all", "gold"],
    )
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--oracle-seeds", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=1000, help="prompts of the gold world, three pairs each")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("RM_OPT_DATA", "data")))
    parser.add_argument("--finished", action="store_true", help="only print what is finished")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("cleanlab") is None:
        print("cleanlab is not installed here, so its columns are empty.", file=sys.stderr)
    made: dict[str, Any] = {
        "oracle": lambda rate, seed: oracle(args, rate, seed),
        "gold": lambda rate, seed: gold(args, rate, seed),
    }
    alpaca = Alpaca(args) if LEARNED_FROM.keys() & set(args.parts) else None
    if alpaca is not None:
        made |= {part: partial(alpaca.cell, part) for part in LEARNED_FROM}
    found = {part: cells(part, args, made[part]) for part in args.parts}
    print(
        "| margins by | planted | seeds | agree with labels: alone, with others | AUROC alone | AUROC | its limit "
        "| rate - truth, points | interval has it | called | cleanlab calls |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | --- | --- | --- | --- |")
    for part in args.parts:
        show(part, found[part])
    for part in [part for part in args.parts if alpaca is not None and part in LEARNED_FROM and found[part]]:
        print(f"\n{part}: the judge's own rate of wrong labels by its stated preferences: {alpaca.own(part):.1%}.\n")
        print("| planted | accuracy, as it is | drop | flip | weight | cleanlab, drop | turned ones left out |")
        print("| ---: | ---: | --- | --- | --- | --- | --- |")
        show_cleaning(found[part], [pair.prompt_id for pair in alpaca.pairs["test"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
