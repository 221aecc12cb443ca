"""The command `convert`, which converts another program's weights to a checkpoint."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.arguments import describe
from mlperf_bert.errors import one_line, typed

if TYPE_CHECKING:
    from bert_tools.huggingface.conversion import Conversion
    from bert_tools.huggingface.weights import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `convert` to its parser."""
    describe(
        parser,
        "Convert weights from Hugging Face or TensorFlow to a checkpoint that `train`, `pretrain` "
        "and `evaluate` read. The source is not changed.",
        "mlperf_bert convert my_bert --from huggingface --out first_weights",
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="directory, published model (OWNER/NAME), or TensorFlow checkpoint (DIR/model.ckpt-N)",
    )
    parser.add_argument(
        "--from",
        dest="format",
        choices=("tensorflow", "huggingface"),
        required=True,
        help="program that wrote the weights",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new directory for the checkpoint"
    )
    parser.add_argument(
        "--vocab",
        type=Path,
        metavar="FILE",
        help="vocab.txt or tokenizer.json of these weights (default: the file next to them)",
    )
    parser.add_argument(
        "--missing",
        choices=("refuse", "draw"),
        default="refuse",
        help="if SOURCE has no masked-LM head, stop with an error (refuse) or initialize the head "
        "at random (draw)",
    )


def run(args: argparse.Namespace) -> int:
    """Convert the weights, and print a summary. Returns the exit status."""
    from bert_tools.huggingface.conversion import plan_conversion, write_checkpoint

    source = _open(args.format, args.source)
    conversion = plan_conversion(source, args.vocab, args.missing)
    write_checkpoint(conversion, args.out, {"format": args.format, **source.origin})
    print("\n".join(map(one_line, _report(conversion, args.out))))
    return 0


def _open(source_format: str, path: Path) -> "Source":
    """Open weights in the given format. Raises CheckpointError if they cannot be used."""
    if source_format == "huggingface":
        from bert_tools.huggingface.hub import open_weights

        return open_weights(path)
    from bert_tools.convert.tensorflow import open_tensorflow_source

    return open_tensorflow_source(path)


def _report(conversion: "Conversion", out: Path) -> list[str]:
    """Return lines with what was converted, its sizes and its digest, and the next command."""
    from bert_tools.huggingface.conversion import STARTING
    from mlperf_bert.checkpoint.manifest import MODEL, read_manifest

    source, model = conversion.source, conversion.config.model
    taken = [source.weights[name] for name in conversion.shapes if name in source.weights]
    num_weights = sum(math.prod(weight.shape) for weight in taken)
    published = f", published as {source.published}" if source.published else ""
    train = ("train", "--data", "DATA", "--config", out / STARTING, "--init-checkpoint", out)
    return [
        f"converted {source.form}{published}: {len(taken)} tensors with {num_weights:,} weights, "
        f"without {len(conversion.ignored)} tensors that this model does not use",
        f"model: {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_heads} heads, feed-forward {model.intermediate_size}, "
        f"{model.max_position_embeddings} positions, {len(conversion.vocabulary):,} tokens, "
        f"objective {model.objective}",
        f"wrote {out} (sha256 of the weights: {read_manifest(out).files[MODEL].sha256})",
        f"to train from it: {typed(*train)}",
    ]
