"""Time of a training step on this CPU in fp32, bf16_autocast and bf16, measured in turns.

    python logs/2026-11-29-todays-stack/speeds.py THREADS [SECTION.KEY=VALUE]...

The model is that of `bench.toml`, changed by the settings. The three runs take turns on the same
four batches. Printed are the mean over the batches of the median and of the shortest time.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace

import torch

from bert_tools.bench.cli import BASE
from bert_tools.bench.timing import InterleavedTimes
from bert_tools.bench.training_run import training_run
from mlperf_bert.config.files import load_config
from mlperf_bert.machine import bf16_instructions
from mlperf_bert.run.console import ProgressLines

PRECISIONS = ("fp32", "bf16_autocast", "bf16")
BATCHES, STEPS, SECONDS = 4, 24, 60.0


def main(threads: int, settings: list[str]) -> None:
    """Measure and print one line for each precision."""
    torch.set_num_threads(threads)
    base = load_config(BASE, ["run.seed=1", *settings])
    with ExitStack() as stack, ProgressLines().never_silent() as progress:
        runs = {}
        for precision in PRECISIONS:
            config = replace(base, model=replace(base.model, precision=precision))
            run = training_run(config, torch.device("cpu"), num_updates=BATCHES)
            runs[precision] = stack.enter_context(run)
        times = InterleavedTimes(runs, BATCHES)
        times.run_once(progress)
        times.measure(num_steps=STEPS, seconds=SECONDS, progress=progress)
        medians = {name: times.seconds_per_batch(name) for name in PRECISIONS}
        shortest = {
            name: sum(min(batch) for batch in times._seconds[name]) / BATCHES for name in PRECISIONS
        }
    print(f"torch {torch.__version__}, {threads} threads, {', '.join(bf16_instructions())}")
    print("settings:", *settings)
    for name in PRECISIONS:
        ratios = [each["fp32"] / each[name] for each in (medians, shortest)]
        print(
            f"{name:14} {1e3 * medians[name]:8.1f} ms  {ratios[0]:.2f}   "
            f"shortest {1e3 * shortest[name]:8.1f} ms  {ratios[1]:.2f}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
