"""What each `tests/rmcore/NAME/sample.py` gives: `SETTINGS` of a capability's section, `record` of its stage, and where
the keys of stages are tested `OTHERS` (another value of a setting), `BY_CONTENT`, `TEXTS` and `DECIDE`.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from rmcore.core.capabilities import NAMES, modules
from rmcore.reporting.html.blocks import capabilities_shown

PLACES = {name: Path(__file__).parents[1] / "rmcore" / name / "sample.py" for name in NAMES}


def sample_of(capability: str) -> ModuleType:
    """The sample of a capability, by the name of its folder."""
    spec = spec_from_file_location(f"{capability}_sample", PLACES[capability])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_FOLDERS = [file.__name__.split(".")[1] for file in modules("blocks")]
_SAMPLES = {one.stage: sample_of(folder) for one, folder in zip(capabilities_shown(), _FOLDERS, strict=True)}
RECORDS = {stage: sample.record for stage, sample in _SAMPLES.items()}
"""What makes the record of each capability's stage, by the name of the stage."""
SECTIONS = {stage: sample.SETTINGS for stage, sample in _SAMPLES.items()}
"""Settings with which each stage has what it needs."""


def _of_all(name: str) -> dict[str, Any]:
    return {key: value for sample in _SAMPLES.values() for key, value in getattr(sample, name, {}).items()}


OTHERS = _of_all("OTHERS")
"""Other values of settings whose types do not tell one."""
BY_CONTENT = _of_all("BY_CONTENT")
"""Settings that name what counts by its content, with what they name."""
TEXTS = _of_all("TEXTS")
"""Settings that are texts and name nothing, with what they are."""
DECIDE = _of_all("DECIDE")
"""Modules that read a clock, the load or free memory, with what they decide by it."""
