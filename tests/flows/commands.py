"""A home of its own for commands that a test runs as a user would."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def assignments(settings):
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


class Home:
    """A home of its own and what `rm-opt` leaves in it."""

    def __init__(self, folder):
        self.folder, self.code = folder / "home", folder / "code"
        self.folder.mkdir()
        for package in ("rmcore", "tasks", "flows", "experiments"):
            shutil.copytree(ROOT / package, self.code / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.code)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        self.environment = kept | {"RM_OPT_HOME": str(self.folder), "PYTHONPATH": str(self.code)}

    def rm_opt(self, *arguments, check=True):
        done = subprocess.run(
            [sys.executable, "-c", "from flows.cli import main; main()", *map(str, arguments)],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        if check:
            assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done

    def outcome(self, *arguments):
        """The summary of a command and what it printed, as one line."""
        summary = self.folder / "summary.json"
        done = self.rm_opt(*arguments, "--summary", summary)
        return json.loads(summary.read_text()), " ".join(done.stdout.split())

    def artifacts(self):
        return set(self.folder.glob("store/[!.]*/*/MANIFEST.json"))


def are_pngs(figures):
    return all(Path(path).read_bytes().startswith(b"\x89PNG") for path in figures.values())
