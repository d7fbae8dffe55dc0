"""A walk through the pages as a person takes it, in a headless browser, with a picture of each step.

    make walk            # or: python tests/services/walk.py build/walk

Starts `rm-opt up` in a temporary home and ends it again. A step that does not show what it has to, ends the walk with
its name and with the picture of what was there instead. The pictures are for looking at: that a page is right is tested
in this folder, that it is pleasant is seen.
"""

import base64
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from conftest import Browser, Services

from rmcore.core.processes import marked, terminate

WIDTH, HEIGHT = 1440, 1100
WAIT_S = 240.0
"""For what a page has to show; a page that is only drawn takes a second, on a busy machine half a minute."""
TEXT = "document.body?.innerText ?? ''"
FIND = """
(text => {{
  const shown = element => {{
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && getComputedStyle(element).visibility !== 'hidden';
  }};
  const all = [...document.querySelectorAll('a, button, label, li, span, div, input, h1, h2, td, [role=option]')];
  const named = all.filter(e => shown(e) && ((e.innerText ?? '').trim() === text || e.ariaLabel === text));
  const element = named[named.length - 1];  // the innermost
  if (!element) return '';
  element.scrollIntoView({{block: 'center'}});
  const box = element.getBoundingClientRect();
  return JSON.stringify([box.x + box.width / 2, box.y + box.height / 2]);
}})({text})
"""
FIELD = """
(label => {{
  const named = [...document.querySelectorAll('label')].find(
    e => [label, label + ' (Optional)'].includes((e.innerText ?? '').trim()));
  const held = named?.closest('.p-label')?.querySelector('.p-label__header ~ *');
  if (!held) return '';
  held.scrollIntoView({{block: 'center'}});
  const box = held.getBoundingClientRect();
  return JSON.stringify([box.x + Math.min(60, box.width / 2), box.y + box.height / 2]);
}})({label})
"""
CHOOSE = """
((label, option) => {{
  const named = [...document.querySelectorAll('label')].find(e => (e.innerText ?? '').trim().startsWith(label));
  const list = named?.closest('.p-label')?.querySelector('select');
  const entry = [...(list?.options ?? [])].find(e => e.text.trim() === option);
  if (!entry) return false;
  list.value = entry.value;
  list.dispatchEvent(new Event('change', {{bubbles: true}}));
  return list.value === entry.value;
}})({label}, {option})
"""
COMPARED = {
    "name": "rates",
    "title": "Two learning rates",
    "question": "Does a larger learning rate order more pairs as the labels do?",
    "base": {
        "data": {"gold": {"num_prompts": 60, "pairs_per_prompt": 2}, "validation_fraction": 0.2},
        "model": {"name": "tiny", "max_seq_len": 256},
        "train": {"steps": 12, "warmup_steps": 0, "pairs_per_step": 8, "eval_every": 4, "token_budget": 8192},
        "evaluate": {"num_resamples": 100, "train_pairs": 10},
    },
    "factors": [{"name": "lr", "levels": {"small": {"train.lr": 1e-4}, "large": {"train.lr": 1e-3}}}],
    "control": "small",
    "budget_minutes": 30,
    "seeds": [0, 1],
    "metrics": ["eval/test_pairwise_accuracy", "calib/test_ece_debiased", "cost/train_seconds"],
    "hypotheses": [
        {
            "name": "H1",
            "claim": "The larger rate is more accurate by over a point.",
            "metric": "eval/test_pairwise_accuracy",
            "comparison": "difference",
            "arm": "large",
            "direction": "above",
            "threshold": 0.01,
        }
    ],
}
"""A small experiment, whose cells are compared in MLflow."""


class Walk:
    """A browser that notes each step with a picture."""

    def __init__(self, browser: Browser, out: Path) -> None:
        self.browser, self.out, self.num_steps = browser, out, 0
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        browser.tell(
            "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
        )

    def step(self, name: str, *expected: str, within: float = WAIT_S) -> str:
        """Wait for the texts, take a picture, and return what the page says."""
        begun = time.monotonic()
        missing = list(expected)
        while missing and time.monotonic() - begun < within:
            page = self.browser.run(TEXT).lower()
            missing = [text for text in expected if text.lower() not in page]
            time.sleep(0.2)
        time.sleep(1.0)  # fonts and pictures of what is there already
        self.num_steps += 1
        file = self.out / f"{self.num_steps:02d}-{name}.png"
        file.write_bytes(base64.b64decode(self.browser.tell("Page.captureScreenshot", format="png")["data"]))
        print(f"{file}  {time.monotonic() - begun:.0f} s", flush=True)
        if missing:
            sys.exit(f"step {name}: the page lacks {', '.join(missing)}; look at {file}")
        return self.browser.run(TEXT)

    def open(self, address: str) -> None:
        """Load a page anew: another view of the same one would have the old view's links on it for a moment."""
        self.browser.tell("Page.navigate", url="about:blank")
        self.browser.tell("Page.navigate", url=address)

    def click(self, text: str) -> None:
        """Press the mouse on what is called so."""
        self._press(FIND.format(text=json.dumps(text)), text)

    def follow(self, text: str) -> None:
        """Open what a link leads to here whose words begin so; a click may open it in a tab of its own."""
        begins = f"a => a.innerText.trim().startsWith({json.dumps(text)})"
        link = f"[...document.querySelectorAll('a')].find({begins})?.href ?? ''"
        address = self.browser.wait(link, bool)
        if not address:
            sys.exit(f"no link on the page is called {text}")
        self.open(address)

    def fill(self, label: str, value: str) -> None:
        """Click into a field and type."""
        self._press(FIELD.format(label=json.dumps(label)), label)
        self.browser.tell("Input.insertText", text=value)

    def choose(self, label: str, option: str) -> None:
        """Take an entry of a list; its window is the system's own, which no page can be asked about."""
        if not self.browser.wait(CHOOSE.format(label=json.dumps(label), option=json.dumps(option)), bool):
            sys.exit(f"the list {label} has no entry {option}")

    def _press(self, expression: str, name: str) -> None:
        place = self.browser.wait(expression, bool)
        if not place:
            self.step(f"no-{name.lower().replace(' ', '-')}")
            sys.exit(f"nothing on the page is called {name}; look at the last picture in {self.out}")
        time.sleep(0.5)  # what was scrolled into view has come to rest
        x, y = json.loads(self.browser.run(expression))
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.browser.tell("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)


class Visit(Walk):
    """The pages of running services."""

    def __init__(self, services: Services, browser: Browser, out: Path) -> None:
        super().__init__(browser, out)
        self.services = services
        self.form = f"{services.ui}/deployments/deployment/{services.deployment()['id']}/run"

    def page(self, run_id: str) -> None:
        self.open(f"{self.services.ui}/runs/flow-run/{run_id}")

    def log_in(self, address: str) -> None:
        """Give the password as a browser's own window would, then open the page without it in its address."""
        self.open(address.replace("//", f"//any:{self.services.password}@"))
        self.browser.wait("document.readyState", lambda state: state == "complete")
        self.open(address)

    def wait_for(self, found: Callable[[], Any], what: str) -> Any:
        """What a function gives, once it gives anything."""
        deadline = time.monotonic() + WAIT_S
        while not (value := found()) and time.monotonic() < deadline:
            time.sleep(0.3)
        return value or sys.exit(f"waited in vain for {what}")

    def submit(self, study: str) -> str:
        """Send the form off; returns the flow run."""
        before = {run["id"] for run in self.services.flow_runs()}
        self.fill("study", study)
        self.step(f"form-{study}", "smoke")
        self.click("Submit")
        new = self.wait_for(lambda: [r for r in self.services.flow_runs() if r["id"] not in before], "a flow run")
        return new[0]["id"]

    def ended(self, run_id: str, state: str) -> None:
        found = self.services.wait(run_id)["state_type"]
        if found != state:
            sys.exit(f"the flow run {run_id} ended as {found}, not as {state}")


def walk(visit: Visit) -> None:
    """Through both UIs to a report."""
    in_prefect(visit)
    in_mlflow(visit)
    compared(visit)
    visit.open(Path(visit.services.environment["RM_OPT_HOME"], "reports", "index.html").as_uri())
    visit.step("report-index", "walk")
    visit.follow("walk-seed0")
    visit.step("report", "level", "accuracy")


def in_prefect(visit: Visit) -> None:
    """One run to its end and one that is cancelled, both from the form."""
    ui = visit.services.ui
    visit.browser.paste_password(visit.form, visit.services.password)
    visit.step("form-after-log-in", "preset", "overrides")
    visit.open(f"{ui}/deployments")
    visit.step("prefect-deployments", "pipeline", "experiment", "policy-rlhf")
    visit.open(visit.form.removesuffix("/run"))
    visit.step("prefect-pipeline", "Run", "Description")
    visit.click("Description")
    visit.step("prefect-description", "prepare", "readiness")
    visit.open(visit.form)
    visit.step("form", "preset", "overrides")
    visit.choose("preset", "smoke")
    first = visit.submit("walk")
    visit.page(first)
    visit.step("run-under-way", "Running", "walk-seed0")

    visit.open(visit.form)
    visit.step("second-form", "preset")  # demo, which trains for a minute: smoke would be done, and cached, before
    second = visit.submit("cancelled")
    visit.page(second)
    visit.step("second-run", "Cancel", "cancelled-seed0")  # its own name, so it has begun
    visit.click("Cancel")
    visit.step("cancel-asked", "Cancel Flow Run")
    visit.click("Confirm")
    visit.ended(second, "CANCELLED")
    visit.page(second)
    visit.step("second-cancelled", "Cancelled by a user")

    visit.ended(first, "COMPLETED")
    visit.page(first)
    visit.step("run-completed", "Completed", "prepare", "readiness")
    visit.click("Artifacts")
    visit.step("run-artifacts", "report")
    visit.click("report")
    visit.step("run-report-card", "Report", "This run in MLflow", "pairs")


def in_mlflow(visit: Visit) -> None:
    """From its start page to the experiment of the study, to its three runs side by side, and to one of them."""
    for change in ("train.lr=0.002", "evaluate.num_resamples=150"):
        visit.services.flow_command("run", "--preset", "smoke", "--set", "study=walk", "--set", change)
    visit.open(f"{visit.services.ui}/runs")
    visit.step("prefect-runs", *(f"walk-seed0 · {change}" for change in ("smoke", "lr=0.002", "num_resamples=150")))
    # By all in which they differ, of which the first has the preset's values.
    names = [f"lr={lr}, num_resamples={number} · " for lr, number in ((0.001, 1000), (0.002, 1000), (0.001, 150))]
    visit.log_in(visit.services.mlflow)
    visit.step("mlflow-start", "rm/walk")
    visit.click("rm/walk")
    visit.step("mlflow-experiment", *names)
    visit.follow("Runs side by side")
    visit.step("mlflow-runs", *names, "eval/test_pairwise_accuracy", "interval/test_pairwise_accuracy", " to ")
    visit.open(visit.services.mlflow)
    visit.click("rm/walk")
    visit.follow("Charts of the runs")
    visit.step("mlflow-runs-charts", *names, "Learning curves")
    visit.follow(names[1])
    visit.step("mlflow-run", "Evidence level", names[1])


def compared(visit: Visit) -> None:
    """The cells of an experiment side by side, from its own page in MLflow."""
    declared = visit.services.home / "rates.yaml"
    declared.write_text(yaml.safe_dump(COMPARED))
    visit.services.flow_command("experiment", declared)
    visit.open(visit.services.mlflow)
    visit.step("mlflow-two-studies", "rm/rates")
    visit.click("rm/rates-custom")
    visit.step("mlflow-matrix", "Cells side by side", "5 matching runs")  # one has the cells below it
    visit.follow("Cells side by side")
    visit.step("mlflow-table", "small seed 0", "large seed 1", "test_pairwise_accuracy")
    visit.open(visit.services.mlflow)
    visit.click("rm/rates-custom")
    visit.follow("Charts of the cells")
    visit.step("mlflow-charts", "test_pairwise_accuracy")


def main(out: Path) -> None:
    """Start everything, walk, and end everything."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("Chromium is not installed; install it, or put a program of that name on PATH.")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        try:
            services = Services(home)
            browser = Browser(program, Path(folder) / "profile")
            try:
                walk(Visit(services, browser, out))
            finally:
                browser.close()
            services.rm_opt("down")
            services.close()
        finally:
            terminate(marked("RM_OPT_HOME", str(home)))  # what an `up` or a walk that failed left


if __name__ == "__main__":
    main(Path(sys.argv[1]))
