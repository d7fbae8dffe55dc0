"""Stage landscape: curvature of the loss at the best checkpoint, on held-out pairs.

Writes `spectrum.json`, `summary.json` and the eigenvalue figure.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from rmcore.batching import padded_pairs
from rmcore.config import LandscapeConfig, PipelineConfig
from rmcore.data.pair import PreferencePair
from rmcore.data.table import read_pairs
from rmcore.files import write_json
from rmcore.landscape import HessianAnalyzer, HessianSpectrum
from rmcore.landscape.pair_rows import CURVATURE_TOKEN_BUDGET
from rmcore.loading import pick_device
from rmcore.model import BradleyTerryRM
from rmcore.plots.landscape import eigenvalues
from rmcore.progress import Report
from rmcore.stages.interface import Upstream
from rmcore.tracking import Tracker


def run(config: PipelineConfig, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Measure the spectrum on the first `num_pairs` test pairs."""
    rm = BradleyTerryRM.from_pretrained(
        upstream["train"] / "best",
        device=pick_device(config.device).type,
        trust_remote_code=config.model.trust_remote_code,
        render_fn=config.model.render_fn,
    )
    pairs = read_pairs(upstream["prepare"] / "test.parquet")
    spectrum = measure_spectrum(
        rm,
        pairs,
        config.landscape,
        seed=config.seed,
        progress=lambda done, total: report(done, total, "Hessian-vector products"),
    )
    write_spectrum(spectrum, out)


def measure_spectrum(
    rm: BradleyTerryRM,
    pairs: Sequence[PreferencePair],
    config: LandscapeConfig,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> HessianSpectrum:
    """Spectrum of the loss Hessian over the first `config.num_pairs` of `pairs`."""
    tokenized = rm.renderer.tokenize_pairs(pairs[: config.num_pairs])
    budget = max(CURVATURE_TOKEN_BUDGET, 2 * max(pair.num_tokens for pair in tokenized))
    return HessianAnalyzer(rm).compute_spectrum(
        padded_pairs(tokenized, token_budget=budget, pad_id=rm.pad_id),
        method=config.method,
        top_k=config.top_k,
        num_steps=config.lanczos_steps,
        trace_probes=config.trace_probes,
        parameters=config.parameters,
        seed=seed,
        progress=progress,
    )


def write_spectrum(spectrum: HessianSpectrum, out: Path) -> None:
    """Write the record, what trackers show of it, and the figure."""
    record = spectrum.to_dict()
    write_json(out / "spectrum.json", record)
    names = (
        "lambda_max",
        "lambda_min",
        "trace_estimate",
        "trace_standard_error",
        "condition_number",
        "effective_rank",
        "sharpness_score",
        "flatness_index",
    )
    write_json(out / "summary.json", {"metrics": {f"hessian/test_{name}": record[name] for name in names}})
    (out / "figures").mkdir(exist_ok=True)
    eigenvalues(record, out / "figures" / "eigenvalues.png")
