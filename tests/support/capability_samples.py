"""What each `tests/rmcore/NAME/sample.py` gives: `SETTINGS` of a capability's section, and `record` of its stage."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from rmcore.core.capabilities import NAMES, modules

PLACES = {name: Path(__file__).parents[1] / "rmcore" / name / "sample.py" for name in NAMES}


def sample_of(capability: str) -> ModuleType:
    """The sample of a capability, by the name of its folder."""
    spec = spec_from_file_location(f"{capability}_sample", PLACES[capability])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_SAMPLES = {file.SHOWN.stage: sample_of(file.__name__.split(".")[1]) for file in modules("blocks")}
RECORDS = {stage: sample.record for stage, sample in _SAMPLES.items()}
"""What makes the record of each capability's stage, by the name of the stage."""
SECTIONS = {stage: sample.SETTINGS for stage, sample in _SAMPLES.items()}
"""Settings with which each stage has what it needs."""
