"""The sub-command `evaluate`, which measures a checkpoint's accuracy on held-out data."""

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_bert.arguments import describe
from mlperf_bert.errors import ConfigError, one_line
from mlperf_bert.run.console import ProgressLines

if TYPE_CHECKING:
    import torch

    from mlperf_bert.config.run_config import RunConfig
    from mlperf_bert.data.index import LengthIndex
    from mlperf_bert.distributed.launch import RankInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `evaluate` to its parser."""
    describe(
        parser,
        "Measure the masked-word accuracy of a checkpoint on held-out data, and print it. The "
        "command reads the checkpoint and a prepared set, and writes no files. If a launcher "
        "starts several ranks, they share the work.",
        "mlperf_bert evaluate --checkpoint runs/two/run_0/checkpoints --data my_data",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint, or directory of checkpoints, of which the newest is used",
    )
    text = "prepared set, or directory that contains it as eval/"
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device on which every rank computes",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate a checkpoint, and return exit status 0.

    Rank 0 prints the result on stdout and the progress on stderr. If a launcher started several
    ranks, they share the evaluation set.
    """
    from mlperf_bert.checkpoint.load import load_weights
    from mlperf_bert.checkpoint.manifest import read_config, read_manifest, resolve
    from mlperf_bert.data.shards import SampleReader
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.session import in_session, on_every_rank
    from mlperf_bert.distributed.signal_watch import SignalWatch
    from mlperf_bert.evaluation.evaluate import Evaluator
    from mlperf_bert.model.bert import make_model
    from mlperf_bert.step.eager import weights_dtype

    config = read_config(args.checkpoint)
    # The attention policy does not change the result, and the one used in training may not run on
    # this machine.
    config = replace(config, model=replace(config.model, attention="auto"))
    held_out = args.data / "eval"
    eval_dir = held_out if held_out.is_dir() else args.data

    def run_rank(info: "RankInfo", device: "torch.device") -> int:
        index = on_every_rank(info, lambda: _open_set(eval_dir, config, args.checkpoint))
        reader = SampleReader(eval_dir, index.manifest)
        model = make_model(config, 0, device)
        digest = index.manifest.vocabulary_sha256
        state = on_every_rank(info, lambda: load_weights(model, args.checkpoint, digest))
        model.to(weights_dtype(config.model.precision))
        begun = time.monotonic()
        evaluator = Evaluator.of_run(config, index, reader, info, device)
        if info.rank == 0:
            evaluator.on_batch = partial(ProgressLines().counted, "evaluating", "batches")
        accuracy = evaluator(model)
        if info.rank == 0:
            result = {
                "schema_version": 2,
                "step": state.step,
                "samples": state.samples,
                "mlm_accuracy": accuracy.mlm_accuracy,
                "mask_only_accuracy": accuracy.mask_only_accuracy,
                "correct": accuracy.correct,
                "masked_tokens": accuracy.masked_tokens,
                "sequences": index.manifest.num_samples,
                "ranks": info.world_size,
                "seconds": round(time.monotonic() - begun, 3),
                "origin": dict(read_manifest(resolve(args.checkpoint)).origin) or None,
            }
            print(json.dumps(result) if args.json else _in_words(result))
        return 0

    with SignalWatch(None, speaks=read_rank_info().rank == 0):
        return in_session(run_rank, args.device, config.parallel.share_gpu)


def _open_set(eval_dir: Path, config: "RunConfig", checkpoint: Path) -> "LengthIndex":
    """Open the evaluation set, and return its index.

    A ConfigError blames the data and the checkpoint, because the user passed no config.
    """
    from mlperf_bert.data.set_checks import open_index

    try:
        return open_index(eval_dir, config)
    except ConfigError as error:
        name, problem, _ = error.args
        remedy = f"use data that was prepared for {checkpoint}"
        raise ConfigError("--data", f"{problem} ({name} of the checkpoint)", remedy) from None


def _in_words(result: dict[str, Any]) -> str:
    lines = [
        f"accuracy {result['mlm_accuracy']:.6f} ({result['correct']:,} of "
        f"{result['masked_tokens']:,} masked tokens), on [MASK] inputs "
        f"{result['mask_only_accuracy']:.6f}, after {result['samples']:,} samples"
    ]
    origin = result["origin"] or {}
    if "drawn" in origin:
        lines.append(
            f"note: the checkpoint's {one_line(origin['drawn'])} was drawn at random, not trained"
        )
    return "\n".join(lines)
