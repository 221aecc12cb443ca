"""The training step of two versions of this program, in turns: how much faster is the second?

    python paired.py OLD NEW NAME [--sizes bert-2-512,...] [--rounds 9] [--out FILE]
    python paired.py table

OLD and NEW are checkouts. Each has a process of its own, which runs a step when it is its turn, so
that both see the same machine. A round is each of four batches by both. FILE (default: paired.jsonl
beside this file) gets a line for each size: milliseconds of each step, and the ratio with its 95 %
interval by Student's t on the logarithms of the rounds' ratios. NAME says what was changed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
BATCHES = 4
PACKAGES = ("benchmarks/bert/implementations/pytorch", "tools")


def work(size):
    """Run the steps whose numbers arrive on stdin, and print the seconds and the loss of each."""
    import torch

    from bert_tools.bench import cli
    from bert_tools.bench.training_run import training_run
    from bert_tools.bench.transformers import as_both_train
    from mlperf_bert.config.files import load_config
    from step_profile import settings_of

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    config = as_both_train(load_config(cli.BASE, settings_of(size)))
    config = replace(config, run=replace(config.run, device="cpu", seed=1, step_mode="eager"))
    with training_run(config, torch.device("cpu"), num_updates=BATCHES) as run:
        for line in sys.stdin:
            start = time.perf_counter()
            loss = run(int(line)).item()
            print(time.perf_counter() - start, loss, flush=True)


def peak_memory(process):
    """The most memory of a process, in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) // 1000


def measure(args, size):
    """The line of one size."""
    workers = []
    for tree in (args.old, args.new):
        path = os.pathsep.join(str((tree / each).resolve()) for each in PACKAGES)
        workers.append(
            subprocess.Popen(
                [sys.executable, __file__, "--work", size],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        )
    seconds = np.empty((2, args.rounds + 1, BATCHES))
    losses = np.empty_like(seconds)
    for number in range(seconds[0].size):
        for which in (0, 1) if number % 2 else (1, 0):
            process = workers[which]
            print(number, file=process.stdin, flush=True)
            found = process.stdout.readline().split()
            where = (which, *divmod(number, BATCHES))
            seconds[where], losses[where] = map(float, found)
    memory = [peak_memory(each) for each in workers]
    for each in workers:
        each.stdin.close()
        each.wait()
    of_rounds = seconds[:, 1:].sum(axis=2)  # the first round is not counted
    return {
        "change": args.name,
        "size": size,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "ms": [1e3 * float(np.median(each)) / BATCHES for each in of_rounds],
        "peak_mb": memory,
        "largest_loss_difference": float(np.abs(losses[0] - losses[1]).max()),
        **ratio(np.log(of_rounds[0] / of_rounds[1])),
    }


def ratio(logs):
    """Geometric mean and 95 % interval."""
    from scipy.stats import ttest_1samp

    low, high = np.exp(ttest_1samp(logs, 0).confidence_interval())
    return {"times_as_fast": float(np.exp(logs.mean())), "low": float(low), "high": float(high)}


def table():
    """Print the record."""
    print("| change | size | times as fast | peak memory, MB |")
    print("|---|---|---|---|")
    for line in map(json.loads, (HERE / "paired.jsonl").read_text().splitlines()):
        print(
            f"| {line['change']} | {line['size']} "
            f"| {line['times_as_fast']:.2f} ({line['low']:.2f} to {line['high']:.2f}) "
            f"| {line['peak_mb'][0]:,} to {line['peak_mb'][1]:,} |"
        )


def main():
    """Read the command line and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("name")
    parser.add_argument("--sizes", default="bert-2-512,bert-4-512,modern-2-512,modern-4-512")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=HERE / "paired.jsonl")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    for size in args.sizes.split(","):
        line = measure(args, size)
        with args.out.open("a") as file:
            print(json.dumps(line), file=file)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    elif sys.argv[1:] == ["table"]:
        table()
    else:
        main()
