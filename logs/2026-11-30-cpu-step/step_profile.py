"""Where the time of a training step on a CPU goes: one line of a file for each size and model.

    python step_profile.py measure FILE [SIZE ...]      for example profile.jsonl modern-2-512
    python step_profile.py table FILE

The model's blocks are marked by name. An operator of the backward pass belongs to the block of the
forward operator whose gradient it computes. The bounds are measured on the same machine: the rate
of the feed-forward layer's matrix products, and that of copying memory.
"""

import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bert_tools.bench.flops import measure_peak, model_flops
from bert_tools.bench.training_run import training_run
from bert_tools.bench.transformers import as_both_train
from mlperf_bert.config.files import load_config
from mlperf_bert.model import attention, choices
from mlperf_bert.model.blocks import Blocks
from mlperf_bert.optim.flat_optimizer import FlatOptimizer

HERE = Path(__file__).parent
BASE = Path(__file__).parents[2] / "tools/bert_tools/bench/bench.toml"
SIZES = ((2, 128, 16, 8), (4, 256, 16, 4), (12, 768, 4, 2))  # and batches at 512 and 2,048
LENGTHS = (512, 2048)
PARTS = ("products", "attention", "norms", "activations", "loss", "embeddings", "update", "rest")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
OF_BLOCK = {  # what is neither a product nor a norm
    "attend": "attention",
    "columns": "attention",
    "gated": "activations",
    "intermediate": "activations",
    "embed": "embeddings",
    "embed_words": "embeddings",
    "masked_lm_loss": "loss",
    "sum_norm": "norms",
    "residual_output": "norms",
    "add": "norms",
}
ALL = tuple(  # for example modern-2-512: architecture, layers, length
    f"{architecture}-{layers}-{length}"
    for architecture in ("bert", "modern")
    for layers, *_ in SIZES
    for length in LENGTHS
    if architecture == "modern" or length == 512  # BERT has 512 positions
)
STEPS = 4  # each of the four batches once


def settings_of(size):
    """Words of the config of one of ALL."""
    architecture, layers, length = size.split("-")
    hidden, *batches = next(rest for first, *rest in SIZES if first == int(layers))
    batch = dict(zip(LENGTHS, batches, strict=True))[int(length)]
    return settings(architecture, int(layers), hidden, batch, int(length))


def settings(architecture, layers, hidden, batch, length):
    """Words of the config, as `bench transformers` would be given them."""
    values = {
        "model.num_layers": layers,
        "model.hidden_size": hidden,
        "model.num_heads": hidden // 64,
        "model.intermediate_size": 4 * hidden,
        "model.max_position_embeddings": length,
        "data.max_seq_length": length,
        "parallel.local_batch_size": batch,
    }
    if architecture == "modern":
        values |= {
            "model.architecture": "modern",
            "model.objective": "mlm",
            "model.layer_norm_epsilon": 1e-5,
            "model.hidden_dropout": 0,
            "model.attention_dropout": 0,
            "model.intermediate_size": 3 * hidden // 2,
            "data.masking": "dynamic",
            "data.masking_rate": 0.3,
        }
    rate = 0.3 if architecture == "modern" else 0.15
    values["data.max_predictions"] = int(rate * length)
    return [f"{name}={value}" for name, value in values.items()]


def mark(owner, name, label=None):
    """Name the operators that this function runs."""
    function = getattr(owner, name)

    def marked(*arguments, **options):
        with record_function(f"block {label or name}"):
            return function(*arguments, **options)

    marked.__name__ = name
    setattr(owner, name, marked)


def part_of(event, blocks):
    """The part of an operator: by its own name, else by the innermost block that it belongs to."""
    if event.name in PRODUCTS:
        return "products"
    if "layer_norm" in event.name:
        return "norms"
    if "attention" in event.name:
        return "attention"
    if "embedding" in event.name:
        return "embeddings"
    while event is not None:
        if event.name.startswith("block "):
            return OF_BLOCK.get(event.name.removeprefix("block "), "rest")
        if event.name.startswith("autograd::engine"):
            return blocks.get(event.sequence_nr, "rest")
        event = event.cpu_parent
    return "rest"


def pass_of(event):
    """Forward, backward or update."""
    while event is not None:
        if event.name.startswith("autograd::engine"):
            return "backward"
        if event.name == "block update":
            return "update"
        event = event.cpu_parent
    return "forward"


def shares(events):
    """Milliseconds of a step by pass and part, from torch's events of STEPS steps."""
    blocks = {}
    for event in events:  # forward operators come before the backward ones of the same number
        number = event.sequence_nr
        if number >= 0 and pass_of(event) == "forward" and number not in blocks:
            blocks[number] = part_of(event, {})
    found = defaultdict(Counter)
    for event in events:
        which = pass_of(event)
        part = "update" if which == "update" else part_of(event, blocks)
        found[which][part] += event.self_cpu_time_total / 1e3 / STEPS
    return found


def attention_flops(event):
    """Operations of torch's fused attention, from the shapes of its inputs; else 0."""
    if "flash_attention_for_cpu" not in event.name or not event.name.startswith("aten::_scaled"):
        return 0
    backward = event.name.endswith("backward")
    query, key = (event.input_shapes[place] for place in ((1, 2) if backward else (0, 1)))
    products = 5 if backward else 2  # the backward pass computes the scores again
    return 2 * products * query[0] * query[1] * query[2] * key[2] * query[3]


def copy_rate():
    """GB/s of reading and writing, for arrays larger than the caches."""
    source = torch.ones(64 * 2**20)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * 4 * source.numel() / statistics.median(seconds) / 1e9


def measure_one(size):
    """The line of one size."""
    config = as_both_train(load_config(BASE, settings_of(size)))
    run = replace(config.run, device="cpu", seed=1, step_mode="eager")
    config = replace(config, run=run)
    with training_run(config, torch.device("cpu"), num_updates=4) as run:
        seconds = []
        for number in range(12):
            start = time.perf_counter()
            run(number).item()
            seconds.append(time.perf_counter() - start)
        for _ in range(2):  # the first recording allocates much itself
            with profile(
                activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True
            ) as recorded:
                for number in range(STEPS):
                    run(number).item()
        events = recorded.events()
        flops = [
            model_flops(config.model, each.lengths, each.masked_counts).total
            for (each,) in run.host_updates
        ]
        tokens = statistics.fmean(len(each.input_ids) for (each,) in run.host_updates)
        parameters = config.model.num_parameters
        masked = statistics.fmean(len(each.labels) for (each,) in run.host_updates)
    peak, _ = measure_peak(config.model, round(tokens), torch.device("cpu"), 1.0)
    step = statistics.fmean(statistics.median(seconds[number::4][1:]) for number in range(4))
    return {
        "size": size,
        "batch": config.parallel.local_batch_size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "step_ms": 1e3 * step,
        "mfu": statistics.fmean(flops) / step / 1e12 / peak,
        "peak_gflops": 1e3 * peak,
        "gflop": {
            "products": sum(each.flops or 0 for each in events if each.name in PRODUCTS)
            / 1e9
            / STEPS,
            "attention": sum(map(attention_flops, events)) / 1e9 / STEPS,
        },
        "copy_gb_per_s": copy_rate(),
        "update_bytes": 4 * 7 * parameters,
        "logit_bytes": 4 * masked * config.model.padded_vocab_size,
        "ms": {name: dict(parts) for name, parts in shares(events).items()},
    }


def mark_all():
    """Name the operators of each block, of attention and of the update."""
    for name in OF_BLOCK:
        if name != "attend":
            mark(Blocks, name)
    mark(attention, "grouped", "attend")
    choices.grouped = attention.grouped
    mark(FlatOptimizer, "step", "update")


def measure(path, sizes):
    """Measure these sizes."""
    mark_all()
    torch.set_num_threads(2)
    for size in sizes:
        line = measure_one(size)
        with path.open("a") as file:
            print(json.dumps(line), file=file)
        print(size, f"{line['step_ms']:.0f} ms, MFU {line['mfu']:.2f}", flush=True)


def table(path):
    """Print milliseconds of a step by part, of all passes, with the bounds that are known.

    The bound of the products is their operations at the speed of the feed-forward layer's. The loss
    beside its products has to read the logits twice and to write them once, at the rate of a copy.
    """
    print(f"| size | step, ms | {' | '.join(PARTS)} | products at peak | loss at copy's rate |")
    print("|---" * (len(PARTS) + 4) + "|")
    for line in map(json.loads, path.read_text().splitlines()):
        parts = sum((Counter(each) for each in line["ms"].values()), Counter())
        cells = " | ".join(f"{parts[part]:.1f}" for part in PARTS)
        of_products = 1e3 * line["gflop"]["products"] / line["peak_gflops"]
        of_loss = 3 * line["logit_bytes"] / line["copy_gb_per_s"] / 1e6
        print(
            f"| {line['size']} | {line['step_ms']:.0f} | {cells} | {of_products:.1f} | "
            f"{of_loss:.1f} |"
        )


if __name__ == "__main__":
    if sys.argv[1] == "table":
        table(Path(sys.argv[2]))
    else:
        measure(Path(sys.argv[2]), sys.argv[3:] or ALL)
