"""A program with pids of its own on this machine, as in a container."""

import subprocess
import sys

import pytest

from machine import PATIENCE_S


def run_inside(program: str) -> str:
    """Run Python code in a pid namespace of its own; gives what it printed. Skips where none may be made."""
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", program]
    try:
        inside = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if "unshare" in inside.stderr:
        pytest.skip(f"no pid namespace may be made here: {inside.stderr.strip()}")
    assert inside.returncode == 0, inside.stderr
    return inside.stdout
