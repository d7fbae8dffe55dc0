"""A walk through the pages as a person takes it, in a headless browser, with a picture of each step.

    make walk            # or: python tests/services/walk.py build/walk

Starts `rm-opt up` in a temporary home and ends it again. A step that does not show what it has to, ends the walk with the
name of the step, and with the picture of what was there instead. The pictures are for looking at: that a page is right is
tested in this folder, that it is pleasant is seen.
"""

import base64
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from conftest import Browser, Services

WIDTH, HEIGHT = 1440, 1100
WAIT_S = 240.0
"""For what a page has to show; a page that is only drawn takes a second, on a busy machine half a minute."""
RUN_S = 1200.0
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
    e => (e.innerText ?? '').trim().split('\\n')[0].trim().toLowerCase() === label.toLowerCase());
  const held = named?.parentElement?.querySelector('input, textarea, [role=combobox], button');
  if (!held) return '';
  held.scrollIntoView({{block: 'center'}});
  const box = held.getBoundingClientRect();
  return JSON.stringify([box.x + Math.min(60, box.width / 2), box.y + box.height / 2]);
}})({label})
"""


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
        self.browser.tell("Page.navigate", url=address)

    def click(self, text: str) -> None:
        """Press the mouse on what is called so."""
        self._press(FIND.format(text=json.dumps(text)), text)

    def fill(self, label: str, value: str) -> None:
        """Click into a field and type."""
        self._press(FIELD.format(label=json.dumps(label)), label)
        self.browser.tell("Input.insertText", text=value)

    def choose(self, label: str, option: str) -> None:
        """Open a list and take one of its entries."""
        self._press(FIELD.format(label=json.dumps(label)), label)
        self.click(option)

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


def walk(services: Services, browser: Browser, out: Path) -> None:
    """From the start page through both UIs to a report."""
    at = Walk(browser, out)

    def with_login(address: str) -> str:
        return address.replace("//", f"//any:{services.password}@")

    at.open(with_login(services.start))
    at.step("start-page", "Prefect", "MLflow", "Reports", "nightly-ablation")

    deployment = f"{services.ui}/deployments/deployment/{services.deployment()['id']}"
    browser.paste_password(with_login(services.ui), services.password)
    at.open(f"{services.ui}/deployments")
    at.step("prefect-deployments", "pipeline", "experiment", "rlhf")
    at.open(deployment)
    at.step("prefect-pipeline", "Run", "prepare")

    at.open(f"{deployment}/run")
    at.step("form-empty", "preset", "overrides")
    at.choose("preset", "smoke")
    at.fill("study", "walk")
    at.step("form-filled", "smoke")
    at.click("Submit")
    [first] = wait_for(lambda: services.flow_runs())
    at.open(f"{services.ui}/runs/flow-run/{first['id']}")
    at.step("run-under-way", "walk", "Running")

    at.open(f"{deployment}/run")
    at.step("second-form", "preset")
    at.fill("study", "cancelled")
    at.click("Submit")
    second = wait_for(lambda: [run for run in services.flow_runs() if run["id"] != first["id"]])[0]
    assert services.wait(first["id"], RUN_S)["state_type"] == "COMPLETED"
    at.open(f"{services.ui}/runs/flow-run/{first['id']}")
    at.step("run-completed", "Completed", "prepare", "readiness")
    at.click("Artifacts")
    at.step("run-artifacts", "verdict")

    wait_for(lambda: services.http.get(f"{services.api}/flow_runs/{second['id']}").json()["state_type"] == "RUNNING")
    at.open(f"{services.ui}/runs/flow-run/{second['id']}")
    at.step("second-run", "Running")
    browser.run(MENU)
    at.click("Cancel")
    at.step("cancel-asked", "cancel")
    browser.run(CONFIRM)
    assert services.wait(second["id"], RUN_S)["state_type"] == "CANCELLED"
    at.open(f"{services.ui}/runs/flow-run/{second['id']}")
    at.step("second-cancelled", "Cancelled")

    at.open(with_login(services.mlflow))
    at.step("mlflow-start", "rm/walk")
    at.click("rm/walk")
    at.step("mlflow-experiment", "rm/walk", "walk seed 0")
    at.click("walk seed 0")
    at.step("mlflow-run", "pairwise_accuracy", "rung")

    services.rm_opt("experiment", "baseline", "--size", "smoke", "--set", "seeds=2")
    at.open(with_login(services.mlflow))
    at.click("rm/baseline")
    at.step("mlflow-comparison", "seed 0")

    at.open(services.start)
    at.step("start-page-after", "walk", "cancelled")
    at.open(f"{services.start}/reports/index.html")
    at.step("report-index", "walk")
    at.click("walk")
    at.step("report", "rung", "accuracy")


MENU = "[...document.querySelectorAll('header button, .page-heading button')].pop()?.click()"
CONFIRM = "[...document.querySelectorAll('[role=dialog] button, .p-modal button')].pop()?.click()"


def wait_for(found: object) -> object:
    """What a function gives once it gives anything."""
    deadline = time.monotonic() + WAIT_S
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.3)
    return value or sys.exit("the walk waited in vain for a flow run")


def main(out: Path) -> None:
    """Start everything, walk, and end everything."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("Chromium is not installed; install it, or put a program of that name on PATH.")
    with tempfile.TemporaryDirectory() as folder:
        services = Services(Path(folder) / "home")
        try:
            browser = Browser(program, Path(folder) / "profile")
            try:
                walk(services, browser, out)
            finally:
                browser.close()
        finally:
            services.rm_opt("down")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
