"""What two processes that share a model keep whole of it between the micro-batches of a step, and after them."""

import json
import os
from pathlib import Path

import pytest

from machine import PATIENCE_S, free_ports
from rmcore.core.child_process import ForkedProcess

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[2] / "support"


def measured(folder, precision, whole):
    """What each of two processes tells of a step."""
    folder.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(SUPPORT)])}
    [port] = free_ports(1)
    started = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        spec, log = folder / f"spec{rank}", folder / f"log{rank}"
        spec.write_text(json.dumps([str(folder), precision, whole, {name: str(one) for name, one in place.items()}]))
        with log.open("w") as told:
            started.append((ForkedProcess("sharded_bytes", spec, told, environment), log))
    for process, log in started:
        assert process.wait(timeout=PATIENCE_S) == 0, log.read_text()[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_whole_is_kept_where_memory_is_tight_and_all_of_it_where_it_is_not(precision, tmp_path):
    tight, roomy = (measured(tmp_path / str(whole), precision, whole) for whole in (False, True))
    for told in (*tight, *roomy):
        assert told["packed"]
        assert told["minutes"] == [10, 120]  # of a step's collectives, and of waiting for files
        assert told["between"]
        assert told["after"] == {"weights": 0.0, "gradients": 0.0}
        assert told["formats"] == ["torch.float32"]
        assert told["sliced"]
    for told in tight:
        assert all(kept == {"weights": 0.0, "gradients": 0.0} for kept in told["between"])
    for told in roomy:  # a little more in bf16: the head is float32, too
        width = 4.0 if precision == "fp32" else 2.0 + 2.0 * told["embedded"]
        assert all(kept["weights"] == pytest.approx(width, rel=0.02) for kept in told["between"])
        assert all(kept["gradients"] == pytest.approx(4.0, rel=0.01) for kept in told["between"])
    assert roomy[0]["norm"] == pytest.approx(tight[0]["norm"], rel=1e-5 if precision == "fp32" else 2e-2)
