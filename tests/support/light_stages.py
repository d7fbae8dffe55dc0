"""Stages of a few lines whose server begins at once: for tests of processes, and not of what these compute."""

import os
from pathlib import Path

from rmcore.core import child_process

PROBE = "import runpy\n\n\ndef run_from_file(spec):\n    return runpy.run_path(spec).get('status', 0)\n"


def probe_variables(folder, *, light=True):
    """Variables of stages that run the module `probe`: their spec is a program, which may set its `status`.

    Empty modules are in place of the libraries that their server imports ahead, unless it is not to be `light`.
    """
    (folder / "probe.py").write_text(PROBE)
    for library in {name.partition(".")[0] for name in child_process.LIBRARIES} - {"pydantic", "rich"} if light else ():
        (folder / f"{library}.py").touch()
    places = [str(folder), str(Path(child_process.__file__).parents[2])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(places)}
