"""Stage probe: what edits of answers do to the rewards of the best checkpoint, on held-out pairs.

Writes `probe.json` (`rmcore.probes.measure.Probed`, texts shortened, and under `mistakes` what each sentence of the
worst mistakes adds, `rmcore.probes.effects`) and `summary.json`. No verdict follows from it.
"""

from typing import Any

from rmcore.core.progress import Report
from rmcore.probes.settings import ProbeConfig
from rmcore.stages.measurement import measurement

KEPT_CHARS = 700
"""Characters of an example's text."""


@measurement("probe", numbers=lambda record: {"eval/test_probes_violated": len(record["violated"])})
def measure(rm: Any, pairs: list[Any], settings: ProbeConfig, *, seed: int, report: Report) -> dict[str, Any]:
    """Probe the best checkpoint on the test pairs."""
    from rmcore.data.pair import cap_pairs
    from rmcore.probes.effects import explain_mistakes
    from rmcore.probes.measure import probe
    from rmcore.probes.rules import find_rules

    rules = find_rules(settings.rules)
    found = probe(rm, cap_pairs(pairs, settings.pairs_per_prompt), rules, seed=seed, report=report)
    return {**found.to_dict(KEPT_CHARS), "mistakes": explain_mistakes(rm, pairs, report=report)}
