"""Which pairs to label next."""

from rmcore.core.capabilities import Capability

CAPABILITY = Capability(data_commands=("propose", "ingest"))
