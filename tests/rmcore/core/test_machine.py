"""What this machine has: its precision, and clusters with a login."""

import pytest

from rmcore.core import hardware
from rmcore.core.errors import ConfigError
from rmcore.core.hardware import choose_precision, cpu_multiplies_bf16
from rmcore.core.ray_cluster import RayCluster

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
