"""What it takes to mask a batch anew: `measure_masking.py`, microseconds a sequence."""

import sys
import time
from pathlib import Path

import numpy as np

from bert_tools.bench.synthetic import synthetic_samples
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.index import Manifest
from mlperf_bert.data.masking import DynamicMasks

SEQUENCES, ROUNDS, VOCAB_SIZE = 448, 40, 30_522
SPECIAL = {"pad_id": 0, "unk_id": 100, "cls_id": 101, "sep_id": 102, "mask_id": 103}


def measure(length: int, rate: float) -> tuple[float, float]:
    """Median and least of ROUNDS batches of sequences of that length, in microseconds each."""
    most = round(rate * length)
    manifest = Manifest(
        num_samples=SEQUENCES,
        vocab_size=VOCAB_SIZE,
        vocabulary_sha256="made up",
        **SPECIAL,
        max_seq_length=length,
        max_predictions=most,
        seed=0,
        dupe_factor=1,
        shards=(),
    )
    masks = DynamicMasks(Path("made up"), manifest, rate=rate, max_predictions=most, seed=1)
    samples = synthetic_samples(
        np.full(SEQUENCES, length), vocab_size=VOCAB_SIZE, max_predictions=76, seed=1
    )
    ids = np.arange(SEQUENCES)
    batch = make_batch(samples, ids, mlm_denominator=1.0, nsp_denominator=1.0)
    times = []
    for step in range(1, ROUNDS + 1):
        begun = time.perf_counter()
        masks.of(batch, step)
        times.append(1e6 * (time.perf_counter() - begun) / SEQUENCES)
    return float(np.median(times)), min(times)


def main() -> int:
    """Print a table of lengths and rates."""
    print(f"{SEQUENCES} sequences a batch, {ROUNDS} batches; us a sequence: median, least")
    for length in (128, 512):
        for rate in (0.15, 0.3):
            median, least = measure(length, rate)
            print(f"{length} tokens at {rate:.2f}: {median:6.1f} {least:6.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
