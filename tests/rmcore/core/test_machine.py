"""What this machine has: its precision, clusters with a login, and the packages that draw curves elsewhere."""

import importlib.util

import pytest

from rmcore.core import hardware, tracking
from rmcore.core.errors import ConfigError
from rmcore.core.hardware import choose_precision, cpu_multiplies_bf16
from rmcore.core.ray_cluster import RayCluster
from rmcore.core.tracking import (
    METRICS_FILE,
    JsonlTracker,
    ManyTrackers,
    MemoryTracker,
    give_lines,
    open_loggers,
    require_loggers,
)

CPUS = {
    ("GenuineIntel", "avx512f avx512_bf16"): False,
    ("GenuineIntel", "avx512f avx512_bf16 amx_bf16"): True,
    ("GenuineIntel", "avx512f avx512_vnni"): False,
    ("AuthenticAMD", "avx512f avx512_bf16"): True,
    ("AuthenticAMD", "avx2"): False,
    ("AnotherVendor", "avx512_bf16 amx_bf16"): False,
    ("GenuineIntel", ""): False,
}


@pytest.mark.parametrize("cpu", CPUS)
def test_bf16_is_taken_where_vendor_and_flags_say_that_it_is_faster(tmp_path, monkeypatch, cpu):
    info = tmp_path / "cpuinfo"
    core = f"processor\t: {{}}\nvendor_id\t: {cpu[0]}\nmodel name\t: a CPU\nflags\t\t: fpu {cpu[1]}\nbugs\t\t: none\n\n"
    info.write_text(core.format(0) + core.format(1))
    assert cpu_multiplies_bf16(info) == CPUS[cpu]
    monkeypatch.setattr(hardware, "cpu_multiplies_bf16", lambda: cpu_multiplies_bf16(info))
    assert choose_precision("cpu", tiny=False) == ("bf16" if CPUS[cpu] else "fp32")


def test_what_cannot_be_read_counts_as_a_cpu_without(tmp_path):
    assert not cpu_multiplies_bf16(tmp_path / "none")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert not cpu_multiplies_bf16(tmp_path / "arm")


def test_a_gpu_computes_in_bf16_and_a_tiny_model_nowhere():
    assert choose_precision("cuda", tiny=False) == "bf16"
    assert choose_precision("cuda", tiny=True) == choose_precision("cpu", tiny=True) == "fp32"


@pytest.mark.parametrize(("mode", "token"), [("", "x" * 40), ("disabled", "x" * 40), ("token", "")])
def test_a_cluster_without_a_login_is_refused_before_it_is_asked(monkeypatch, mode, token):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.2:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with pytest.raises(ConfigError, match="is to be used without a login"), RayCluster("--engine ray"):
        pass


ROWS = [(1, {"train/loss": 0.75, "eval/loss": float("nan")}), (2, {"train/loss": 0.5})]


@pytest.fixture
def lines(tmp_path):
    """What a trainer has written."""
    tracker = JsonlTracker(tmp_path / METRICS_FILE)
    for step, values in ROWS:
        tracker.metrics(step, values)
    tracker.close()
    return (tmp_path / METRICS_FILE).read_bytes().splitlines()


def test_each_of_several_gets_every_row_and_no_number_that_is_none(lines):
    seen = [MemoryTracker(), MemoryTracker()]
    give_lines(lines, ManyTrackers(seen))
    assert seen[0].rows == seen[1].rows == [(1, {"train/loss": 0.75}), (2, {"train/loss": 0.5})]


def opened(name, folder):
    return open_loggers([name], study="mine", run="mine-seed0", folder=folder, config={"train.lr": 1e-3})


def test_tensorboard_reads_back_every_number(lines, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with opened("tensorboard", tmp_path / "out") as tracker:
        give_lines(lines, tracker)
    events = accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.75), (2, 0.5)]


def test_wandb_offline_keeps_the_run_on_disk(lines, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with opened("wandb", tmp_path / "out") as tracker:
        give_lines(lines, tracker)
    [written] = (tmp_path / "out" / "wandb").rglob("run-*.wandb")
    assert b"train/loss" in written.read_bytes()


def test_a_logger_that_fails_is_named_once_and_costs_neither_the_run_nor_the_rows_of_others(
    lines, tmp_path, monkeypatch, capsys
):
    class Full(MemoryTracker):
        def metrics(self, step, values):
            if step == 1:
                raise OSError(28, "No space left on device")
            super().metrics(step, values)

        def close(self):
            raise OSError(28, "No space left on device")

    full, whole = Full(), MemoryTracker()
    whole.close = lambda: None
    monkeypatch.setattr(tracking, "require_loggers", lambda names: None)
    monkeypatch.setattr(tracking, "TensorboardTracker", lambda folder: full)
    monkeypatch.setattr(tracking, "WandbTracker", lambda *given: whole)
    with open_loggers(["tensorboard", "wandb"], study="s", run="r", folder=tmp_path, config={}) as both:
        give_lines(lines, both)
    assert whole.rows == [(1, {"train/loss": 0.75}), (2, {"train/loss": 0.5})]
    assert full.rows == whole.rows[1:]
    assert capsys.readouterr().err.count("tensorboard failed at step 1 (OSError: [Errno 28] No space left") == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_named_with_its_command(name, tmp_path):
    if importlib.util.find_spec(name) is not None:
        require_loggers([name])
        return
    for call in (lambda: require_loggers([name]), lambda: opened(name, tmp_path).__enter__()):
        with pytest.raises(ConfigError, match=f"pip install {name}"):
            call()
    assert not list(tmp_path.iterdir())
