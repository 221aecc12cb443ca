"""Our training step beside the two fastest ways to train with `transformers`, in turns.

    python against.py measure [--sizes bert-2-512,...] [--rounds 9] [--records FILE]
    python against.py table | ratios [--records FILE]

This is `mlperf_bert bench transformers` without its slower baselines, and with enough rounds for an
interval. A round is each of four batches by each contender. FILE (default: against.jsonl beside
this file) gets a line for each size. What it has is not measured again.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bert_tools.bench import baseline, cli, transformers
from bert_tools.bench.flops import measure_peak, model_flops
from bert_tools.bench.timing import InterleavedTimes
from mlperf_bert.config.files import load_config
from mlperf_bert.run.console import ProgressLines
from paired import ratio
from step_profile import ALL, SIZES, settings_of

CONTENDERS = ("sorted", "sorted_compiled")
NAMES = {"bert": "BERT", "modern": "ModernBERT"}
HIDDEN = {layers: hidden for layers, hidden, *_ in SIZES}
GOALS = {
    ("bert", 512): {2: 2.1, 4: 1.8, 12: 1.15},
    ("modern", 512): {2: 1.5, 4: 1.3, 12: 1.05},
    ("modern", 2048): {2: 1.3, 4: 1.3, 12: 1.3},
}


class AllTimes(InterleavedTimes):
    """Times whose rounds can be read."""

    last = None

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        AllTimes.last = self

    def rounds(self, name):
        """Seconds of each round, over all batches."""
        return np.array([sum(visits) for visits in zip(*self._seconds[name], strict=True)])


def measure_one(size, rounds):
    """The line of one size."""
    config = load_config(cli.BASE, settings_of(size))
    config = replace(config, run=replace(config.run, device="cpu", seed=1, step_mode="eager"))
    device = torch.device("cpu")
    with ProgressLines().never_silent() as progress:
        found = transformers.measure(
            config,
            device,
            progress,
            steps=rounds * transformers.NUM_BATCHES,
            seconds=1e6,
            compile=True,
            by_layer=False,
        )
        times = {name: AllTimes.last.rounds(name) for name in AllTimes.last.names}
        updates, _ = transformers.mixed_and_sorted(transformers.as_both_train(config), 4)
        tokens = statistics.fmean(len(batch.input_ids) for (batch,) in updates)
        progress.line("measuring matrix products")
        peak, _ = measure_peak(config.model, round(tokens), device, 3.0)
    flops = sum(
        model_flops(config.model, each.lengths, each.masked_counts).total for (each,) in updates
    )
    return {
        "size": size,
        "batch": config.parallel.local_batch_size,
        "rounds": rounds,
        **{name: found[name] for name in ("threads", "torch", "transformers", "loss_difference")},
        "seconds": {name: each.tolist() for name, each in times.items()},
        "peak_gflops": 1e3 * peak,
        "mfu": {name: flops / float(np.median(each)) / 1e12 / peak for name, each in times.items()},
        "ratios": {
            name: ratio(np.log(each / times["ours"]))
            for name, each in times.items()
            if name != "ours"
        },
    }


def lines(path):
    """The records by size."""
    if not path.exists():
        return {}
    return {each["size"]: each for each in map(json.loads, path.read_text().splitlines())}


def strongest(line):
    """The contender that leaves us the smallest lead, and the lead with its interval."""
    name = min(line["ratios"], key=lambda each: line["ratios"][each]["times_as_fast"])
    return name, in_words(line["ratios"][name])


def in_words(found):
    """A ratio with its interval."""
    return f"{found['times_as_fast']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def table(found):
    """Print the ratios, and how much of the machine's products each step uses."""
    print(
        "| model | batch | matrix products, GFLOP/s | ours: sequences/s, MFU "
        "| sorted by length | sorted by length, torch.compile | goal |"
    )
    print("|---" * 7 + "|")
    for size in [each for each in ALL if each in found]:
        line, (architecture, layers, length) = found[size], size.split("-")
        rate = line["batch"] * transformers.NUM_BATCHES / np.median(line["seconds"]["ours"])
        best, _ = strongest(line)
        cells = []
        for name, ratios in line["ratios"].items():
            words = in_words(ratios)
            words = words.replace(words[:4], f"**{words[:4]}**", 1) if name == best else words
            cells.append(f"{words}, {line['mfu'][name]:.2f}")
        wanted = GOALS[architecture, int(length)][int(layers)]
        print(
            f"| {NAMES[architecture]} {layers} x {HIDDEN[int(layers)]} "
            f"| {line['batch']} of {int(length):,} | {line['peak_gflops']:.0f} "
            f"| {rate:.2f}, {line['mfu']['ours']:.2f} | {' | '.join(cells)} | {wanted} |"
        )


def ratios(found):
    """Print only the lead over the strongest, a column for each size."""
    print(f"| layers x hidden | {' | '.join(f'{n} x {HIDDEN[n]}' for n in HIDDEN)} |")
    print("|---" * (1 + len(HIDDEN)) + "|")
    for architecture, length in GOALS:
        sizes = [f"{architecture}-{layers}-{length}" for layers in HIDDEN]
        cells = [strongest(found[each])[1] if each in found else "" for each in sizes]
        print(f"| {NAMES[architecture]}, up to {length:,} tokens | {' | '.join(cells)} |")


def main():
    """Read the command line, and measure or print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("measure", "table", "ratios"))
    parser.add_argument("--sizes", default=",".join(ALL))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--records", type=Path, default=Path(__file__).with_name("against.jsonl"))
    args = parser.parse_args()
    if args.command != "measure":
        {"table": table, "ratios": ratios}[args.command](lines(args.records))
        return
    for module in (baseline, transformers):
        module.BASELINES = CONTENDERS
    transformers.InterleavedTimes = AllTimes
    torch.set_num_threads(2)
    for size in args.sizes.split(","):
        if size not in lines(args.records):
            line = measure_one(size, args.rounds)
            with args.records.open("a") as file:
                print(json.dumps(line), file=file)
            print(size, line["ratios"], line["mfu"], flush=True)


if __name__ == "__main__":
    main()
