"""Language models as judges: the endpoint, rubrics, scores, utilities from comparisons, and an audit of the judge."""

from rmcore.core.capabilities import Capability

CAPABILITY = Capability(
    {"judge": "Compare a judge with people before its judgements are used."}, panel="Policies", data_commands=("label",)
)
