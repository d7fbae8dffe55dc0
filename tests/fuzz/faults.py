"""Every change on disk fails once, or is the last of its process: the same call again gives what none would have lost.

A number names a scenario, a fault and which change it hits, of all that the scenario makes without one. Faults are an
I/O error, a disk that is full from there on, a kill before the change, and one in the middle of it (faults.c counts
and does that, below Python, so that what libraries write is among it). After each, what was published before is there,
nothing torn is taken for whole, and the same call again, without a fault, gives the same bytes as one that had none.
"""

import ctypes
import functools
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from data_files import SilentDifference

from rmcore.core.errors import RmcoreError
from rmcore.core.files import file_digest, write_json
from rmcore.core.manifests import make_key
from rmcore.core.shared_store import SharedStore
from rmcore.core.store import Store

FAULTS = {"an I/O error": 1, "a full disk": 2, "a kill": 3, "a torn change": 4}
WHOLE_RUNS = 40
"""Cases of `run`, which take seconds each; of all other scenarios every change meets every fault."""
SENTENCE = "told.txt"
WARM = (*(f"rmcore.stages.{stage}" for stage in ("prepare", "train", "evaluate")), "tasks.execution", "obstore.store")


def preload() -> None:
    """Have this program, started again, count and fail changes."""
    library = Path(__file__).parents[2] / "build" / "faults.so"
    if os.environ.get("LD_PRELOAD") == str(library):
        return
    library.parent.mkdir(exist_ok=True)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_suffix(".c"), "-ldl"], check=True
    )
    os.execve(sys.executable, sys.orig_argv, os.environ | {"LD_PRELOAD": str(library)})  # noqa: S606 - no shell is wanted


def one(draw: random.Random, place: Path) -> str:
    """Do the case of the number that `place` is called by; "same" where the call ended well, "refused" where not."""
    name, fault, nth = _case(int(place.name))
    scenario, work = SCENARIOS[name](), place / "work"
    shutil.copytree(_template(name), work, symlinks=True)
    status = _in_child(place, lambda: scenario.act(work), work, nth, FAULTS[fault])
    what = f"{name}, {fault} at change {nth}: "
    what += (place / SENTENCE).read_text() if status > 0 else ""
    if status not in (0, 1, -9):
        raise SilentDifference(f"{what}; it ended with {status}")
    for doing in (scenario.kept, lambda place: _repeated(name, scenario, place)):
        if _in_child(place, lambda doing=doing: doing(work)) != 0:
            raise SilentDifference(f"{what}; then {(place / SENTENCE).read_text()}")
    return "same" if status == 0 else "refused"


def _repeated(name: str, scenario: "Scenario", work: Path) -> None:
    scenario.act(work)
    found, expected = scenario.result(work), _template(name).with_suffix(".json").read_text()
    assert json.dumps(found) == expected, f"the same call again gives {found}, not {expected}"


def default_count() -> int:
    """Return how many cases there are; `make faults` tries each."""
    for module in WARM:  # by the parent of all processes
        importlib.import_module(module)
    importlib.import_module("rmcore.models.tiny").tiny_config = importlib.import_module("nano_model").nano_config
    return len(_short_cases()) + WHOLE_RUNS


@functools.cache
def _short_cases() -> list[tuple[str, str, int]]:
    """Scenario, fault and change of all cases but whole runs, mixed, so that any few are of several scenarios."""
    found = [case for name in SCENARIOS if name != "run" for case in _cases(name)]
    random.Random(0).shuffle(found)  # noqa: S311 - to be repeated
    return found


@functools.cache
def _cases(name: str) -> list[tuple[str, str, int]]:
    changes = range(1, int(_template(name).with_suffix(".count").read_text()) + 1)
    return [(name, fault, nth) for fault in FAULTS for nth in changes]


def _case(number: int) -> tuple[str, str, int]:
    """Scenario, fault and change of a number; whole runs come last, the first of which makes what they begin with."""
    if number < len(_short_cases()):
        return _short_cases()[number]
    runs = random.Random(0).sample(_cases("run"), WHOLE_RUNS)  # noqa: S311 - to be repeated
    return runs[number - len(_short_cases())]


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="rm-opt-faults-")


@functools.cache
def _template(name: str) -> Path:
    """What a scenario begins with; next to it what it gives without a fault, and how many changes it makes."""
    scenario, template = SCENARIOS[name](), Path(_scratch().name) / name
    template.mkdir()

    def tell() -> None:
        template.with_suffix(".json").write_text(json.dumps(scenario.result(work)))

    work = template.with_name(f"{name}-work")
    for step in (lambda: scenario.begin(template), lambda: shutil.copytree(template, work, symlinks=True)):
        assert _in_child(template.parent, step) == 0, (template.parent / SENTENCE).read_text()
    assert _in_child(template.parent, lambda: scenario.act(work), work, 0, 0, template.with_suffix(".count")) == 0, (
        template.parent / SENTENCE
    ).read_text()
    assert _in_child(template.parent, tell) == 0, (template.parent / SENTENCE).read_text()
    return template


def _in_child(
    told: Path,
    doing: Callable[[], Any],
    below: Path | None = None,
    nth: int = 0,
    how: int = 0,
    count: Path | None = None,
) -> int:
    """Do something in a process of its own; 0, 1 where it was refused, -9 where it was killed, else what it died of."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status, shim = 0, ctypes.CDLL(os.environ["LD_PRELOAD"])
    try:
        if below is not None:
            shim.faults_arm(os.fsencode(below), ctypes.c_long(nth), how)
        doing()
    except (OSError, RmcoreError) as error:
        status, said = 1, f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        status, said = 2, traceback.format_exc()
    finally:
        seen = shim.faults_seen()
        shim.faults_arm(b"", ctypes.c_long(0), 0)
        with suppress(OSError):
            if status:
                (told / SENTENCE).write_text(said)
            if count is not None:
                count.write_text(str(seen))
        os._exit(status)


class Scenario:
    """A call, `act`, on what `begin` made. `kept` fails where a fault has lost something; `result` is what it gives."""

    def begin(self, place: Path) -> None:
        """Make what is there before."""

    def act(self, place: Path) -> None:
        """Do what faults are tried in."""

    def kept(self, place: Path) -> None:
        """Fail unless all that was there before is there, and what is taken for whole is whole."""

    def result(self, place: Path) -> Any:
        """Say what was made, in JSON."""


INPUTS = {"prepare": {"stage": "prepare", "seed": 7}, "train": {"stage": "train", "seed": 7}}


def _publish(store: Store, stage: str, content: str) -> None:
    """As a pipeline makes an artifact: unless it is there and valid."""
    with store.lock(key := make_key(INPUTS[stage])):
        if store.status(stage, key).state == "valid":
            return
        with store.publish(stage, stage, INPUTS[stage], outcome=("best/*", "training.json")) as out:
            (out / "best").mkdir()
            (out / "best" / "weights.bin").write_bytes(random.Random(content).randbytes(9_000))  # noqa: S311 - data
            (out / "metrics.jsonl").write_text('{"step": 1}\n')
            write_json(out / "training.json", {"steps": 3})


def _stored(store: Store, stage: str) -> dict[str, str] | None:
    """Digests of the files of an artifact as they are; None where it is not there, or is known to be damaged."""
    key = make_key(INPUTS[stage])
    if store.status(stage, key).state != "valid":
        return None
    folder = store.find(stage, key)
    return {name: file_digest(folder / name) for name in sorted(store.manifest(stage, key)["files"])}


def _expect(found: Any, *expected: Any) -> None:
    assert found in expected, f"{found} is there, expected was one of {expected}"


def _store(place: Path) -> Store:
    return Store(place / "store")


class Publish(Scenario):
    """An artifact is written and published next to another one, in place of a damaged one."""

    def begin(self, place: Path) -> None:
        store = _store(place)
        _publish(store, "prepare", "prepare")
        _publish(store, "train", "damaged")
        (store.find("train", _key("train")) / "training.json").write_text("{}")

    def act(self, place: Path) -> None:
        _publish(_store(place), "train", "train")

    def kept(self, place: Path) -> None:
        store, whole = _store(place), _store(_template("publish").with_name("whole"))
        _publish(whole, "prepare", "prepare")
        _publish(whole, "train", "train")
        _expect(_stored(store, "prepare"), _stored(whole, "prepare"))
        _expect(_stored(store, "train"), None, _stored(whole, "train"))

    def result(self, place: Path) -> Any:
        store = _store(place)
        assert all(damage is None for _, damage in store.verify())
        return [_stored(store, stage) for stage in INPUTS]


def _key(stage: str) -> str:
    return make_key(INPUTS[stage])


class Push(Scenario):
    """A home shares an artifact, and one that another machine committed with another outcome is exchanged for that."""

    def begin(self, place: Path) -> None:
        mine, theirs = self._stores(place)
        _publish(mine, "prepare", "prepare")
        _publish(mine, "train", "mine")
        _publish(theirs, "train", "theirs")
        (place / "shared").mkdir()
        self._shared(place).push(theirs, "train", _key("train"))

    def _stores(self, place: Path) -> list[Store]:
        return [Store(place / name) for name in ("mine", "theirs")]

    def _shared(self, place: Path) -> SharedStore:
        return SharedStore(f"file://{place.resolve()}/shared", {"host": "here"})

    def act(self, place: Path) -> None:
        mine, _ = self._stores(place)
        shared = self._shared(place)
        for stage in INPUTS:
            with mine.lock(_key(stage)):
                if mine.status(stage, _key(stage)).state == "valid" or not shared.pull(mine, stage, _key(stage)):
                    shared.push(mine, stage, _key(stage))

    def kept(self, place: Path) -> None:
        (mine, theirs), elsewhere, shared = self._stores(place), Store(place / "elsewhere"), self._shared(place)
        assert shared.pull(elsewhere, "train", _key("train"))
        _expect(_stored(elsewhere, "train"), _stored(theirs, "train"))
        before, _ = self._stores(_template("push"))
        _expect(_stored(mine, "prepare"), _stored(before, "prepare"))
        # What gives way is whole, or gone: the other machine's outcome is there for it.
        _expect(_stored(mine, "train"), _stored(before, "train"), _stored(theirs, "train"), None)
        if shared.pull(elsewhere, "prepare", _key("prepare")):
            _expect(_stored(elsewhere, "prepare"), _stored(before, "prepare"))

    def result(self, place: Path) -> Any:
        mine, _ = self._stores(place)
        shared = self._shared(place)
        return [[_stored(mine, stage), shared.find(stage, _key(stage))["manifest"]["digest"]] for stage in INPUTS]


class State(Scenario):
    """A training saves a state, and its checkpoint gives way to a better one."""

    def begin(self, place: Path) -> None:
        for step in (1, 2):
            (place / f"step_{step}").mkdir()
            (place / f"step_{step}" / "model.bin").write_bytes(bytes([step]) * 5_000)
        self._save(place, 1)

    def _save(self, place: Path, step: int) -> None:
        import torch

        from rmcore.training.resume import new_state
        from rmcore.training.saving import copy_checkpoint, repair_interrupted
        from rmcore.training.state import write_alone

        repair_interrupted(place)
        copy_checkpoint(place / f"step_{step}", place / "best")
        with new_state(place, step, {"num_rows": step}, [place / "best"]) as (folder, digests):
            digests.update(write_alone({"model.weight": torch.full((300,), float(step))}, folder))

    def act(self, place: Path) -> None:
        self._save(place, 2)

    def kept(self, place: Path) -> None:
        from rmcore.training.saving import repair_interrupted

        repair_interrupted(place)  # as every training begins
        assert self._found(place)[0] in (1, 2)

    def _found(self, place: Path) -> Any:
        from safetensors.torch import load_file

        from rmcore.training.resume import find_resume_point

        point = find_resume_point(place)
        assert point is not None
        kept = (point.state / "checkpoints" / "best" / "model.bin").read_bytes()
        _expect(kept, bytes([point.step]) * 5_000)
        best = (place / "best" / "model.bin").read_bytes()
        _expect(best, *(bytes([step]) * 5_000 for step in (1, 2)))
        return [point.step, best[0], load_file(next(point.state.glob("*.safetensors")))["model.weight"].tolist()]

    def result(self, place: Path) -> Any:
        return self._found(place)


class Run(Scenario):
    """A small run as a whole: pairs are prepared, a model is trained and evaluated; a state is saved at every step."""

    def act(self, place: Path) -> None:
        from rmcore.config.data import DataConfig, GoldConfig
        from rmcore.config.model import ModelConfig
        from rmcore.config.pipeline import PipelineConfig
        from rmcore.config.train import TrainConfig
        from rmcore.stages.order import stage_of
        from tasks import execution

        execution.run_child = _run_stage
        settings = {"steps": 3, "pairs_per_step": 4, "eval_every": 1, "keep_top_k": 2, "resume_every_seconds": 0}
        config = PipelineConfig(
            device="cpu",
            data=DataConfig(gold=GoldConfig(num_prompts=24)),
            model=ModelConfig(name="tiny", max_seq_len=64),
            train=TrainConfig(**settings, precision="fp32", token_budget=384),
        )
        store, refs = _store(place), {}
        for name in ("prepare", "train", "evaluate"):
            call = stage_of(name, config, refs)
            refs[name], _ = execution.execute(store, call, lambda path: nullcontext(), lambda: None)

    def result(self, place: Path) -> Any:
        store = _store(place)
        assert all(damage is None for _, damage in store.verify())
        return sorted((entry.stage, entry.digest) for entry in store.entries())

    def kept(self, place: Path) -> None:
        """Fail where an artifact has another outcome than without a fault, or is torn."""
        store, whole = _store(place), dict(json.loads(_template("run").with_suffix(".json").read_text()))
        assert all(damage is None for _, damage in store.verify())
        for entry in store.entries():
            _expect(entry.digest, whole[entry.stage])


def _run_stage(stage: Any, out: Path, *_: Any) -> None:
    """Run a stage in this process, where faults are counted."""
    from rmcore.stages.run import run_stage

    run_stage(stage, out)


SCENARIOS: dict[str, type[Scenario]] = {one.__name__.lower(): one for one in (Publish, Push, State, Run)}
