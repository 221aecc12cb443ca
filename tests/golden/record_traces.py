"""`make golden`: record the golden traces again, and print how far they are from the old ones."""

import tempfile
from pathlib import Path

from support import make_tiny_inputs
from trace_cases import (
    CASES,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    deviation,
    golden_path,
    is_same_stream,
    load,
    record,
    save,
)


def main():
    """Record every case on 1 and 2 ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, config = make_tiny_inputs(folder)
        for case in CASES:
            for ranks in (1, 2):
                trace = record(case, ranks, config, data, folder / f"{case}_{ranks}")
                print(f"{case} on {ranks} rank(s): {_difference(case, ranks, trace)}", flush=True)
                save(case, ranks, trace)


def _difference(case, ranks, trace):
    if not golden_path(case, ranks).exists():
        return "new"
    golden = load(case, ranks)
    notes = [
        f"{what} changed"
        for what, same in (
            ("data", trace.data_sha256 == golden.data_sha256),
            ("torch's random stream", is_same_stream(trace.stream, golden.stream)),
            ("number of steps", len(trace.loss) == len(golden.loss)),
        )
        if not same
    ]
    if len(trace.loss) != len(golden.loss):
        return ", ".join(notes)
    loss, norm = deviation(trace, golden)
    verdict = "within" if loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE else "BEYOND"
    first = next((k for k, pair in enumerate(_steps(trace, golden), 1) if pair[0] != pair[1]), None)
    notes += [
        f"loss differs by at most {loss:.1e} (tolerance {LOSS_TOLERANCE:.0e})",
        f"gradient norm by {norm:.1e} of itself ({NORM_TOLERANCE:.0e})",
        f"first at step {first}" if first else "bit-equal",
    ]
    return f"{verdict} tolerance: " + ", ".join(notes)


def _steps(trace, golden):
    ours = zip(trace.loss, trace.grad_norm, strict=True)
    theirs = zip(golden.loss, golden.grad_norm, strict=True)
    return list(zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
