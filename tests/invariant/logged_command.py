"""`rm-opt ARGUMENTS` with its output in the file LOG, and the tests' `tiny`; who runs this file gives both names.

A training with --resume-every-seconds 0 writes states without a pause.
"""

import os

import torch

from nano_model import nano_config
from rmcore.cli import app
from rmcore.models import tiny
from rmcore.training import saving

torch.set_num_threads(1)
tiny.tiny_config, saving.COSTS = nano_config, 0
descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # noqa: F821
os.dup2(descriptor, 1)
os.dup2(descriptor, 2)
app(ARGUMENTS, standalone_mode=False)  # noqa: F821
