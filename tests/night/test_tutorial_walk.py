"""The tutorial as it is written, on 1,500 real pairs: to a model shown to be better, or to labels and how many.

`make night` runs it, in some 25 minutes of two idle cores; what was printed is in build/tutorial.txt, with times.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from rmcore.evaluation.comparison import paired_comparison
from rmcore.stages.results import held_out_rewards

DATA = Path(os.environ.get("RM_OPT_DATA") or "/nowhere") / "alpacaeval_train.parquet"
CHECKOUT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 25 * 60
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * MOST_SECONDS),
    pytest.mark.night,
    pytest.mark.skipif(not DATA.is_file(), reason="no alpacaeval_train.parquet in RM_OPT_DATA"),
]


def commands():
    """The words of the tutorial's commands, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (CHECKOUT / "docs/tutorial.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("rm-opt ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def changes(words):
    return [after for word, after in pairwise(words) if word == "--set"]


class Walk:
    """A user's folder and home, and how long all took."""

    def __init__(self, folder):
        self.folder, self.seconds, self.told = folder, 0.0, []
        self.environment = os.environ | {"RM_OPT_HOME": str(folder / "home"), "OMP_NUM_THREADS": ""}
        del self.environment["OMP_NUM_THREADS"]
        pd.read_parquet(DATA).sample(1500, random_state=0).to_csv(folder / "pairs.csv", index=False)

    def type(self, words):
        """Run a command as it is typed; what it printed."""
        program, began = Path(sys.executable).with_name("rm-opt"), time.monotonic()
        done = subprocess.run(
            [program, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        took = time.monotonic() - began
        self.seconds += took
        self.told.append(f"$ rm-opt {shlex.join(words)}\n{done.stdout}# {took:.0f} s\n")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, words):
        """Run the pipeline by these words; its record."""
        self.type([*words, "--summary", "summary.json"])
        return json.loads((self.folder / "summary.json").read_text())["results"]


def is_shown(records, name):
    """Whether the run of this name is better than the first on the held-out pairs of both, by the paired interval."""
    [best] = [record for folder, record in records if folder.startswith(name)]
    low = paired_comparison(held_out_rewards(best), held_out_rewards(records[0][1]))["accuracy_difference"]["ci_low"]
    return low is not None and low > 0


def test_the_tutorial_ends_in_a_better_model_or_in_a_number_of_labels_within_25_minutes(tmp_path):
    walk, page = Walk(tmp_path), commands()
    starts = [words for words in page if words[0] == "run" and "--from" not in words]
    steps = [changes(words) for words in page if words[0] == "run" and "--from" in words]
    walk.type(next(words for words in page if words[:2] == ["data", "check"]))
    records, taken, [words] = [], [], starts
    try:
        while True:
            record = walk.run(words)
            folder = max((tmp_path / "home" / "reports").glob("*/summary.json"), key=lambda file: file.stat().st_mtime)
            records.append((folder.parent.name, record))
            words = shlex.split(record["next_rung"]["command"])[1:]
            is_training = words[:2] == ["run", "--from"] and "MORE_PAIRS" not in record["next_rung"]["command"]
            if not is_training or (len(records) > 1 and is_shown(records, words[2])):
                break
            taken.append(changes(words))
        walk.type(["runs"])
        if len(records) > 1:
            walk.type(["compare", *(folder for folder, _ in records)])
    finally:
        out = CHECKOUT / "build" / "tutorial.txt"
        out.parent.mkdir(exist_ok=True)
        out.write_text("\n".join([*walk.told, f"# {walk.seconds:.0f} s in all"]))
    assert is_training or re.search(r"\d", record["next_rung"]["evidence"])
    assert taken == steps, "the page shows other steps than were printed"
    assert walk.seconds < MOST_SECONDS
