"""Golden traces: loss and gradient norm of every step of fixed-seed runs, made by real commands.

The synthetic text, its examples and the batches come from CPython's Mersenne Twister and our own
permutation, the same under every Python. Weights come from torch's generator; some of its draws
are stored with a trace (`stream`), because a build of torch with another generator would give
another trace without anything being wrong here.

The traces start after the init phase's synthetic steps, in which DDP rebuilds its buckets.
"""

import hashlib
import json
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path

import numpy as np
import torch

from forked_ranks import run_ranks
from mlperf_bert.__main__ import main as run_command
from mlperf_bert.data.index import Manifest
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import TARGET_MISSED
from support import make_tiny_inputs, metrics_records, sets_of

FOLDER = Path(__file__).parent / "traces"

# Largest deviation from the golden trace that other summation orders may cause: of the loss, and
# of the gradient norm relative to itself. See docs/concepts/numerics.md for what was measured.
LOSS_TOLERANCE = 5e-6
NORM_TOLERANCE = 5e-6

STEPS = 30
COMMON = (
    "run.seed=20",
    f"run.max_steps={STEPS}",
    f"schedule.decay_steps={STEPS}",
    "model.initializer_range=0.1",
    "parallel.bucket_cap_mb=0.05",  # several buckets, so that rebuilding them matters
    "eval.interval_samples=160",
)
CASES = {
    "adamw": ("optim.name=adamw", "optim.learning_rate=3e-3", "clip.max_norm=1.0"),
    "lamb": ("optim.name=lamb", "optim.learning_rate=2e-2", "parallel.grad_accum_steps=2"),
    "dropout": ("model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
}
GLOBAL_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class Trace:
    """A run's trace and its initial state."""

    data_sha256: str
    stream: list[float]
    loss: list[float]
    grad_norm: list[float]


def settings(case, ranks):
    """The settings of a case; its global batch is the same on any number of ranks."""
    accumulation = 2 if case == "lamb" else 1
    local = GLOBAL_BATCH_SIZE // ranks // accumulation
    return (
        *COMMON,
        *CASES[case],
        f"parallel.ranks_per_node={ranks}",
        f"parallel.local_batch_size={local}",
    )


def record(case, ranks, config, data, run_dir):
    """Run a case on `ranks` ranks of one thread each."""
    sets = sets_of(*settings(case, ranks))
    options = ["--config", config, "--data", data, "--run-dir", run_dir, *sets]
    # Each ran to its end; the target is out of reach by design.
    if ranks == 1:
        with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
            status = run_command(["train", *map(str, options)])
        assert status == TARGET_MISSED, printed.getvalue()
    else:
        statuses, printed = run_ranks("mlperf_bert", ("train", *options), ranks)
        assert statuses == [TARGET_MISSED] * ranks, printed
    steps = metrics_records(run_dir)
    return Trace(
        data_sha256=digest_of(data),
        stream=stream_of_torch(),
        loss=[step["loss"] for step in steps],
        grad_norm=[step["grad_norm"] for step in steps],
    )


def digest_of(data):
    """One digest over all samples of both sets, whatever the format of their files."""
    digest = hashlib.sha256()
    for name in ("train", "eval"):
        manifest = Manifest.load(data / name)
        samples = SampleReader(data / name, manifest).read(np.arange(manifest.num_samples))
        for field in fields(samples):
            digest.update(getattr(samples, field.name).tobytes())
    return digest.hexdigest()


def stream_of_torch():
    """Some draws of the generator that a run takes its weights from."""
    generator = torch.Generator().manual_seed(20)
    return [float(draw) for draw in torch.empty(32).normal_(generator=generator)]


def is_same_stream(first, second):
    """Whether two streams are equal but for the last digits, in which vector units differ."""
    return len(first) == len(second) and bool(np.allclose(first, second, rtol=0, atol=1e-4))


def golden_path(case, ranks):
    """Where the trace of a case is kept."""
    return FOLDER / f"{case}_{ranks}.json"


def load(case, ranks):
    """Read a golden trace."""
    return Trace(**json.loads(golden_path(case, ranks).read_text()))


def save(case, ranks, trace):
    """Write a golden trace, a line a list."""
    lines = [f' "{key}": {json.dumps(value)}' for key, value in asdict(trace).items()]
    golden_path(case, ranks).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def deviation(trace, golden):
    """Largest difference of the loss, and of the gradient norm relative to the golden one."""
    loss = np.subtract(trace.loss, golden.loss)
    norm = np.divide(trace.grad_norm, golden.grad_norm) - 1
    return float(np.abs(loss).max()), float(np.abs(norm).max())  # NaN where there is one


def is_within_tolerance(trace, golden):
    loss, norm = deviation(trace, golden)
    return loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE


def main():
    """`make golden`: record every case again, and print how far it is from the old trace."""
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
    if trace.data_sha256 != golden.data_sha256 or len(trace.loss) != len(golden.loss):
        return "other data or another number of steps"
    loss, norm = deviation(trace, golden)
    return f"loss differs by at most {loss:.1e}, gradient norm by {norm:.1e} of itself"


if __name__ == "__main__":
    main()
