"""Over-optimisation curves of a file of samples: one proxy after the other against one true reward."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmcore.policy.overoptimization import METHODS, overoptimization
from rmcore.policy.sampling.samples import pools, read_samples
from rmcore.reporting.figures.style import save
from rmcore.reporting.html.policy import overoptimization_figure


def curves_of_file(
    samples: Path,
    *,
    prompt: str,
    gold: str,
    proxies: Sequence[str],
    out: Path,
    max_n: int,
    num_resamples: int,
    seed: int,
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Compute and draw them.

    Args:
        samples: Parquet, CSV, JSON or JSONL, one row a sample.
        prompt: column that samples of one prompt share.
        gold: column of the true reward.
        proxies: columns of reward models' rewards.
        out: folder for the figures.
        max_n: largest n of best-of-n.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.

    Returns:
        {"samples", "gold", "proxies": {name: one curve a method}}, JSON-ready, and the figures by proxy.

    Raises:
        DataError: see `read_samples`, `pools` and `overoptimization`.
    """
    table = read_samples(samples)
    judged = pools(table, prompt, gold)
    curves: dict[str, list[dict[str, Any]]] = {}
    figures: dict[str, Path] = {}
    for name in dict.fromkeys(proxies):
        rewards = pools(table, prompt, name)
        curves[name] = [
            overoptimization(
                rewards, judged, method=method, max_n=max_n, num_resamples=num_resamples, seed=seed
            ).to_dict()
            for method in METHODS
        ]
        letters = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
        file = out / f"overoptimization_{letters}.png"
        figures[name] = save(overoptimization_figure(name, curves[name]), file)
    return {"samples": str(samples), "gold": gold, "proxies": curves}, figures
