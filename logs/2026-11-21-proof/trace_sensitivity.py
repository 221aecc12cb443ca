"""How far other summation orders, and small changes of constants, move the golden traces.

    PYTHONPATH=tests:tests/golden .venv/bin/python logs/2026-11-21-proof/trace_sensitivity.py

The tolerance of tests/golden/trace_cases.py was chosen between the two; see docs/how/numerics.md.
"""

import tempfile
from pathlib import Path

from support import make_tiny_inputs
from trace_cases import deviation, load, record

# Environments in which the same sums are made in another order.
OTHER_ORDERS = {
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "torch's kernels for AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "torch's kernels without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "products limited to AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "products limited to SSE4": {
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
CHANGES = (
    ("adamw", "optim.epsilon=1.1e-6"),
    ("adamw", "optim.beta_2=0.9991"),
    ("adamw", "optim.weight_decay=0.011"),
    ("adamw", "clip.max_norm=1.01"),
    ("adamw", "optim.learning_rate=3.003e-3"),
    ("lamb", "optim.epsilon=1.1e-6"),
    ("lamb", "optim.weight_decay=0.011"),
)


def main() -> None:
    """Print the largest deviation of each run from the golden trace of one rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, config = make_tiny_inputs(folder)

        def show(case: str, what: str, ranks: int, *settings: str, **environ: str) -> None:
            run_dir = folder / f"run_{len(list(folder.iterdir()))}"
            trace = record(case, ranks, config, data, run_dir, *settings, **environ)
            loss, norm = deviation(trace, load(case, 1))
            print(f"{case}, {what}: loss {loss:.1e}, gradient norm {norm:.1e}", flush=True)

        for case in ("adamw", "lamb"):
            for ranks in (1, 2, 4):
                show(case, f"{ranks} rank(s)", ranks)
            show(case, "reference attention", 1, "model.attention=reference")
        for what, environ in OTHER_ORDERS.items():
            for case in ("adamw", "lamb", "dropout"):
                show(case, what, 1, **environ)
        for case, change in CHANGES:
            show(case, change, 1, change)


if __name__ == "__main__":
    main()
