"""Everything that is measured of one model's curvature, as one record: what the stage and the command share.

Within `LandscapeConfig.minutes` the ends and the trace come first, in half of the time, on fewer pairs if needed (two
at last, which take as long as they take); then the parts, in the order of `PARTS`, each of which is left out where its
own pace says that it would end too late.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmcore.config.landscape import CurvaturePart, LandscapeConfig
from rmcore.core.errors import ConfigError
from rmcore.core.hardware import curvature_minutes
from rmcore.core.progress import Report, labelled
from rmcore.landscape.analyzer import AnalyzedSpectrum, hessian_spectrum
from rmcore.landscape.budget import OutOfTime, TimeBudget
from rmcore.landscape.density import spectral_density
from rmcore.landscape.directions import (
    FILTER_UNIT,
    LENGTH_UNIT,
    PATH_UNIT,
    Quadratic,
    checkpoint_direction,
    filter_normalized,
    random_direction,
    symmetric_distances,
)
from rmcore.landscape.eigensolvers import TraceSamples, hutchinson
from rmcore.landscape.gram import gauss_newton_spectrum
from rmcore.landscape.layers import layer_curvature
from rmcore.landscape.noise import curvature_noise
from rmcore.landscape.operators import LossHessian
from rmcore.landscape.sam import SAM_RADIUS, sam_sharpness
from rmcore.landscape.sample import CurvatureSample
from rmcore.landscape.slices import LossSlice, loss_slice, loss_surface
from rmcore.landscape.spectrum import HessianSpectrum
from rmcore.landscape.vectors import dot

FEWEST_PAIRS = 2
"""That a time budget leaves."""
PATH_MARGIN = 0.25
"""How far a line between two checkpoints continues beyond them, as a share of the way."""


def measure_curvature(
    model: Any, sample: CurvatureSample, config: LandscapeConfig, *, seed: int, report: Report, other: Any = None
) -> dict[str, Any]:
    """Measure the ends of the spectrum, the trace, and `config.parts`.

    Args:
        model: see `operators.PairCurvature`.
        sample: the pairs.
        config: what, and at what size.
        seed: of every random vector.
        report: called as report(done, total, what) within each part.
        other: another checkpoint of the same shape: `slices` then has a line from `model` to it.

    Returns:
        {"spectrum": HessianSpectrum, and by part its record}, JSON-ready; with "left_out": sentences, where
        `config.minutes` did not suffice. What fits depends on the machine.

    Raises:
        ConfigError: `other` is given and slices are not asked for.
        CurvatureError, DataError, ModelError: see the parts.
    """
    if other is not None and "slices" not in config.parts:
        raise ConfigError("another checkpoint is for a line of the slices, which are not asked for: add slices.")
    hessian = LossHessian.from_loader(model, sample.batches, parameters=config.parameters)
    minutes = curvature_minutes(hessian.device.type, config.minutes)
    budget, asked = TimeBudget(minutes), len(sample.pairs)
    counted, share = labelled(report, "Hessian products"), 0.5 if config.parts else 1.0
    while True:
        num = len(sample.pairs)
        try:
            kept = budget.kept(counted, share) if num > FEWEST_PAIRS else counted
            analyzed = _spectrum(hessian, config, seed, kept)
            break
        except OutOfTime as late:
            hessian.release()
            sample = sample.some(max(FEWEST_PAIRS, min(num - 1, int(num * late.had / late.needed))), seed)
            hessian = LossHessian.from_loader(model, sample.batches, parameters=config.parameters)
    assert analyzed.ends is not None  # noqa: S101 - only the cross-check by PyHessian has none; no config asks for it
    left_out = []
    if len(sample.pairs) < asked:
        left_out.append(f"{len(sample.pairs)} of the {asked} pairs were taken")
    measured: dict[str, Any] = {}
    for part in (part for part in PARTS if part in config.parts):
        kept = budget.kept(report)
        task = _Task(model, sample, config, seed, kept, other, hessian, analyzed.record, analyzed.ends, analyzed.traces)
        try:
            measured[part] = PARTS[part](task)
        except OutOfTime as late:
            hessian.release()
            left_out.append(f"{part} was left out: {late}")
    record = {"spectrum": analyzed.record.to_dict()} | measured
    if left_out:
        record["left_out"] = [f"landscape.minutes={minutes:g}: {sentence}" for sentence in left_out]
    return record


def _spectrum(hessian: LossHessian, config: LandscapeConfig, seed: int, report: Report) -> AnalyzedSpectrum:
    return hessian_spectrum(
        hessian,
        config.method,
        config.top_k,
        num_steps=config.lanczos_steps,
        trace_probes=config.trace_probes,
        seed=seed,
        report=report,
    )


@dataclass(frozen=True)
class _Task:
    """The model, pairs and settings that the parts work on."""

    model: Any
    sample: CurvatureSample
    config: LandscapeConfig
    seed: int
    report: Report
    other: Any
    hessian: LossHessian
    spectrum: HessianSpectrum
    ends: Tensor
    traces: TraceSamples | None

    def generator(self) -> torch.Generator:
        """Random numbers of their own for a part, so that leaving another part out changes nothing."""
        return torch.Generator(self.hessian.device).manual_seed(self.seed)

    def reporting(self, part: str) -> Report:
        """The progress of one part."""
        return labelled(self.report, part)


def _density(task: _Task) -> dict[str, Any]:
    hessian = task.hessian
    return spectral_density(
        hessian.product,
        hessian.num_parameters,
        num_vectors=task.config.density_vectors,
        num_steps=task.config.lanczos_steps,
        generator=task.generator(),
        dtype=hessian.dtype,
        report=task.reporting("density"),
    ).to_dict()


def _layers(task: _Task) -> dict[str, Any]:
    hessian = task.hessian
    traces = task.traces
    if traces is None:  # an exact trace has no samples
        traces = hutchinson(
            hessian.products,
            hessian.sizes,
            num_probes=task.config.trace_probes,
            generator=task.generator(),
            dtype=hessian.dtype,
        )
    return layer_curvature(
        hessian,
        traces,
        num_steps=task.config.layer_steps,
        seed=task.seed,
        report=task.reporting("layers"),
    ).to_dict()


def _slices(task: _Task) -> dict[str, Any]:
    hessian, config = task.hessian, task.config
    flat = filter_normalized(hessian, random_direction(hessian, task.seed))
    lines = [*_eigenvector_lines(task), _line(task, flat, 1.0, "a random direction, filter-normalised", FILTER_UNIT)]
    if task.other is not None:
        way = checkpoint_direction(hessian, task.other)
        steps = torch.linspace(-PATH_MARGIN, 1 + PATH_MARGIN, _odd(config.slice_points) + 2).tolist()
        distances = sorted({*steps, 0.0, 1.0})
        name, report = "from this checkpoint to the other", task.reporting("slices")
        lines.append(loss_slice(hessian, way, distances, name=name, unit=PATH_UNIT, report=report))
    record: dict[str, Any] = {"lines": [line.to_dict() for line in lines]}
    record["sam"] = sam_sharpness(hessian, SAM_RADIUS).to_dict()
    if config.surface_points:
        second = filter_normalized(hessian, random_direction(hessian, task.seed + 1))
        distances = list(symmetric_distances(1.0, _odd(config.surface_points)))
        names = {"name_x": "random direction 1", "name_y": "random direction 2"}
        report = task.reporting("surface")
        surface = loss_surface(hessian, flat, second, distances, distances, **names, unit=FILTER_UNIT, report=report)
        record["surface"] = surface.to_dict()
    return record


def _eigenvector_lines(task: _Task) -> list[LossSlice]:
    """The lines along the two ends, as far as the quadratic prediction doubles the loss."""
    gradient, loss = task.hessian.gradient(), task.hessian.loss()
    found = []
    for vector, value, words in zip(
        task.ends,
        (task.spectrum.lambda_max, task.spectrum.lambda_min),
        ("largest", "smallest"),
        strict=True,
    ):
        if value is None or value == 0:
            continue
        quadratic = Quadratic(loss, dot(gradient, vector), value)
        name = f"eigenvector of the {words} eigenvalue, {value:.3g}"
        found.append(_line(task, vector, quadratic.doubling_distance(), name, LENGTH_UNIT, quadratic))
    return found


def _line(
    task: _Task, direction: Tensor, half_width: float, name: str, unit: str, quadratic: Quadratic | None = None
) -> LossSlice:
    distances = symmetric_distances(half_width, _odd(task.config.slice_points))
    report = task.reporting("slices")
    return loss_slice(task.hessian, direction, distances, name=name, unit=unit, quadratic=quadratic, report=report)


def _odd(num: int) -> int:
    """`num`, or one more where it has no middle."""
    return num + 1 - num % 2


def _normalized(task: _Task) -> dict[str, Any]:
    """The ends of the Hessian of softplus(-m / T), T the root mean square of the margins.

    Margins that grow by a factor leave it as it was (up to the head's own weights), while the raw Hessian falls, so
    models whose margins differ in size can be compared by it.
    """
    task.hessian.release()
    temperature = float(task.hessian.margins().square().mean().sqrt())
    if temperature == 0:
        return {"temperature": 0.0, "reasons": {"lambda_max": "every margin is 0, so they have no size to divide by."}}
    spectrum = hessian_spectrum(
        LossHessian(task.model, task.sample.batches, parameters=task.config.parameters, temperature=temperature),
        num_steps=task.config.lanczos_steps,
        trace_probes=task.config.trace_probes,
        seed=task.seed,
        report=task.reporting("margins of size 1"),
    ).record
    return {
        "temperature": temperature,
        "lambda_max": spectrum.lambda_max,
        "lambda_max_residual": spectrum.residuals[0],
        "lambda_min": spectrum.lambda_min,
        "lambda_min_residual": spectrum.residuals[-1],
        "trace": spectrum.trace_estimate,
        "trace_standard_error": spectrum.trace_standard_error,
        "reasons": {},
    }


def _gauss_newton(task: _Task) -> dict[str, Any]:
    task.hessian.release()
    return gauss_newton_spectrum(
        task.model,
        task.sample.batches,
        prompts=task.sample.batch_prompts,
        parameters=task.config.parameters,
        report=task.reporting("Gauss-Newton"),
    ).to_dict()


def _noise(task: _Task) -> dict[str, Any]:
    task.hessian.release()
    return curvature_noise(
        task.model,
        task.sample,
        task.ends,
        num_probes=task.config.trace_probes,
        parameters=task.config.parameters,
        seed=task.seed,
        report=task.reporting("errors over prompts"),
    ).to_dict()


PARTS: dict[CurvaturePart, Callable[[_Task], dict[str, Any]]] = {
    "density": _density,
    "layers": _layers,
    "slices": _slices,
    "normalized": _normalized,
    "gauss_newton": _gauss_newton,
    "noise": _noise,
}
"""In this order: those that use the kept graphs first."""
