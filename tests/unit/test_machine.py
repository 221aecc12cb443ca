"""What the machine has: instructions of its CPU."""

import pytest

from mlperf_bert.machine import bf16_instructions


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile", ["amx_bf16", "avx512_bf16"]),
        ("flags\t\t: fpu avx512f avx512_bf16", ["avx512_bf16"]),
        ("flags\t\t: fpu avx2 avx512_bf16x", []),  # another flag that begins like it
        ("bugs\t\t: avx512_bf16", []),
        ("", []),
    ],
)
def test_instructions_for_bf16_are_those_of_the_flags(tmp_path, flags, found):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: one\n{flags}\nprocessor\t: 1\n{flags}\n")
    assert bf16_instructions(cpuinfo) == found


def test_a_system_without_cpuinfo_has_none(tmp_path):
    assert bf16_instructions(tmp_path / "missing") == []
