"""Processes of tests that train, forked from one that has imported torch and the trainer: seconds saved each."""

import multiprocessing
import os
import sys

import torch

from nano_model import nano_config
from rmcore.cli import app
from rmcore.models import tiny
from rmcore.training import saving

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "peft", "rmcore.cli.train", "rmcore.training.sharding"])


def use_small_models():
    """Let `tiny` be the tests', computed by one thread, and states be written as often as they are requested."""
    torch.set_num_threads(1)
    tiny.tiny_config, saving.COSTS = nano_config, 0


def fork(log, work, *arguments):
    """Begin `work(*arguments)`, which can be pickled; the file `log` gets what is printed."""
    process = FORKS.Process(target=_logged, args=(str(log), work, arguments), daemon=True)
    process.start()
    return process


def _logged(log, work, arguments):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Programs that it starts find the modules next to them also where an earlier test has set PYTHONSAFEPATH.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    use_small_models()
    work(*arguments)


def rm_opt(words):
    """The command, as the `work` of a fork."""
    app([str(word) for word in words], standalone_mode=False)
