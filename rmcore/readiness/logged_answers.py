"""Whether a reward model picks better answers among those that are logged and labelled: what is known without a policy.

Held-out prompts with several labelled answers hold a pool of each: the model chooses the best of k, the labels judge
the choice. What that can say is limited. The answers are not a policy's samples: they come from the logged policies, as
a rule from models of very different strength, and from pairs that were chosen to be labelled, often only clear ones.
So a choice among them is easier than among the samples of one policy, and nothing here says how far a policy may be
optimised. The judge's own bias counts as strength; the longest answer is chosen next to the model for that reason.

If labels are independent of the model and as likely turned round as not, the win rate's expectation is 0.5 whatever
the design of the pairs, since turning all labels of a prompt turns the win rate w into 1 - w.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.pair import PreferencePair, prompt_text
from rmcore.evaluation.label_strength import Ratings, rate_answers
from rmcore.evaluation.uncertainty import GainValue, MetricValue, cluster_bootstrap, ends
from rmcore.policy.sampling.best_of_n import best_of_n_weights, best_of_n_win_rate, pooled_deviation

MIN_ANSWERS = 4
"""Connected labelled answers that a prompt must have: with three, the best of two meets one opponent."""
MIN_PROMPTS = 10
"""Prompts that a claim needs: of fewer, percentile intervals lie above a true 0.5 too often."""
_TEXTS = ["prompt", "chosen", "rejected"]
_REWARDS = ["reward_chosen", "reward_rejected"]


@dataclass(frozen=True, slots=True)
class LoggedPool:
    """The connected labelled answers of one prompt, (K,) each.

    Attributes:
        prompt_id: the conversation that the prompt belongs to; the unit of the bootstrap.
        rewards: by the model.
        strength: by the labels.
        lengths: characters.
        annotated: whether `strength` is made of margins, rather than of outcomes.
    """

    prompt_id: str
    rewards: FloatArray
    strength: FloatArray
    lengths: FloatArray
    annotated: bool


def logged_table(pairs: Sequence[PreferencePair], rewards: pd.DataFrame) -> pd.DataFrame:
    """Pairs with the model's rewards as `logged_answers` takes them; pairs without a reward are left out.

    Args:
        pairs: held out.
        rewards: with pair_id, reward_chosen, reward_rejected (logits), as the evaluation writes them.
    """
    table = pd.DataFrame(
        {
            "pair_id": [pair.pair_id for pair in pairs],
            "prompt_id": [pair.prompt_id for pair in pairs],
            "prompt": [prompt_text(pair.prompt) for pair in pairs],
            "chosen": [pair.chosen for pair in pairs],
            "rejected": [pair.rejected for pair in pairs],
            "target_margin": np.array([pair.target_margin for pair in pairs], dtype=np.float64),
        }
    )
    return table.merge(rewards[["pair_id", *_REWARDS]].drop_duplicates("pair_id"), on="pair_id")


def logged_answers(
    table: pd.DataFrame, *, num_resamples: int = 1000, seed: int = 0, report: Report = silent
) -> dict[str, Any] | None:
    """How the model's best of k among a prompt's labelled answers does against another of them.

    The answers of a prompt are the distinct texts in its pairs, each with one reward and with the strength that the
    labels give it (`rmcore.evaluation.label_strength`): from annotated margins where all pairs of the prompt have one
    that is not negative, else from outcomes. Only the largest connected part counts.

    The choices k = 2, 4, 8 ... go as far as `MIN_PROMPTS` prompts have more than k answers. Other prompts take part in
    each, so neighbouring rows differ in their prompts too. `best_k` is the last of them that passes with all before
    it: both lower ends, of the win rate over 0.5 and of the gain over 0. A fixed sequence that ends at the first
    failure keeps the chance of any false claim at that of one test, 2.5 %.

    Args:
        table: one row a pair as `logged_table` gives it; target_margin may be NaN, rewards are logits.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.
        report: of the bootstrap of each k.

    Returns:
        None where no prompt has `MIN_ANSWERS` connected answers that its labels tell apart. Else JSON-ready:
        num_prompts, num_left_out (fewer answers), num_undecided (labels that rate all answers of the prompt alike,
        for example round a circle; left out too), num_answers, num_pairs, num_loops and agreement (share of the
        pairs that the ratings order as labelled), strength ("annotated margins", "outcomes" or "mixed"), best_k,
        stopped (why the sequence ended), outcome ("claimed" up to best_k; "too_few" prompts for any claim;
        "refuted": k = 2 is shown to be worse than a blind choice; "open") and choices: for each k num_prompts, with
        intervals win_rate, gain, longest_win_rate and over_longest (win rate minus that of choosing the longest
        answer), and perfect_win_rate, perfect_gain of choosing by the labels. Gains are in standard deviations of
        the strength within prompts, pooled over the prompts of one kind of strength; the intervals take that unit
        as given.
    """
    connected, num_prompts = connected_answers(table), table["prompt"].nunique()
    kept = [(pool, rated) for pool, rated in connected if np.ptp(pool.strength) > 0]
    if not kept:
        return None
    pools = [pool for pool, _ in kept]
    num_pairs = sum(rated.num_pairs for _, rated in kept)
    kinds = {pool.annotated for pool in pools}
    return {
        "num_prompts": len(pools),
        "num_left_out": num_prompts - len(connected),
        "num_undecided": len(connected) - len(kept),
        "num_answers": sum(len(pool.strength) for pool in pools),
        "num_pairs": num_pairs,
        "num_loops": sum(rated.num_loops for _, rated in kept),
        "agreement": sum(rated.num_agreeing for _, rated in kept) / num_pairs,
        "strength": "mixed" if len(kinds) > 1 else "annotated margins" if pools[0].annotated else "outcomes",
        **best_of_logged(pools, num_resamples=num_resamples, seed=seed, report=report),
    }


def connected_answers(table: pd.DataFrame) -> list[tuple[LoggedPool, Ratings]]:
    """The prompts of a table for `logged_answers` that have `MIN_ANSWERS` connected answers or more, by their text."""
    # Sorted, so that the order of the rows does not even change the rounding. Four answers take three pairs.
    table = table[table.groupby("prompt")["prompt"].transform("size") >= MIN_ANSWERS - 1]
    table = table.sort_values([*_TEXTS, *_REWARDS, "target_margin"], ignore_index=True)
    return [(pool, rated) for pool, rated in _pools(table) if len(pool.strength) >= MIN_ANSWERS]


def best_of_logged(
    pools: Sequence[LoggedPool], *, num_resamples: int, seed: int, report: Report = silent
) -> dict[str, Any]:
    """The choices, best_k, stopped and outcome of `logged_answers`.

    Args:
        pools: at least one, each with more than two answers that do not all have one strength.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.
        report: of each bootstrap.
    """
    strengths = _in_deviations(pools)
    choices: list[dict[str, Any]] = []
    k, best_k, stopped, outcome = 2, None, None, "too_few"
    while True:
        entering = [place for place, pool in enumerate(pools) if len(pool.strength) > k]
        num_units = len({pools[place].prompt_id for place in entering})
        enough = num_units >= MIN_PROMPTS
        if not enough:
            stopped = stopped or f"prompts with more than {k} answers: {num_units}, and a claim needs {MIN_PROMPTS}"
        if choices and not enough:
            return {"choices": choices, "best_k": best_k, "stopped": stopped, "outcome": outcome}
        of_k = prefixed(report, f"best of {k}")
        choice = _choice([pools[i] for i in entering], [strengths[i] for i in entering], k, num_resamples, seed, of_k)
        choices.append(choice)
        if stopped is None:
            stopped = _failed(choice)
            if stopped is None:
                best_k, outcome = k, "claimed"
            elif best_k is None:
                high = ends(choice["win_rate"])[1]
                outcome = "refuted" if high is not None and high < 0.5 else "open"
        k *= 2


def _pools(table: pd.DataFrame) -> Iterator[tuple[LoggedPool, Ratings]]:
    for _, pairs in table.groupby("prompt", sort=True):
        texts, better, worse = compared_texts(pairs)
        margins = pairs["target_margin"].to_numpy(dtype=np.float64)
        # A margin below zero speaks against its own label, so it is not known what it measures.
        annotated = bool(np.isfinite(margins).all() and (margins >= 0).all())
        rated = rate_answers(better, worse, margins if annotated else np.ones(len(pairs)), len(texts))
        # One reward an answer: scored in other batches, those of one text may differ by rounding.
        rewards, answer_of = (np.concatenate(sides) for sides in ([pairs[name] for name in _REWARDS], (better, worse)))
        mean_rewards = np.bincount(answer_of, rewards) / np.bincount(answer_of)
        pool = LoggedPool(
            prompt_id=str(pairs["prompt_id"].iloc[0]),
            rewards=mean_rewards[rated.answers],
            strength=rated.strength,
            lengths=np.array([float(len(texts[answer])) for answer in rated.answers]),
            annotated=annotated,
        )
        yield pool, rated


def compared_texts(pairs: pd.DataFrame) -> tuple[npt.NDArray[np.object_], IntArray, IntArray]:
    """The distinct answers of pairs with columns chosen and rejected, and which of them each pair prefers and rejects.

    (K,) texts in their order, and (P,) indices into them of either side.
    """
    texts, answer_of = np.unique(
        np.concatenate([pairs["chosen"], pairs["rejected"]]).astype(object), return_inverse=True
    )
    better, worse = answer_of.astype(np.int64).reshape(2, -1)
    return texts, better, worse


def _in_deviations(pools: Sequence[LoggedPool]) -> list[FloatArray]:
    """Strengths in standard deviations within prompts; margins and outcomes have no unit in common."""
    deviation = {
        kind: pooled_deviation([pool.strength for pool in pools if pool.annotated == kind])
        for kind in {pool.annotated for pool in pools}
    }
    return [pool.strength / deviation[pool.annotated] for pool in pools]


def _choice(
    pools: Sequence[LoggedPool], strengths: Sequence[FloatArray], k: int, num_resamples: int, seed: int, report: Report
) -> dict[str, Any]:
    """One row: what the best of k does in the prompts that have more than k answers."""
    values = np.array([_of_prompt(pool, strength, k) for pool, strength in zip(pools, strengths, strict=True)])
    units, unit = np.unique([pool.prompt_id for pool in pools], return_inverse=True)
    counts = np.bincount(unit, minlength=len(units)).astype(np.float64)
    win_rates, gains, longest = (np.bincount(unit, column, len(units)) for column in values.T[:3])
    sums = {"win_rate": win_rates, "gain": gains, "longest_win_rate": longest, "over_longest": win_rates - longest}

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        return {name: weights @ summed / (weights @ counts) for name, summed in sums.items()}

    drawn = cluster_bootstrap(compute, len(units), num_resamples=num_resamples, seed=seed, report=report)

    def value(name: str) -> MetricValue:
        metric = drawn.value(
            name,
            num_prompts=len(units),
            num_pairs=len(pools),
            is_share=name.endswith("win_rate"),
            is_difference=name == "over_longest",
        )
        # A prompt where the worst answer is chosen weighs as several others, and few prompts may show none.
        return GainValue.of_metric(metric, len(units))

    perfect_win_rate, perfect_gain = (float(mean) for mean in values[:, 3:].mean(axis=0))
    return {
        "k": k,
        "num_prompts": len(pools),
        **{name: value(name).to_dict() for name in sums},
        "perfect_win_rate": perfect_win_rate,
        "perfect_gain": perfect_gain,
    }


def _of_prompt(pool: LoggedPool, strength: FloatArray, k: int) -> tuple[float, ...]:
    """Win rate and gain by the model, win rate by length, win rate and gain by the labels themselves."""
    usual = strength.mean()
    return (
        best_of_n_win_rate(pool.rewards, strength, k),
        float(best_of_n_weights(pool.rewards, k) @ strength - usual),
        best_of_n_win_rate(pool.lengths, strength, k),
        best_of_n_win_rate(strength, strength, k),
        float(best_of_n_weights(strength, k) @ strength - usual),
    )


def _failed(choice: dict[str, Any]) -> str | None:
    """Why a choice is not better for certain; None where it is."""
    for name, words, least in (("win_rate", "win rate", 0.5), ("gain", "gain", 0.0)):
        low = ends(choice[name])[0]
        if low is None:
            return f"the {words} of the best of {choice['k']} has no interval: {choice[name]['reason']}"
        if low <= least:
            return f"the {words} of the best of {choice['k']} may be as low as {low:.3g}, not above {least:g}"
    return None
