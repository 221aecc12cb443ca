"""Defines `train --rehearse`, which checks the start of one rank of a run without its cluster."""

import argparse
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bert_tools.plan.cluster.machine import accelerators
from bert_tools.plan.suggest import SYSTEMS
from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_config, add_init_checkpoint, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError
from mlperf_bert.files import is_there
from mlperf_bert.run.paths import RunPaths

if TYPE_CHECKING:
    from bert_tools.rehearse.rank import Built, Steps
    from mlperf_bert.distributed.launch import RankInfo

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train --rehearse` to its parser."""
    describe(
        parser,
        "Look on this machine for what would stop one rank of a run, without the other ranks and "
        "without a GPU. The command goes through the start of the run up to the first step, and "
        "prints what this rank would read, compute, keep in memory and write. It writes nothing. "
        "If something would go wrong, it prints one line and exits with status 2.",
        "mlperf_bert train --config dgxa100_128x8x4x1 --rehearse 511",
    )
    text = "number of the rank, from 0 to the number of ranks minus 1"
    parser.add_argument("--rehearse", type=int, required=True, metavar="RANK", help=text)
    add_config(parser)
    text = "prepared sets train/ and eval/ (default: plan steps from published lengths)"
    parser.add_argument("--data", type=Path, metavar="DIR", help=text)
    add_init_checkpoint(parser, "check the weights in this checkpoint")
    text = "check that this run directory is free and that its disk has room"
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Rehearse a rank, and return exit status 0. Raises UserError for what would go wrong."""
    began = time.perf_counter()
    config = load_config(args.config, args.set, args.init_checkpoint)
    for line in _rehearsed(args, config):
        print(line, flush=True)
    seconds = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    skipped = [
        name for name, given in (("data", args.data), ("run directory", args.run_dir)) if not given
    ]
    skipped += ["weights"] if _lacks_weights(config) else []
    left_out = ", ".join([*skipped, "network", "GPU"])
    print(
        f"found nothing that stops rank {args.rehearse}, in {seconds:.0f} s and {_gib(most)} "
        f"(not checked: {left_out})"
    )
    return 0


def _rehearsed(args: argparse.Namespace, config: RunConfig) -> Iterator[str]:
    """Go through the start of a rank in the order of a run, and describe each part in a line."""
    from bert_tools.rehearse.rank import (
        build,
        check_packages,
        check_weights,
        evaluation_in_words,
        imitated_ranks,
        plan_steps,
        rank_info,
    )

    info = rank_info(config, args.rehearse)
    parallel = config.parallel
    yield (
        f"{args.config.stem}: rank {info.rank} of {info.world_size:,}, number {info.local_rank} on "
        f"node {info.node_rank}, global batch {parallel.global_batch_size:,}"
    )
    check_packages(config)
    check_weights(config, args.data)
    yield _weights_in_words(config)

    steps = plan_steps(config, args.data, info)
    yield f"data: {_data_in_words(args.data, steps)}"
    yield f"sampler {config.data.sampler}, balance {config.data.balance}"
    yield from steps.in_words(info)
    if steps.shapes:
        capacities = ", ".join(f"{shape.tokens:,}" for shape in steps.shapes)
        yield f"capacities of captured steps: {capacities} tokens"
    if steps.data is not None:
        yield evaluation_in_words(config, steps.data, info)

    with imitated_ranks(info):
        built = build(config, info)
        yield (
            f"memory: weights {_gib(built.weight_bytes)}, gradients {_gib(built.gradient_bytes)}, "
            f"optimizer {config.optim.name} {_gib(built.optimizer_bytes)}"
        )
        yield f"gradients: {built.buckets_in_words}"
        yield _check_gpu_memory(args.config, config, steps, built)
        yield from _files(args.run_dir, config, info, built)


def _lacks_weights(config: RunConfig) -> bool:
    return config.mlperf.division == "closed" and not config.run.init_checkpoint


def _weights_in_words(config: RunConfig) -> str:
    if config.run.init_checkpoint:
        return f"weights: those in {config.run.init_checkpoint} fit this config"
    if _lacks_weights(config):
        return "weights: not checked; the closed division needs them, so pass --init-checkpoint"
    return "weights: drawn from the seed"


def _data_in_words(data_dir: Path | None, steps: "Steps") -> str:
    if steps.data is None:
        return "not checked; steps are planned from the published lengths of Wikipedia"
    train, held_out = steps.data.train.manifest, steps.data.held_out.manifest
    return (
        f"{data_dir} has {train.num_samples:,} training and {held_out.num_samples:,} held-out "
        f"examples; {steps.data.target_in_words}"
    )


def _check_gpu_memory(path: Path, config: RunConfig, steps: "Steps", built: "Built") -> str:
    """Compare the least memory that a step needs with that of the GPU in the config's name.

    Raises ConfigError if the GPU has less.
    """
    from bert_tools.rehearse.rank import least_activation_bytes

    activations = least_activation_bytes(config.model, steps.most_tokens)
    state = built.weight_bytes + built.gradient_bytes + built.optimizer_bytes
    needed = state + activations
    words = f"a step of {steps.most_tokens:,} tokens needs at least {_gib(needed)}"
    names = path.stem.split("_")
    gpu = next((gpu for gpu in accelerators() if SYSTEMS.get(gpu) in names), None)
    if config.run.device == "cpu":
        return f"{words}, without temporary memory"
    if gpu is None:
        return f"{words}; not compared with a GPU, because the name of the config contains none"
    there = accelerators()[gpu].memory_gib
    if needed > there * _GIB:
        problem = f"{words} of memory, but {gpu.upper()} has {there} GiB"
        remedy = "lower it, and raise parallel.grad_accum_steps to keep the global batch"
        raise ConfigError("parallel.local_batch_size", problem, remedy)
    return f"{words} of the {there} GiB of {gpu.upper()}"


def _files(
    run_dir: Path | None, config: RunConfig, info: "RankInfo", built: "Built"
) -> Iterator[str]:
    """Describe the files that a rank writes.

    If `run_dir` is given, raises ConfigError if a run cannot start there or its disk is too small.
    """
    paths = RunPaths(run_dir or Path("RUN_DIR"), 0)
    there = next(each for each in (paths.root, *paths.root.absolute().parents) if is_there(each))
    if run_dir is not None and not there.is_dir():
        raise ConfigError("--run-dir", f"{there} is not a directory", "use another directory")
    if run_dir is not None and paths.exists:
        remedy = "use a new directory, or resume the run with --resume auto"
        raise ConfigError("--run-dir", f"{run_dir} already has run 0", remedy)
    if info.rank == 0:
        own = "config.toml, environment.json, vocabulary, stdout.log, metrics.jsonl, outcome.json"
        yield f"files: {paths.mlperf_log}, and in {paths.run}: {own}"
    if config.checkpoint.interval_steps == "never":
        return
    parts = ["the weights and a manifest"] if info.rank == 0 else []
    shards = built.optimizer.num_shards
    if info.rank < shards:
        share = "" if shards == 1 else f" (1 of {shards} parts)"
        parts.append(f"the optimizer's state{share}")
    size = built.checkpoint_bytes
    written = f"this rank writes {' and '.join(parts) or 'nothing'}"
    yield f"checkpoints: {_gib(size)} each in {paths.checkpoints}, of which {written}"
    if run_dir is None:
        return
    most = 1 if config.checkpoint.interval_steps == 0 else config.checkpoint.keep_last + 1
    free, needed = shutil.disk_usage(there).free, most * size
    if free < needed:
        problem = f"checkpoints need up to {_gib(needed)}, but the disk of {there} has {_gib(free)}"
        raise ConfigError("--run-dir", problem, "free some space, or use another disk")


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"
