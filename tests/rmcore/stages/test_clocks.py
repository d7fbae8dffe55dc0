"""What is stored under a key depends on nothing that a busy machine changes: clocks, load, free memory, cores.

The code of every stage is searched for what reads them. Each module that does is listed with what it decides by it;
another one fails here until a reason is given why its result is the same on a busy machine.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from capability_samples import DECIDE
from rmcore.core.fingerprints import code_digests
from rmcore.stages.stages import STAGES

READS = re.compile(
    r"\btime\.(time|time_ns|monotonic|perf_counter|process_time)\(|\bfree_bytes\(|\bmem_get_info\(|\bvirtual_memory\("
    r"|\bcpu_count\(|\bsched_getaffinity\(|\bgetloadavg\(|\bdisk_usage\(|\bget_num_threads\("
)
DECIDES = {
    "rmcore.core.files": "whether a digest that is known by size and time of change is believed, or computed again",
    "rmcore.core.processes": "when a process that was told to end is killed",
    "rmcore.judging.sending": "how long a refused request waits before it is sent again",
    "rmcore.models.device": "the token budget, from the memory that a device has; what is free only refuses",
    "rmcore.policy.grpo.group_reward": "when a scorer that stays away ends the training, which stores nothing",
    "rmcore.policy.grpo.training_run": "nothing: seconds in the record",
    "rmcore.policy.sampling.served_policy": "which folder weights are handed over in",
    "rmcore.serving.client": "how long it waits for a server that starts",
    "rmcore.serving.updates": "when the folder of an update that nobody sent is removed",
    "rmcore.training.interruption": "whether a second signal is the first one again",
    "rmcore.training.saving": "when a state to resume from is saved",
    "rmcore.training.step": "nothing: seconds in the log",
    **DECIDE,
}


@pytest.mark.slow
def test_no_stage_reads_a_clock_or_the_load_but_where_it_changes_no_result():
    modules = {name for stage in STAGES.values() for name in code_digests(stage.module())}
    sources = {name: Path(str(find_spec(name).origin)).read_text(encoding="utf-8") for name in sorted(modules)}
    reading = {name for name, source in sources.items() if READS.search(source)}
    assert reading - DECIDES.keys() == set(), "say in DECIDES why a busy machine stores the same, or count instead"
    assert DECIDES.keys() - reading == set(), "these read none any more; remove their lines"
