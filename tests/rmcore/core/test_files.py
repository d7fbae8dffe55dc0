"""Files that are there whole or as they were before."""

import json
import resource

import pytest

from rmcore.core.files import write_json


def test_a_record_that_does_not_fit_the_disk_leaves_the_one_before(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_json(path, {"step": 2, "text": 9000 * "x"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads(path.read_text()) == {"step": 1}
