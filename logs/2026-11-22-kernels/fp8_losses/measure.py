"""Losses of a tiny BERT with fused FP8 blocks, before and after a change of their kernels.

python measure.py run NAME TREE --precision fp8 --seed 1 --steps 30      # JSON lines
python measure.py table losses.jsonl      # what they show, as Markdown

TREE is a checkout of the repository: a run takes the package and the tests' helpers from there. The
kernels run in Triton's interpreter. It rounds to FP8 wrongly, so there they write float32, which
torch rounds (`tests/unit/model/fp8_job.py`).
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

IMPLEMENTATION = "benchmarks/bert/implementations/pytorch"
SEEDS = (1, 2, 3)
LAST = 10  # updates whose losses are averaged
BATCHES, SEQUENCES, LENGTHS = 5, 6, (5, 21)
WORDS, MASK = 120, 127
FOLLOWS = 0.8  # how often a word is the one that always follows the word before
LEARNING_RATE = 4e-3
CASTS = {"cast": None, "cast_with_sums": 0}  # as in fp8_job.KERNELS
Losses = dict[int, list[float]]  # by seed


def run(args: argparse.Namespace) -> None:
    """Train once and print the loss of every update."""
    import torch

    tree = args.tree.resolve()
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(tree / IMPLEMENTATION), str(tree / "tests" / "unit" / "model")]
    torch.set_num_threads(1)
    bert = import_module("mlperf_bert.model.bert")
    assert Path(bert.__file__).is_relative_to(tree)
    calls: Counter[str] = Counter()
    if args.precision == "fp8":
        take_fused_blocks(bert, calls)
    for step, loss in enumerate(losses(bert, args), start=1):
        line = {"tree": args.name, "precision": args.precision, "seed": args.seed, "step": step}
        print(json.dumps({**line, "loss": round(loss, 6)}), flush=True)
    print(dict(calls), file=sys.stderr)


def take_fused_blocks(bert: Any, calls: Counter[str]) -> None:
    """Fused FP8 blocks on the CPU, whose FP8 torch rounds; Triton's casts, too."""
    job = import_module("fp8_job")
    blocks, fp8, casts = (
        import_module(f"mlperf_bert.model.{name}")
        for name in ("fused_fp8_blocks", "fp8", "triton_fp8")
    )
    places = job.KERNELS if isinstance(job.KERNELS, dict) else dict.fromkeys(job.KERNELS)

    def rounded(kernel: Callable[..., Any], name: str, place: int | None) -> Callable[..., Any]:
        # Before the change the helper found the FP8 matrices among the results by itself.
        where = (place,) if isinstance(job.KERNELS, dict) else ()
        by_torch = job.rounded_by_torch(kernel, *where)

        def counted(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return by_torch(*arguments, **options)

        return counted

    for name, place in places.items():
        setattr(blocks, name, rounded(getattr(blocks, name), name, place))
    for name, place in CASTS.items():
        if hasattr(fp8, name):
            setattr(fp8, name, rounded(getattr(casts, name), name, place))
    if hasattr(casts, "_larger_or_nan"):
        # The same of finite values; a reduction of our own the interpreter does one by one.
        casts._larger_or_nan = import_module("triton.language").standard._elementwise_max
    # The embedding's kernels are the same in both trees, and slow here.
    reference = import_module("mlperf_bert.model.blocks").ReferenceBlocks
    blocks.FusedFp8Blocks.embed = reference.embed
    patch_once()
    bert.choose_fp8_blocks = lambda config, device, scales: blocks.FusedFp8Blocks(scales)


def patch_once() -> None:
    """Let the interpreter replace Triton's language once a kernel, not for each function in it."""
    interpreter = import_module("triton.runtime.interpreter")
    own, modules = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched: set[tuple[bool, ...]] = set()  # which modules functions see that had their turn

    class Scope:
        def __init__(self, scope: Any) -> None:
            self.scope = scope

        def restore(self) -> None:
            self.scope.restore()
            patched.clear()

    def patch(function: Any) -> Scope | None:
        seen = function.__globals__.values()
        key = tuple(any(each is module for each in seen) for module in modules)
        if key in patched:
            return None  # nobody restores what a function called by a kernel replaced
        patched.add(key)
        return Scope(own(function))

    interpreter._patch_lang = patch


def losses(bert: Any, args: argparse.Namespace) -> Iterator[float]:
    """Of each update by AdamW, with float32 masters of the weights in bfloat16."""
    import torch

    is_old = (Path(bert.__file__).parents[1] / "config.py").exists()  # a tree before 2026-11-23
    sections, heads = (
        import_module(f"mlperf_bert.{name}")
        for name in ("config_sections" if is_old else "config.sections", "model.heads")
    )
    config = sections.ModelSection(
        vocab_size=128,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        initializer_range=0.05,
        attention="grouped",
        precision=args.precision,
    )
    model = bert.BertForPretraining(config, torch.device("cpu"), seed=args.seed)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    model.bfloat16().train()
    model.dropout_seed = args.seed
    optimizer = torch.optim.AdamW(masters, LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for number in range(1, args.steps + 1):
        model.step.fill_(number)
        model.zero_grad()
        batch = make_batch(number)
        loss = heads.pretraining_loss(model(batch, "loss_sums"), batch)
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        yield loss.item()


def make_batch(number: int) -> Any:
    """The same for every seed: sentences in which a word mostly tells the next one."""
    import numpy as np
    import torch

    batches = import_module("mlperf_bert.data.batch")
    following = np.random.default_rng(0).permutation(WORDS)
    frequency = 1.0 / np.arange(1, WORDS + 1)
    generator = np.random.default_rng((1, number % BATCHES))
    lengths = generator.integers(*LENGTHS, SEQUENCES)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    total = int(starts[-1])
    words = generator.choice(WORDS, total, p=frequency / frequency.sum())
    positions = np.arange(total) - np.repeat(starts[:-1], lengths)
    for at in range(1, total):
        if positions[at] and generator.random() < FOLLOWS:
            words[at] = following[words[at - 1]]
    chosen = [
        np.sort(start + generator.choice(length, max(1, round(0.15 * length)), replace=False))
        for start, length in zip(starts, lengths, strict=False)
    ]
    masked = np.concatenate(chosen)
    labels = words[masked]
    words[masked] = MASK
    second = positions >= np.repeat(lengths // 2, lengths)
    return batches.UnpaddedBatch(
        input_ids=torch.from_numpy(words),
        position_ids=torch.from_numpy(positions),
        token_type_ids=torch.from_numpy(second * 1),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        lengths=tuple(map(int, lengths)),
        masked_counts=tuple(map(len, chosen)),
        sample_ids=torch.arange(SEQUENCES) + number * SEQUENCES,
        masked_token_index=torch.from_numpy(masked),
        labels=torch.from_numpy(labels),
        next_sentence_label=torch.from_numpy((lengths > np.median(lengths)) * 1),
        mlm_denominator=torch.tensor(float(len(masked))),
        nsp_denominator=torch.tensor(float(SEQUENCES)),
    )


def table(args: argparse.Namespace) -> None:
    """Differences of the same seed beside the spread over seeds."""
    found: dict[tuple[str, str], Losses] = {}
    for text in args.losses.read_text().splitlines():
        line = json.loads(text)
        of_seeds = found.setdefault((line["tree"], line["precision"]), {})
        of_seeds.setdefault(line["seed"], []).append(line["loss"])
    steps = min(len(each) for of_seeds in found.values() for each in of_seeds.values())
    for of_seeds in found.values():
        of_seeds.update({seed: each[:steps] for seed, each in of_seeds.items()})
    print(f"Of the first {steps} updates:\n")
    print("| | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | spread |")
    print("|---" * (len(SEEDS) + 2) + "|")
    for (tree, precision), of_seeds in found.items():
        for name, chosen in (("first", slice(0, 1)), (f"mean of last {LAST}", slice(-LAST, None))):
            means = [fmean(of_seeds[seed][chosen]) for seed in SEEDS]
            cells = [f"{each:.4f}" for each in (*means, max(means) - min(means))]
            print(f"| {tree}, {precision}: {name} | " + " | ".join(cells) + " |")
    before = found["before", "fp8"]
    for key, of_seeds in found.items():
        if key != ("before", "fp8"):
            print(f"\n{' '.join(key)} less before fp8: {compared(of_seeds, before)}")


def compared(some: Losses, before: Losses) -> str:
    """The largest differences, of means and update by update, beside the spread before."""
    steps = range(len(before[SEEDS[0]]))
    means = [abs(fmean(some[seed][-LAST:]) - fmean(before[seed][-LAST:])) for seed in SEEDS]
    differences = {
        (seed, step): abs(some[seed][step] - before[seed][step])
        for seed, step in product(SEEDS, steps)
    }
    spreads = [
        max(before[seed][step] for seed in SEEDS) - min(before[seed][step] for seed in SEEDS)
        for step in steps
    ]
    worst = [max(differences[seed, step] for seed in SEEDS) for step in steps]
    inside = sum(one <= other for one, other in zip(worst, spreads, strict=True))
    return (
        f"mean of last {LAST}, largest of the seeds {max(means):.4f}; one update, largest "
        f"{max(worst):.4f}, mean {fmean(differences.values()):.4f}, the spread over seeds before "
        f"{min(spreads):.4f} to {max(spreads):.4f}, mean {fmean(spreads):.4f}; within it in "
        f"{inside} of {len(spreads)} updates"
    )


def main() -> None:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("run", help="train once")
    training.add_argument("name", help="of the tree, in the output")
    training.add_argument("tree", type=Path, help="a checkout of the repository")
    training.add_argument("--precision", default="fp8", choices=("fp8", "bf16"))
    training.add_argument("--seed", type=int, required=True)
    training.add_argument("--steps", type=int, default=30)
    summary = commands.add_parser("table", help="what the losses show")
    summary.add_argument("losses", type=Path, help="JSON lines of all runs")
    args = parser.parse_args()
    run(args) if args.command == "run" else table(args)


if __name__ == "__main__":
    main()
