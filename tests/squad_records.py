"""Records of fine-tuning runs, as a run would write them, for tests that need no run."""

import json
from pathlib import Path
from typing import Any


def record(
    engine: str = "single", *, seed: int = 1, ranks: int = 1, **changes: Any
) -> dict[str, Any]:
    """A record of 10 updates of 16 windows in 20 s on a CPU of two cores."""
    found: dict[str, Any] = {
        "schema_version": 1,
        "engine": engine,
        "schedule": None,
        "ranks": ranks,
        "stages": 1,
        "replicas": 1,
        "seed": seed,
        "precision": "fp32",
        "device": "cpu",
        "processor": "a processor",
        "cores": 2,
        "model": {"layers": 2, "hidden": 32, "heads": 2, "vocabulary": 99, "parameters": 12345},
        "init": "random",
        "data": {
            "train_sha256": "aa",
            "dev_sha256": "bb",
            "train_questions": 80,
            "dev_questions": 40,
            "train_windows": 80,
            "dev_windows": 40,
        },
        "settings": {"global_batch": 16, "microbatches": 4, "learning_rate": 1e-3, "dropout": None},
        "updates": 10,
        "samples": 160,
        "losses": [3.0 - 0.1 * number for number in range(10)],
        "seconds": {"start": 1.0, "train": 20.0, "evaluate": 2.0, "end_to_end": 24.0},
        "samples_per_s": {"train": 8.0, "end_to_end": 6.5},
        "validation_loss": 2.5,
        "exact_match": 30.0,
        "f1": 40.0,
        "noise_scale": None,
        "peak_memory_bytes": [200 * 2**20] * ranks,
        "cpu_seconds": [15.0] * ranks,
        "device_utilisation": [0.75] * ranks,
        "device_utilisation_means": "process CPU time over wall time",
        "model_flops_per_s": 8e9,
        "bubble": None,
        "timeline": [],
    }
    return found | changes


def pipeline_timeline(stages: int, microbatches: int) -> list[dict[str, Any]]:
    """GPipe with forwards of 1 s and backwards of 2 s on stages that never wait for a message."""
    spans = []
    end_of_forwards = microbatches + stages - 1
    for stage in range(stages):
        for number in range(microbatches):
            place = {"rank": stage, "stage": stage, "microbatch": number}
            forward = float(stage + number)
            backward = float(end_of_forwards + 2 * (stages - 1 - stage + number))
            for kind, begin, seconds in (("F", forward, 1.0), ("B", backward, 2.0)):
                times = {"begin_s": begin, "end_s": begin + seconds}
                spans.append({**place, "kind": kind, **times})
    return spans


def write_record(directory: Path, found: dict[str, Any]) -> Path:
    """As a run leaves it; the run's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "squad_result.json").write_text(json.dumps(found), encoding="utf-8")
    return directory
