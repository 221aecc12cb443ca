"""How much of the communication each clip policy hides under backward, over a throttled link.

    python measure_overlap.py --out DIR [--steps N]
    python measure_overlap.py --out DIR --table      # again from DIR/overlap.json, by anybody

Needs root, iproute2 and two cores. Two ranks, one thread each, train a small model in two network
namespaces whose link is as slow as backward is long. Writes DIR/overlap.{json,png} and prints the
table. The namespaces are gone afterwards, unless this is killed with SIGKILL.

A mode's exposed communication is the median time of its step less the median of the same step in
which all is computed and nothing sent. Every round has one step of each; `paired` is the median
over rounds of the difference within the round, with its quartiles.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import ConfigError, UserError
from overlap_link import ADDRESSES, INTERFACE, check_possible, linked_namespaces
from overlap_rank import (
    ALONE,
    BATCH_SIZE,
    FEWEST_ROUNDS,
    SEQUENCE_LENGTH,
    VOCABULARY,
    be_a_rank,
)
from overlap_timeline import draw, representative

MASTER_PORT = 29500  # in a namespace of its own: nobody else has it
BUCKET = "bucket_before_allreduce"
# What the bucket policy may expose at most, as a multiple of what another mode exposes.
BARS = {"none, no hook": 1.15, "none": 1.15, "whole_before_allreduce": 0.6}

Records = Mapping[str, Sequence[Mapping[str, Any]]]  # by mode; as overlap_modes.Record


@dataclass(frozen=True, slots=True)
class Exposure:
    """One mode over all rounds; see the module's docstring."""

    mode: str
    step_ms: float
    alone_ms: float
    exposed_ms: float
    paired_ms: float
    paired_quartiles_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Bar:
    """The bucket policy's exposed communication over another mode's, and how much is allowed."""

    over: str
    ratio: float
    paired_ratio: float
    at_most: float

    def in_words(self) -> str:
        """One line under the table."""
        verdict = "met" if self.ratio <= self.at_most else "MISSED"
        return (
            f"exposed: {BUCKET} / {self.over} = {self.ratio:.2f} (paired {self.paired_ratio:.2f}), "
            f"at most {self.at_most:g}: {verdict}"
        )


def step_times_ms(ranks: Sequence[Records]) -> dict[str, list[float]]:
    """Of every mode the times of its steps, each that of the slower rank."""
    return {
        mode: [
            1e3 * max(record["end"] - record["start"] for record in of_ranks)
            for of_ranks in zip(*(records[mode] for records in ranks), strict=True)
        ]
        for mode in ranks[0]
    }


def backward_ms(ranks: Sequence[Records]) -> float:
    """Median backward of the slower rank, until its last gradient is ready, with nothing sent."""
    mode = "none" + ALONE
    slower = [
        max(float(record["ready"][-1] - record["forward_end"]) for record in of_ranks)
        for of_ranks in zip(*(records[mode] for records in ranks), strict=True)
    ]
    return 1e3 * statistics.median(slower)


def exposures(times_ms: Mapping[str, Sequence[float]]) -> list[Exposure]:
    """Every mode that sends, beside the same mode alone."""
    found = []
    for mode in times_ms:
        if mode.endswith(ALONE):
            continue
        step, alone = times_ms[mode], times_ms[mode + ALONE]
        low, middle, high = statistics.quantiles(
            [one - other for one, other in zip(step, alone, strict=True)], n=4, method="inclusive"
        )
        medians = statistics.median(step), statistics.median(alone)
        found.append(Exposure(mode, *medians, medians[0] - medians[1], middle, (low, high)))
    return found


def bars(found: Sequence[Exposure]) -> list[Bar]:
    """How the bucket policy does against BARS."""
    by_mode = {each.mode: each for each in found}
    ours = by_mode[BUCKET]
    return [
        Bar(
            over,
            ours.exposed_ms / by_mode[over].exposed_ms,
            ours.paired_ms / by_mode[over].paired_ms,
            at_most,
        )
        for over, at_most in BARS.items()
    ]


def table(vocabulary: int, found: Sequence[Exposure]) -> str:
    """A case in Markdown; all numbers in ms but for the last, which has the bars' measure."""
    none = next(each for each in found if each.mode == "none")
    lines = [
        f"| vocabulary {vocabulary:,} | step ms | alone ms | exposed ms | paired ms (quartiles) "
        "| exposed / `none` |",
        "|---|---|---|---|---|---|",
    ]
    for each in found:
        low, high = each.paired_quartiles_ms
        lines.append(
            f"| {each.mode} | {each.step_ms:.0f} | {each.alone_ms:.0f} | {each.exposed_ms:.0f} "
            f"| {each.paired_ms:.0f} ({low:.0f} .. {high:.0f}) "
            f"| {each.exposed_ms / none.exposed_ms:.2f} |"
        )
    return "\n".join(lines)


def rank_environment(rank: int) -> dict[str, str]:
    """What torchrun would set for one rank on each of two nodes, and gloo's interface."""
    return {
        **{"RANK": str(rank), "GROUP_RANK": str(rank), "WORLD_SIZE": "2"},
        **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(MASTER_PORT)},
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # that an address has no name
    }


def run_ranks(num_rounds: int) -> list[dict[str, Any]]:
    """Start both ranks, wait for them, and return what each wrote. Raises ConfigError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = stack.enter_context(linked_namespaces())
        processes = []
        for rank, name in enumerate(names):
            options = ("--rank", rank, "--steps", num_rounds, "--out", folder)
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, *map(str, options)],
                env={**os.environ, **rank_environment(rank)},
                start_new_session=True,  # Ctrl-C is for us, who end them
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        wait_for_all(processes)
        return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when all ranks have ended well. Raises ConfigError as soon as one has not."""
    while any(status is None for status in [process.poll() for process in processes]):
        if any(process.returncode for process in processes):
            break
        time.sleep(0.2)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise ConfigError(
                f"rank {rank}", f"ended with status {process.returncode}", "see its lines above"
            )


def summarise(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON object of both ranks' answers, with every step's time in it."""
    cases = []
    for of_ranks in zip(*(rank["cases"] for rank in ranks), strict=True):
        times_ms = step_times_ms([case["records"] for case in of_ranks])
        found = exposures(times_ms)
        case = {
            "vocabulary": of_ranks[0]["vocabulary"],
            "num_buckets": len(of_ranks[0]["records"]["none"][0]["ready"]),
            "backward_ms": backward_ms([case["records"] for case in of_ranks]),
            "exposures": [asdict(each) for each in found],
            "times_ms": times_ms,
        }
        if case["vocabulary"] == VOCABULARY:
            case["bars"] = [asdict(bar) for bar in bars(found)]
            case["drawn_ms"] = representative([case["records"] for case in of_ranks], times_ms)
        cases.append(case)
    return {
        "schema_version": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "batch": BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "calibration": ranks[0]["calibration"],
        "cases": cases,
    }


def in_words(answer: Mapping[str, Any]) -> str:
    """The tables and the bars, and whether the link was as slow as backward was long."""
    link = answer["calibration"]
    lines = [
        f"link: {link['bits_per_s'] / 1e6:.0f} Mbit/s, all buckets in "
        f"{1e3 * link['all_reduce_s']:.0f} ms",
        "",
    ]
    for case in answer["cases"]:
        lines += [f"backward alone {case['backward_ms']:.0f} ms, {case['num_buckets']} buckets", ""]
        lines += [table(case["vocabulary"], [Exposure(**each) for each in case["exposures"]]), ""]
        lines += [Bar(**bar).in_words() for bar in case.get("bars", ())]
    return "\n".join(lines)


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for JSON and PNG")
    parser.add_argument("--steps", type=int, default=36, metavar="N", help="of each mode (36)")
    parser.add_argument("--table", action="store_true", help="draw and print what is in DIR")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < FEWEST_ROUNDS:
        parser.error(f"--steps: is {args.steps}; set it to {FEWEST_ROUNDS} at least")
    try:
        if args.rank is not None:
            sys.exit(be_a_rank(args.steps, args.out))
        if not args.table:
            check_possible()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
        if args.table:
            answer = json.loads((args.out / "overlap.json").read_bytes())
        else:
            make_directory(args.out)
            answer = summarise(run_ranks(args.steps))
            write_file(args.out / "overlap.json", json.dumps(answer).encode())
        write_file(args.out / "overlap.png", draw(answer["cases"][0]["drawn_ms"]))
    except UserError as error:
        print(f"measure_overlap: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    print(in_words(answer))


if __name__ == "__main__":
    main()
