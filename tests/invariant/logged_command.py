"""`rm-opt ARGUMENTS` with its output in the file LOG; both names are given by whoever runs this file."""

import os

import torch

from rmcore.cli import app

torch.set_num_threads(1)
descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # noqa: F821
os.dup2(descriptor, 1)
os.dup2(descriptor, 2)
app(ARGUMENTS, standalone_mode=False)  # noqa: F821
