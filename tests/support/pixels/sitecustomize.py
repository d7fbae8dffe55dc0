"""Figures are made of what was found, and saved as a pixel: drawing one takes half a second of a core.

Programs that tests start have this folder in their PYTHONPATH, so that Python imports this module when it starts.
"""

import base64
import sys
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER = str(Path(__file__).parent)
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC")


def save_pixel(figure, out, **options):
    assert figure.axes
    out.write(PIXEL) if hasattr(out, "write") else Path(out).write_bytes(PIXEL)


def exchange(module):
    module.Figure.true_savefig, module.Figure.savefig = module.Figure.savefig, save_pixel


class Finder(PathFinder):
    """Finds `matplotlib.figure` and exchanges what saves a figure once it is loaded."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != "matplotlib.figure":
            return None
        spec = super().find_spec(fullname, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            exchange(module)

        spec.loader.exec_module = exec_module
        return spec


if "matplotlib.figure" in sys.modules:  # an earlier import has loaded it
    exchange(sys.modules["matplotlib.figure"])
else:
    sys.meta_path.insert(0, Finder)
