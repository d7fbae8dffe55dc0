"""The precision that `auto` stands for: by flags and never by a clock."""

import pytest

from rmcore.core import hardware
from rmcore.core.hardware import choose_precision, cpu_multiplies_bf16

FLAGS = {"avx512f avx512_bf16 amx_tile": True, "avx512f amx_bf16": True, "avx512f avx512_vnni": False, "": False}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_cpu_has_the_units_where_its_flags_say_so(tmp_path, monkeypatch, flags):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: a CPU\nflags\t\t: fpu {flags}\nbugs\t\t: none\n")
    assert cpu_multiplies_bf16(info) == FLAGS[flags]
    monkeypatch.setattr(hardware, "cpu_multiplies_bf16", lambda: cpu_multiplies_bf16(info))
    assert choose_precision("cpu", tiny=False) == ("bf16" if FLAGS[flags] else "fp32")


def test_what_cannot_be_read_counts_as_a_cpu_without(tmp_path):
    assert not cpu_multiplies_bf16(tmp_path / "none")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert not cpu_multiplies_bf16(tmp_path / "arm")


def test_a_gpu_computes_in_bf16_and_a_tiny_model_nowhere():
    assert choose_precision("cuda", tiny=False) == "bf16"
    assert choose_precision("cuda", tiny=True) == choose_precision("cpu", tiny=True) == "fp32"
