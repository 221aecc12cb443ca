"""Triton's kernels without a GPU: interpreted they do what their references do; and a gate.

The gate is what `tools/kernel_table.py` finds in the compiled kernels of a step. All but the quick
job is for changes of `model/triton_*` and of their Triton: `pytest -m longest` with this file.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from support import REPOSITORY, run_process

LIMIT_S = 840.0  # of a job: minutes of one core, which others may want too
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.timeout(LIMIT_S + 60),
]
H100, A100 = 132, 108  # multiprocessors
MATRIX = ("_attention_forward", "_attention_of_queries", "_attention_of_keys")
LOG = REPOSITORY / "logs" / "2026-11-22-kernels"
SLACK = 1.25  # of the instructions of a program's warps under Triton 3.6; 3.7 makes 1.21
WAYS = ("forward", "backward")
TRANSPOSING = ("_cast_to_fp8", "_gelu_fp8", "_gated_fp8", "_transpose")
OTHER_HEADS = "heads of 128"
JOB = Path(__file__).with_name("triton_jobs.py")
PLACES = ("tests", "tools", "benchmarks/bert/implementations/pytorch")


JOBS = ("attention", "blocks", "fp8", "updates", "compile")


@pytest.mark.parametrize(
    "job", ["quick", *(pytest.param(job, marks=pytest.mark.longest) for job in JOBS)]
)
def test_interpreted_and_compiled_they_do_what_they_should(job, tmp_path):
    environ = {
        "TRITON_INTERPRET": str(int(job != "compile")),
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": ":".join(str(REPOSITORY / place) for place in PLACES),
    }
    done = run_process(sys.executable, JOB, job, limit_s=LIMIT_S, **environ)
    assert done.returncode == 0, done.stderr


def compile_kernels(keep, *arguments):
    done = run_process(
        *(sys.executable, REPOSITORY / "tools" / "kernel_table.py"),
        *("--keep", keep, *arguments),
        limit_s=LIMIT_S,
        TRITON_CACHE_DIR=str(keep / "cache"),
    )
    assert done.returncode == 0, done.stderr
    return rows_of(done.stdout)


def rows_of(text):
    return {(row["case"], row["kernel"]): row for row in json.loads(text)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    keep = tmp_path_factory.mktemp("kernels")
    return compile_kernels(keep), keep


@pytest.mark.longest
def test_compiled_kernels_are_as_fast_as_they_were(compiled):
    rows, _ = compiled
    assert len(rows) >= 30
    spilling = {name for name, row in rows.items() if row["spills"] or row["stack"]}
    assert not {name for name in spilling if OTHER_HEADS not in name[0]}
    assert all(rows[name]["stack"] <= 96 for name in spilling)
    # FP8 leaves in stores of 16 bytes; beside a norm's other results of a row, the 8 of a thread.
    assert {name for name, row in rows.items() if row["byte_stores"]} == set()
    for (case, kernel), row in rows.items():
        if kernel in TRANSPOSING:
            assert row["wide_stores"] >= 2, case
    on_matrix_units = [row["matrix"] for (_, kernel), row in rows.items() if kernel in MATRIX]
    # Heads of 16, 32, 64 and 128; rotated of 64 and 128, with a window and without, and the last
    # layer's of 64.
    assert len(on_matrix_units) == 10 * len(MATRIX)
    assert all(count >= 4 for count in on_matrix_units)
    for name, logged in rows_of((LOG / "triton-3.6.json").read_text(encoding="utf-8")).items():
        most = SLACK * logged["instructions"] * logged["warps"]
        assert rows[name]["instructions"] * rows[name]["warps"] <= most, name


@pytest.mark.longest
def test_fp8_saturates_in_its_conversion_and_gelu_is_computed_once(compiled):
    """The kernels do not clamp. Triton 3.6 computed GELU again in the layout of the transpose."""
    _, keep = compiled
    texts = [path.read_text(encoding="utf-8") for path in keep.glob("*.ptx")]
    found = {name for text in texts for name in re.findall(r"cvt\S*\.e[45]m[23]x2\S*", text)}
    assert found == {"cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"}
    gates = [path.read_text(encoding="utf-8") for path in keep.glob("_g[ea]*.ttgir")]
    exponentials = sorted(text.count("math.exp2") for text in gates)
    assert exponentials == [1, 1, 1, 1, 2, 2, 2, 2]  # backward has the density too
    assert not any("math.erf" in path.read_text() for path in keep.glob("*.ttgir"))


@pytest.mark.longest
def test_programs_that_share_sums_run_at_once(compiled, tmp_path):
    """As many as their launches assume: on an H100, and in bf16 on an A100."""
    from mlperf_bert.model import triton_cross_entropy, triton_gelu, triton_parts

    assumed = {
        ("norm", "_norm_backward"): triton_parts.MOST_PROGRAMS,
        ("modern norm", "_norm_backward"): triton_parts.MOST_PROGRAMS,
        ("GELU", "_gelu_backward"): triton_gelu.MOST_PROGRAMS,
        ("masked-LM loss", "_cross_entropy_backward"): triton_cross_entropy.MOST_PROGRAMS,
    }
    older = compile_kernels(tmp_path, "--capability", "80", "--only", "norm|GELU|loss")
    for rows, multiprocessors in ((compiled[0], H100), (older, A100)):
        for name, programs in assumed.items():
            assert rows[name]["programs"] * multiprocessors >= programs, name
    fp8 = compiled[0]["FP8 norm", "_norm_backward"]["programs"]
    assert fp8 * H100 >= triton_parts.MOST_PROGRAMS
    assert all(compiled[0][f"FP8 GELU {way}", "_gelu_fp8"]["programs"] >= 4 for way in WAYS)
