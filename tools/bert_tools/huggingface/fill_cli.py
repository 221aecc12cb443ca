"""The sub-command `fill`: a trained model's words for the [MASK] of a text."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.errors import ConfigError, say

if TYPE_CHECKING:
    import torch

    from mlperf_bert.distributed.launch import RankInfo

RUNS = Path("runs")
MOST = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fill`."""
    parser.add_argument("text", metavar="TEXT", help='such as "The [MASK] was trained on text."')
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help=f"default: the newest of {RUNS}/*/run_*/checkpoints",
    )
    parser.add_argument(
        "--vocab", type=Path, metavar="FILE", help="default: beside the checkpoint or above it"
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="words to show (5)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the most probable words, one a line. Raises ConfigError, CheckpointError, DataError."""
    from bert_tools.huggingface.fill import fill
    from mlperf_bert.checkpoint.load import load_weights
    from mlperf_bert.checkpoint.manifest import read_config, read_manifest, resolve
    from mlperf_bert.distributed.session import in_session
    from mlperf_bert.model.bert import make_model
    from mlperf_bert.step.eager import weights_dtype
    from mlperf_bert.vocabulary.any_vocabulary import vocabulary_of

    if not 1 <= args.top <= MOST:
        raise ConfigError("--top", f"is {args.top}", f"set it within 1 .. {MOST}")
    checkpoint = resolve(_newest_of_all_runs() if args.checkpoint is None else args.checkpoint)
    config = read_config(checkpoint)
    sha256 = read_manifest(checkpoint).vocabulary_sha256
    vocabulary = vocabulary_of(checkpoint, sha256, args.vocab)
    # The attention policy changes no result, and the one used in training may not run here.
    config = replace(config, model=replace(config.model, attention="auto"))

    def run_rank(_info: "RankInfo", device: "torch.device") -> int:
        model = make_model(config, 0, device)
        load_weights(model, checkpoint, vocabulary.sha256)
        model.to(weights_dtype(config.model.precision)).eval()
        filled = fill(model, vocabulary, args.text, args.top)
        if args.json:
            masks = [[asdict(candidate) for candidate in candidates] for candidates in filled]
            print(json.dumps({"schema_version": 1, "text": args.text, "masks": masks}))
            return 0
        for number, candidates in enumerate(filled):
            if len(filled) > 1:
                print(f"[MASK] {number + 1}")
            for candidate in candidates:
                print(f"{candidate.probability:.4f}  {candidate.token}")
        return 0

    return in_session(run_rank, args.device, config.parallel.share_gpu)


def _newest_of_all_runs() -> Path:
    found = list(RUNS.glob("*/run_*/checkpoints/LATEST"))
    if not found:
        problem = f"is not given, and no run in {RUNS}/ has one"
        raise ConfigError("--checkpoint", problem, "give the directory of a checkpoint")
    newest = max(found, key=lambda path: path.stat().st_mtime).parent
    say(f"the newest checkpoint: {newest}")
    return newest
