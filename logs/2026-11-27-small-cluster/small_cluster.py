"""A cluster of 2, 4 and 8 ranks on this machine: what each technique buys, measured and predicted.

    python small_cluster.py [--rounds N] [--only NAME]   # what records.jsonl lacks; as root
    python small_cluster.py --table NAME                 # Markdown, from records.jsonl
    python small_cluster.py --picture FILE.png

Hosts are network namespaces on one switch, with ports of a set bandwidth. The ranks run the
program's own batches, balance, clipping, transfers, shards and update. In most groups forward and
backward are sleeps in proportion to a rank's tokens (sleeping.py), so that two cores serve eight
ranks. Every round has a block of steps of each arm. A step's time is that from the slowest rank's
end of the step before. Predictions are `plan cluster`'s (predict.py), its constants from a
calibration before the first round; no measured step is used for them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bert_tools.bench.synthetic import as_examples, set_settings, synthetic_samples, write_set
from bert_tools.common.figures import new_figure, png
from hosts import ADDRESSES, INTERFACE, check_possible, linked_hosts
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import ConfigError, UserError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import MAX_PREDICTIONS
from mlperf_bert.data.length_histogram import real_lengths
from phases import BASE, STEPS, TYPICAL_TOKENS
from predict import COLLECTIVES, predicted

HERE = Path(__file__).parent
RECORDS = HERE / "records.jsonl"
ROUNDS, SEED = 6, 3
MASTER_PORT = 29500  # in a namespace of its own: nobody else has it
SAMPLES, LONGEST, VOCABULARY = 4096, 512, 2048
STEP_MS = 600.0  # of a mean rank's forward and backward, where they are sleeps
# All-reduce of all gradients over backward. In the paper's run of 1,024 GPUs it is about a third.
NETWORKS = {"fast": 0.1, "paper": 0.3, "slow": 1.0}
HOSTS = {2: 2, 4: 2, 8: 4}  # by ranks

WHOLE, BUCKET, AFTER = "whole_before_allreduce", "bucket_before_allreduce", "after_allreduce"
EVEN = {"data.sampler": "quantile", "data.balance": "presort_global"}
ARMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "lengths: strata, presort_local": {
        "set": {"data.sampler": "strata_6_3_2_5", "data.balance": "presort_local"}
    },
    "lengths: presort_global": {"set": {"data.balance": "presort_global"}},
    "lengths: quantile, presort_global": {"set": EVEN},
    "lengths: exchange_global, in the step": {
        "set": {"data.balance": "exchange_global"},
        "in_step": True,
    },
    "lengths: exchange_global, readers ahead": {"set": {"data.balance": "exchange_global"}},
    "clip: each bucket, overlapped": {"set": {"clip.policy": BUCKET}},
    "clip: after, overlapped": {"set": {"clip.policy": AFTER}},
    "clip: after, one bucket": {"set": {"clip.policy": AFTER, "parallel.bucket_cap_mb": 1000}},
    "shards: node": {"set": {"parallel.data_parallel": "shard_node"}},
    "shards: world": {"set": {"parallel.data_parallel": "shard_world"}},
    "all: even, each bucket, shards: node": {
        "set": EVEN | {"clip.policy": BUCKET, "parallel.data_parallel": "shard_node"}
    },
    "all but shards": {"set": EVEN | {"clip.policy": BUCKET}},
}
ONE_RANK_A_HOST = [name for name in ARMS if "node" not in name]  # of two hosts: nothing to share
REAL = ("nothing", "lengths: quantile, presort_global", *[n for n in ARMS if n.startswith("clip")])
CAPS_MB = (0.02, 0.1, 0.3, 0.8, 2.3, 100)  # 1 to 200 MiB of BERT-large's are 0.01 to 2.3 here
FIRST_MB = 0.02
COLOURS = ("#7fb3d8", "#2f7d4f", "#d9722e")


def bucket_arms() -> dict[str, dict[str, Any]]:
    """Arms of the sweep over bucket sizes: even lengths, two policies."""
    arms = {}
    for policy in (BUCKET, AFTER):
        for cap in CAPS_MB:
            asked = EVEN | {"clip.policy": policy, "parallel.bucket_cap_mb": cap}
            arms[f"{policy}, {cap:g}"] = {"set": asked}
        asked = EVEN | {"clip.policy": policy, "parallel.bucket_cap_mb": 0.8}
        arms[f"{policy}, 0.8, first {FIRST_MB:g}"] = {"set": asked, "first_mb": FIRST_MB}
    return arms


def groups() -> Iterator[dict[str, Any]]:
    """All measurements: those of one network are made together, in turns."""
    for ranks in HOSTS:
        names = ONE_RANK_A_HOST if ranks == 2 else ARMS
        yield _group(f"techniques, {ranks}", ranks, "paper", {name: ARMS[name] for name in names})
    yield _group("techniques, 4, slow", 4, "slow", ARMS)
    for network in NETWORKS:
        yield _group(f"buckets, {network}", 4, network, bucket_arms())
    arms = {name: ARMS[name] for name in REAL}
    yield _group("real, 2", 2, "slow", arms) | {"compute": "real"}


def _group(name: str, ranks: int, network: str, arms: Mapping[str, Any]) -> dict[str, Any]:
    model = load_config(BASE, []).model
    sent = 2 * (ranks - 1) / ranks * 4 * model.num_parameters  # of each rank, around the ring
    return {
        "name": name,
        "ranks": ranks,
        "nodes": HOSTS[ranks],
        "network": network,
        "bits_per_s": round(8e3 * sent / (NETWORKS[network] * STEP_MS * 2 / 3)),
        "compute": "sleep",
        "ms_per_token": STEP_MS / (TYPICAL_TOKENS * 16),
        "arms": dict(arms),
    }


def make_set(directory: Path) -> None:
    """A set of Wikipedia's lengths, with words of the small vocabulary."""
    samples = synthetic_samples(
        np.maximum(real_lengths(SAMPLES, LONGEST, SEED), 8),
        vocab_size=VOCABULARY,
        max_predictions=MAX_PREDICTIONS,
        seed=SEED,
    )
    settings = set_settings(LONGEST, MAX_PREDICTIONS, SEED)
    write_set(directory, [as_examples(samples)], settings, VOCABULARY)


def measure(group: dict[str, Any], data: Path, rounds: int) -> dict[str, Any]:
    """The record of a group: its calibration, and times and tokens of every timed step."""
    nodes = group["nodes"]
    job = {key: group[key] for key in ("name", "compute", "ms_per_token", "arms")} | {
        "data": str(data),
        "rounds": rounds,
        "parallel.nodes": nodes,
        "parallel.ranks_per_node": group["ranks"] // nodes,
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "job.json").write_text(json.dumps(job))
        hosts = stack.enter_context(linked_hosts(nodes, group["bits_per_s"]))
        processes, words = [], (HERE / "cluster_rank.py", folder / "job.json")
        for rank in range(group["ranks"]):
            node = rank * nodes // group["ranks"]
            process = subprocess.Popen(
                ["ip", "netns", "exec", hosts[node], sys.executable, *words],
                env={**os.environ, **rank_environment(rank, group["ranks"], nodes)},
                start_new_session=True,  # Ctrl-C is for us, who end them
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        wait_for_all(processes)
        answers = [
            json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(len(processes))
        ]
    return group | merged(answers)


def rank_environment(rank: int, ranks: int, nodes: int) -> dict[str, str]:
    """What torchrun would set, and gloo's interface."""
    in_node = ranks // nodes
    return {
        **{"RANK": str(rank), "GROUP_RANK": str(rank // in_node), "WORLD_SIZE": str(ranks)},
        **{"LOCAL_RANK": str(rank % in_node), "LOCAL_WORLD_SIZE": str(in_node)},
        **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(MASTER_PORT)},
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # that an address has no name
    }


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


def merged(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ranks' answers as one: steps end with the slowest rank; ms to a hundredth."""
    calibration = {name: answers[0][name] for name in COLLECTIVES}
    alone = []
    for block in zip(*(answer["alone"] for answer in answers), strict=True):
        update_ms = 1e3 * (_latest(block, "end") - _latest(block, "reduced"))[1:]
        each = zip(block[0][1:], _step_ms(block), update_ms, strict=True)
        alone += [
            {"tokens": max(step["tokens"]), "step": whole, "update": round(float(update), 2)}
            for step, whole, update in each
        ]
    blocks = {}
    for name in answers[0]["blocks"]:
        of_ranks = [answer["blocks"][name] for answer in answers]
        blocks[name] = {
            "tokens": [[step["tokens"] for step in block[1:]] for block in of_ranks[0]],
            "step_ms": [_step_ms(block) for block in zip(*of_ranks, strict=True)],
            "exposed_ms": [_exposed_ms(block) for block in zip(*of_ranks, strict=True)],
            "processor_ms": [_processor_ms(block) for block in zip(*of_ranks, strict=True)],
            "received": _received(of_ranks[0]),
        }
    return {
        "calibration": calibration | {"alone": alone},
        "buckets": answers[0]["buckets"],
        "blocks": blocks,
    }


def _latest(of_ranks: Sequence[Sequence[Mapping[str, float]]], what: str) -> Any:
    return np.array([[step[what] for step in steps] for steps in of_ranks]).max(axis=0)


def _step_ms(of_ranks: Sequence[Sequence[Mapping[str, float]]]) -> list[float]:
    times: list[float] = np.diff(1e3 * _latest(of_ranks, "end")).round(2).tolist()
    return times


def _processor_ms(of_ranks: Sequence[Sequence[Mapping[str, float]]]) -> float:
    """Processor time of all ranks a timed step."""
    spent = sum(steps[-1]["processor"] - steps[0]["processor"] for steps in of_ranks)
    return round(1e3 * spent / STEPS, 2)


def _received(blocks: Sequence[Sequence[Mapping[str, float]]]) -> float:
    """Bytes that a rank received a step, of exchanges in the step."""
    return round(
        float(np.mean([b["received"] - a["received"] for s in blocks for a, b in pairwise(s)]))
    )


def _exposed_ms(of_ranks: Sequence[Sequence[Mapping[str, float]]]) -> list[float]:
    """From the slowest rank's end of backward until all gradients are ready for the update."""
    exposed = _latest(of_ranks, "reduced") - _latest(of_ranks, "backward_end")
    times: list[float] = (1e3 * exposed[1:]).round(2).tolist()
    return times


def read_records() -> dict[str, Any]:
    """All records by name, the model put back in place of what is the same for all."""
    if not RECORDS.exists():
        return {}
    model = load_config(BASE, []).model
    lines = RECORDS.read_text("utf-8").splitlines()
    return {each["name"]: each | {"model": model} for each in map(json.loads, lines)}


def compared(record: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Measured and predicted ms of an arm's step and of its exposed communication, means."""
    measured = record["blocks"][arm]
    steps = [step for block in predicted(record, arm) for step in block]
    return {
        "step_ms": float(np.mean(measured["step_ms"])),
        "predicted_ms": float(np.mean([step.step_ms for step in steps])),
        "exposed_ms": float(np.mean(measured["exposed_ms"])),
        "predicted_exposed_ms": float(
            np.mean([s.reduced + s.clip_after_ms - s.backward_end.max() for s in steps])
        ),
        "imbalance": float(np.mean([max(t) / np.mean(t) for b in measured["tokens"] for t in b])),
    }


def gain(record: Mapping[str, Any], arm: str, base: str) -> tuple[float, float, float, float]:
    """Tokens a second over those of `base`: measured, with its 95 % over rounds, and predicted."""
    times, tokens, simulated = [], [], []
    for name in (arm, base):
        block = record["blocks"][name]
        times.append(np.sum(block["step_ms"], axis=1))
        tokens.append(np.sum(block["tokens"], axis=(1, 2)))
        simulated.append(sum(step.step_ms for each in predicted(record, name) for step in each))

    def ratio(chosen: Any) -> Any:
        sums = [each[chosen].sum(axis=-1) for each in (*tokens, *times)]
        return sums[0] / sums[1] * sums[3] / sums[2]

    rounds = len(times[0])
    draws = np.random.default_rng(0).integers(0, rounds, (2000, rounds))
    low, high = np.percentile(ratio(draws), (2.5, 97.5))
    predicted_gain = tokens[0].sum() / tokens[1].sum() * simulated[1] / simulated[0]
    return float(ratio(np.arange(rounds))), float(low), float(high), float(predicted_gain)


def techniques(records: Mapping[str, Any]) -> Iterator[str]:
    """Each technique alone, then all together, measured beside predicted, by group."""
    measures = "step | predicted | error | exposed (predicted) | times as fast"
    yield f"| ranks, network | arm | imbalance | {measures} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, record in records.items():
        if name.startswith("buckets"):
            continue
        computed = ", real compute" if record["compute"] == "real" else ""
        title = f"{record['ranks']}, {record['network']}{computed}"
        for arm in record["blocks"]:
            found = compared(record, arm)
            error = found["predicted_ms"] / found["step_ms"] - 1
            faster, low, high, expected = gain(record, arm, "nothing")
            yield (
                f"| {title} | {arm} | {found['imbalance']:.3f} | {found['step_ms']:.0f} ms | "
                f"{found['predicted_ms']:.0f} ms | {error:+.1%} | {found['exposed_ms']:.0f} ms "
                f"({found['predicted_exposed_ms']:.0f}) | {faster:.2f} ({low:.2f} to {high:.2f}; "
                f"predicted {expected:.2f}) |"
            )
            title = ""


def buckets(records: Mapping[str, Any]) -> Iterator[str]:
    """Step and exposed time by bucket size, policy and network."""
    networks = [name for name in records if name.startswith("buckets")]
    titles = " | ".join(
        f"{records[name]['network']}: step, of the best, exposed" for name in networks
    )
    yield f"| policy | cap | buckets | {titles} |"
    yield "|---|---|---|" + "---|" * len(networks)
    for arm, asked in bucket_arms().items():
        policy = asked["set"]["clip.policy"]
        cells = []
        for name in networks:
            record = records[name]
            alike = [each for each in record["blocks"] if each.startswith(policy)]
            found = {each: compared(record, each) for each in alike}
            best = [
                min(each[key] for each in found.values()) for key in ("step_ms", "predicted_ms")
            ]
            own = found[arm]
            cells.append(
                f"{own['step_ms']:.0f} ms ({own['predicted_ms']:.0f}), "
                f"{own['step_ms'] / best[0]:.3f} ({own['predicted_ms'] / best[1]:.3f}), "
                f"{own['exposed_ms']:.0f} ({own['predicted_exposed_ms']:.0f})"
            )
        count = len(records[networks[0]]["buckets"][arm])
        cap = arm.removeprefix(f"{policy}, ").replace("100", "none: one bucket")
        yield f"| {policy} | {cap} | {count} | {' | '.join(cells)} |"


def errors(records: Mapping[str, Any]) -> Iterator[str]:
    """How far predictions are from measurements, by group."""
    yield "| group | arms | within 10 % | mean error | largest |"
    yield "|---|---|---|---|---|"
    for name, record in records.items():
        found = {arm: compared(record, arm) for arm in record["blocks"]}
        error = {arm: each["predicted_ms"] / each["step_ms"] - 1 for arm, each in found.items()}
        worst = max(error, key=lambda arm: abs(error[arm]))
        near = sum(abs(each) <= 0.1 for each in error.values())
        mean = np.mean(np.abs(list(error.values())))
        yield f"| {name} | {len(error)} | {near} | {mean:.1%} | {error[worst]:+.1%}: {worst} |"


def picture(records: Mapping[str, Any]) -> bytes:
    """What each technique buys, measured and predicted, by size; and steps over bucket sizes."""
    figure = new_figure(13, 5.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    names = [name for name in records if name.startswith("techniques") and "slow" not in name]
    arms = [arm for arm in records[names[-1]]["blocks"] if arm != "nothing"]
    for number, name in enumerate(names):
        record = records[name]
        places = [-arms.index(arm) - 0.25 * number for arm in record["blocks"] if arm in arms]
        gains = [gain(record, arm, "nothing") for arm in record["blocks"] if arm in arms]
        measured, low, high, expected = np.array(gains).T
        title = f"{record['ranks']} ranks"
        left.barh(places, measured - 1, 0.22, left=1, color=COLOURS[number], label=title)
        left.hlines(places, low, high, color="black", lw=0.8)
        left.plot(expected, places, "D", color="black", ms=3, label=None if number else "predicted")
    left.set_yticks([-number - 0.25 for number in range(len(arms))], arms)
    left.axvline(1, color="black", lw=0.6)
    left.set_xlabel(
        "tokens a second over those of: as drawn, whole gradient clipped, nothing hidden"
    )
    left.legend(frameon=False, fontsize=8)
    for number, name in enumerate(each for each in records if each.startswith("buckets")):
        record = records[name]
        found = [compared(record, f"{BUCKET}, {cap:g}") for cap in CAPS_MB]
        colour, caps = COLOURS[number], [min(cap, 8.0) for cap in CAPS_MB]
        for key, style in (("step_ms", "o-"), ("predicted_ms", "D:")):
            label = record["network"] if key == "step_ms" else None
            steps = np.array([each[key] for each in found])
            right.plot(caps, steps / steps.min(), style, color=colour, ms=4, label=label)
    right.set_xscale("log")
    right.set_xlabel("bucket cap, MiB of 7.4 (dotted: predicted)")
    right.set_ylabel("step over the best, clipping each bucket")
    right.legend(frameon=False, fontsize=8, title="network")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return png(figure)


def main() -> None:
    """Read the command line, and measure, tabulate or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    names = [group["name"] for group in groups()]
    tables = {"techniques": techniques, "buckets": buckets, "errors": errors}
    parser.add_argument("--only", action="append", choices=names, help="may be repeated")
    parser.add_argument("--table", choices=tables)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    records = read_records()
    if args.table:
        print("\n".join(tables[args.table](records)))
        return
    if args.picture:
        write_file(args.picture, picture(records))
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        check_possible()
        with tempfile.TemporaryDirectory() as folder:
            make_set(Path(folder))
            for group in groups():
                if group["name"] in records or group["name"] not in (args.only or names):
                    continue
                record = measure(group, Path(folder), args.rounds)
                with open(RECORDS, "a", encoding="utf-8") as file:
                    print(json.dumps(record), file=file)
    except UserError as error:
        print(f"small_cluster: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
