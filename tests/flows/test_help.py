"""What `rm-opt COMMAND --help` shows of the commands that start flows."""

import re
from itertools import takewhile

import pytest

from flows.cli import app


@pytest.mark.parametrize(
    "example", ["rm-opt best-of-n", "rm-opt readiness policy --policy sft", "rm-opt rlhf --refresh-every 10 --seeds 3"]
)
def test_the_help_shows_examples(example, capsys):
    with pytest.raises(SystemExit):
        app([*takewhile(lambda word: not word.startswith("--"), example.split()[1:]), "--help"])
    said = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "Example" in said
    assert example in " ".join(said.replace("│", " ").split())
