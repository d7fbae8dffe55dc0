"""Public benchmarks of reward models: their files, and their scores by their own rules."""

from rmcore.core.capabilities import Capability

CAPABILITY = Capability({"benchmark": "Score a reward model on public benchmarks, each by its own rule."})
