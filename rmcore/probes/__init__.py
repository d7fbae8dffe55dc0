"""Metamorphic tests of a reward model: edits of an answer that must not change its reward, or must lower it."""

from rmcore.core.capabilities import Capability

CAPABILITY = Capability(
    {"probe": "Edit answers in ways that must not pay, or must cost, and see what the rewards do."},
    explains=("probe", "--explain"),
)
