"""Several reward models as one, their disagreement, and scoring."""

from rmcore.core.capabilities import Capability

CAPABILITY = Capability({"score": "Write rewards of preference pairs, or of prompt/response rows, to a file."})
