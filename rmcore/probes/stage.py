"""Stage probe: what edits of answers do to the rewards of the best checkpoint, on held-out pairs.

Writes `probe.json` (`rmcore.probes.measure.Probed`, texts shortened, and under `mistakes` what each sentence of the
worst mistakes adds, `rmcore.probes.effects`) and `summary.json`. No verdict follows from it.
"""

from pathlib import Path
from typing import Any

from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.probes.settings import ProbeConfig
from rmcore.stages.stage import Measuring, stage

KEPT_CHARS = 700
"""Characters of an example's text."""


@stage(
    "probe",
    outcome=("probe.json",),
    lacking="there are no probes in this config; set probe.pairs_per_prompt, or probe.rules.",
)
class ProbeStage(Measuring):
    """The effects of edits of answers on the rewards."""

    probe: ProbeConfig
    seed: int


def run(settings: ProbeStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Probe the best checkpoint on the test pairs."""
    from rmcore.data.pair import cap_pairs
    from rmcore.data.table import read_pairs
    from rmcore.probes.effects import explain_mistakes
    from rmcore.probes.measure import probe
    from rmcore.probes.rules import find_rules
    from rmcore.stages.trained import load_trained

    rules = find_rules(settings.probe.rules)
    rm = load_trained(settings)
    held_out = read_pairs(settings.prepared.folder / "test.parquet")
    pairs = cap_pairs(held_out, settings.probe.pairs_per_prompt)
    found = probe(rm, pairs, rules, seed=settings.seed, report=report)
    mistakes = explain_mistakes(rm, held_out, report=report)
    write_json(out / "probe.json", {**found.to_dict(KEPT_CHARS), "mistakes": mistakes})
    numbers: dict[str, Any] = {"eval/test_probes_violated": len(found.violated)}
    write_json(out / "summary.json", {"metrics": numbers})
