"""Probably wrong labels: cross-fitted margins, their rate, a ledger, cleaned files."""

from rmcore.core.capabilities import Capability

CAPABILITY = Capability(data_commands=("noise",))
