"""Stands in for `mlperf_bert train`: a curve by formula, in a run directory like train's.

`fake_trainer.py MODE --config F --data DIR --run-dir DIR`. The best learning rate is 3e-3 for
AdamW and 2e-2 for LAMB; accuracy after evaluation k is min(1, quality * k / 10), so a quality of 1
reaches 0.5 at the fifth one. MODE: `quick`; `patient`: of quality 1 in the directories of trials
0 to 3, of quality 0.05 in others, where it waits for SIGTERM, after which trial 5 reaches the
target all the same; `stuck`: always waits; `diverges`: ends after the first evaluation; `fails`:
status 1; `mistaken`: status 2; `small`: status 2 for a batch of more than 16.
"""

import json
import math
import signal
import sys
import time
import tomllib
from pathlib import Path

INTERVAL = 32
PATIENCE_S = 250.0  # a test that needs so long is ended by pytest


def quality_of(config):
    best = 3e-3 if config["optim"]["name"] == "adamw" else 2e-2
    return math.exp(-abs(math.log(config["optim"]["learning_rate"] / best)))


def main(mode, options):
    config = tomllib.loads(Path(options["--config"]).read_text())
    root = Path(options["--run-dir"])
    print(f"{mode} in {root.name}")
    if mode == "fails":
        print("out of memory")
        return 1
    if mode == "mistaken" or (mode == "small" and config["parallel"]["local_batch_size"] > 16):
        problem = "no such data" if mode == "mistaken" else "batch too large"
        print(f"mlperf_bert: error: {problem}", flush=True)
        return 2
    run = root / "run_0"
    run.mkdir()
    stops = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    quality, target = quality_of(config), config["eval"]["target_accuracy"]
    if mode == "patient":
        quality = 1.0 if int(root.name[-5:]) < 4 else 0.05
    evaluations = config["run"]["max_steps"] * config["parallel"]["local_batch_size"] // INTERVAL
    accuracy, number, status = 0.0, 0, 3
    with (run / "metrics.jsonl").open("w") as file:
        for number in range(1, evaluations + 1):
            accuracy = min(1.0, quality * number / 10 + config["run"]["seed"] * 1e-6)
            record = {"step": 2 * number, "samples": INTERVAL * number, "loss": 1.0}
            record |= {"mlm_accuracy": accuracy, "skipped_steps": 0}
            file.write(json.dumps(record) + "\n")
            file.flush()
            waits = mode == "stuck" or (mode == "patient" and number == 3 and quality < 1)
            until = time.monotonic() + (PATIENCE_S if waits else 0)
            while not stops and time.monotonic() < until:
                time.sleep(0.01)
            if stops and mode == "patient" and root.name.endswith("5"):
                stops, quality = [], 2.0
                continue
            if mode == "diverges":
                break
            if stops or accuracy >= target:
                status = 75 if stops else 0
                break
    outcome = {"schema_version": 1, "status": "aborted" if status else "success"}
    outcome |= {"steps": 2 * number, "samples": INTERVAL * number, "seconds": 0.5 * number}
    outcome |= {"mlm_accuracy": accuracy, "stopped_by": "SIGTERM" if stops else None}
    (run / "outcome.json").write_text(json.dumps(outcome))
    return status


if __name__ == "__main__":
    words = sys.argv[2:]
    sys.exit(main(sys.argv[1], dict(zip(words[::2], words[1::2], strict=True))))
