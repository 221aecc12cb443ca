"""The measurement `bench against`: its arguments and what they call; torch waits until it runs."""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any, get_args

from bert_tools.bench.options import HEAD_SIZE, add_attention, add_numbers, model_of
from mlperf_bert.config.sections import Precision, StepMode

_ROWS = (  # name of what is timed, ours over that, in words
    ("ours", None, "our step"),
    ("padded", "ratio_padded", "transformers, padded to the maximum"),
    ("padded_to_longest", "ratio_padded_to_longest", "transformers, padded to the longest"),
    ("ours_encoder", None, "our encoder alone"),
    ("padded_encoder", "ratio_encoder", "transformers' encoder alone, padded"),
    ("padded_compiled", "ratio_padded_compiled", "transformers, padded and compiled"),
    ("padded_flash", "ratio_padded_flash", "transformers, padded, fused attention"),
    ("unpadded_peer", "ratio_unpadded_peer", "transformers without padding"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench against`."""
    add_numbers(
        parser,
        (
            ("layers", None, "layers of the encoder"),
            ("hidden", None, "channels of a token"),
            ("heads", None, f"attention heads (default: hidden / {HEAD_SIZE})"),
            ("batch", 16, "sequences a step"),
            ("vocab", 30522, "words"),
            ("max-length", 512, "tokens of a sequence at most"),
            ("threads", 2, "CPU threads of both sides"),
            ("steps", 12, "measured steps of each side at most"),
            ("seed", 1, "of weights, samples and dropout"),
        ),
        required=("layers", "hidden"),
    )
    add_attention(parser, default="auto")
    parser.add_argument(
        "--precision",
        choices=get_args(Precision),
        default="fp32",
        help="ours; the other side's is autocast in bf16 for bf16 and below (default fp32)",
    )
    parser.add_argument(
        "--step-mode",
        choices=get_args(StepMode),
        help="ours (default: captured on CUDA, eager elsewhere)",
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="the other side through torch.compile as well (default: on CUDA)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="begin no step after this, once every batch was measured (default 300)",
    )
    parser.add_argument(
        "--dropout", type=float, default=0.1, metavar="P", help="of both sides (default 0.1)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(measure=_measure)


def _measure(args: argparse.Namespace) -> int:
    model = replace(model_of(args), precision=args.precision)  # mistakes show before torch is here
    from bert_tools.bench.against import Settings, compare
    from mlperf_bert.distributed.binding import choose_device
    from mlperf_bert.distributed.launch import read_rank_info

    device = choose_device(args.device, read_rank_info())
    is_cuda = device.type == "cuda"
    settings = Settings(
        model=model,
        batch_size=args.batch,
        threads=args.threads,
        steps=args.steps,
        seconds=args.seconds,
        seed=args.seed,
        step_mode=args.step_mode or ("captured" if is_cuda else "eager"),
        with_compile=is_cuda if args.compile is None else args.compile,
    )
    result = compare(settings, device, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result) if args.json else _in_words(result))
    return 0


def _in_words(result: dict[str, Any]) -> str:
    lines = [
        f"{result['layers']} layers, hidden {result['hidden']}, {result['heads']} heads, "
        f"{result['vocabulary']} words, batch {result['batch']}, {result['precision']} on "
        f"{result['device']}, {result['threads']} threads",
        f"mean length {result['mean_length']:.1f} of at most {result['max_length']}, "
        f"{result['distinct_batches']} batches, {result['steps']} steps of each, dropout "
        f"{result['dropout']}, {result['optimizer']}",
        "a step is forward, backward and update, its batch ready; an encoder's is forward and "
        "backward",
        f"attention: ours {result['ours_attention']}, transformers' {result['padded_attention']}; "
        f"our step is {result['ours_step_mode']}",
    ]
    for name, ratio, text in _ROWS:
        rate = result[f"{name}_samples_per_s"]
        if rate is None:
            continue
        times = ""
        if ratio and result[ratio] is not None:
            low, middle, high = result[f"{ratio}_range"]
            times = f"  ours is {result[ratio]:.2f} times that"
            times += f" (single steps {low:.1f} .. {middle:.1f} .. {high:.1f})"
        lines.append(f"{text:36} {rate:9.2f} samples/s{times}")
    lines += [
        f"{text}: not measured ({result[f'{name}_reason']})"
        for name, _, text in _ROWS
        if result[f"{name}_samples_per_s"] is None
    ]
    return "\n".join(lines)
