"""What one rank of the small cluster does: calibrate, then run blocks of steps of each arm in turn.

Part of small_cluster.py, which starts it in a namespace and reads its answer.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import StepPlan, make_planner
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.exchange import ExchangeSource
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed import bucket_plan
from mlperf_bert.distributed.flat_reducer import ShardGroup, num_shards
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session, make_exchange_group
from mlperf_bert.parts.build import build_step, make_model
from mlperf_bert.parts.loader import build_loader
from mlperf_bert.vocabulary.word_pieces import token_dtype
from phases import BASE, STEPS
from sleeping import SleepingModel, Watch, buckets_of

CPU = torch.device("cpu")
ALONE = RankInfo(0, 1, 0, 1, 0, "single")
SEED = 1
ALONE_BLOCKS = 3
SIZES = (2**12, 2**17, 2**18, 2**20, 2**21, 2**22, 2**23)  # bytes of calibrated collectives
REPEATS = 7

Planned = tuple[StepPlan, tuple[UnpaddedBatch, ...]]


class Arm:
    """One setting of the program, ready to make steps."""

    def __init__(
        self, asked: dict[str, Any], job: dict[str, Any], info: RankInfo, stack: ExitStack
    ) -> None:
        self.config = config = _config(job, asked.get("set", {}))
        index, reader = _open(Path(job["data"]))
        self._planner = make_planner(config, index, SEED)
        self._received = lambda: 0
        self.batches: Iterator[Planned]
        if asked.get("in_step"):
            self.batches = self._exchanged(reader, info)
        else:
            loader, _ = build_loader(config, self._planner, reader, SEED, info, CPU, None, 1)
            steps = stack.enter_context(loader)
            self.batches = ((each.plan, each.micro_batches) for each in steps)
        model: nn.Module
        if job["compute"] == "real":
            model = make_model(config, SEED, CPU)
        else:
            model = SleepingModel(config.model, job["ms_per_token"])
        with first_bucket(asked.get("first_mb"), config.parallel.bucket_cap_mb):
            group = ALONE if asked.get("alone") else info
            shards = num_shards(config.parallel.data_parallel, group)
            self.buckets = buckets_of(model, config.model, config.parallel.bucket_cap_mb, shards)
            _, self.step = build_step(model, _alone(config, group), group, CPU)
        wait = dist.barrier if asked.get("alone") else lambda: None
        self.watch = self.step._clip = Watch(self.step._clip, wait)

    def block(self) -> list[dict[str, Any]]:
        """One step that is not timed, then STEPS that are: what ended when, and their work."""
        records = []
        for _ in range(1 + STEPS):
            plan, batches = next(self.batches)
            self.step(plan.step, batches)
            records.append(
                {
                    "backward_end": self.watch.backward_end,
                    "reduced": self.watch.reduced,
                    "end": time.perf_counter(),
                    "processor": time.process_time(),
                    "received": self._received(),
                    "tokens": plan.num_tokens[:, 0].tolist(),
                }
            )
        return records

    def _exchanged(self, reader: SampleReader, info: RankInfo) -> Iterator[Planned]:
        """Batches whose exchange begins when they are asked for; so do their plan and reading."""
        config = self.config
        group = make_exchange_group(config.data.balance, info, config.parallel.ranks_per_node)
        token = token_dtype(config.model.vocab_size)
        source = ExchangeSource(reader, info.rank, group, config.data.deal, token)
        self._received = lambda: source.received_bytes
        for number in itertools.count(1):
            plan = self._planner.plan(number)
            yield plan, source.micro_batches(plan)


@contextmanager
def first_bucket(first_mb: float | None, cap_mb: float) -> Iterator[None]:
    """A block in which `plan_in_reverse` closes the first bucket at `first_mb` already."""
    usual = bucket_plan.DEFAULT_CAP_MB, bucket_plan.SMALL_FIRST_CAP_MB
    if first_mb is not None:
        bucket_plan.DEFAULT_CAP_MB, bucket_plan.SMALL_FIRST_CAP_MB = cap_mb, first_mb
    try:
        yield
    finally:
        bucket_plan.DEFAULT_CAP_MB, bucket_plan.SMALL_FIRST_CAP_MB = usual


def _config(job: dict[str, Any], settings: dict[str, Any]) -> RunConfig:
    both = {name: job[name] for name in ("parallel.nodes", "parallel.ranks_per_node")} | settings
    return load_config(BASE, [f"{name}={value}" for name, value in both.items()])


def _alone(config: RunConfig, group: RankInfo) -> RunConfig:
    """The config of a step that sends nothing, if the group has one rank."""
    if group.world_size > 1:
        return config
    settings = ("nodes=1", "ranks_per_node=1", f"bucket_cap_mb={config.parallel.bucket_cap_mb}")
    return load_config(BASE, [f"parallel.{each}" for each in settings])


def _open(data: Path) -> tuple[LengthIndex, SampleReader]:
    index = LengthIndex.open(data)
    return index, SampleReader(data, index.manifest)


def calibrate(arm: Arm, job: dict[str, Any], info: RankInfo) -> dict[str, Any]:
    """Times of collectives while nothing else runs, and steps of an arm that sends nothing.

    `reduce` is an all-reduce over all ranks, `scatter` and `gather` are theirs too; `nested` is a
    scatter in each host and then an all-reduce of every rank's part between hosts. Sizes are bytes
    of the whole buffer.
    """
    in_host = ShardGroup(info, info.local_world_size, CPU)
    everywhere, none = ShardGroup(info, info.world_size, CPU), ShardGroup(info, 1, CPU)

    def reduced(group: ShardGroup, whole: torch.Tensor) -> None:
        piece = whole[: len(whole) // group.count] if group.count > 1 else whole
        group.reduce(whole, piece)
        group.wait_for_reduced()

    def gathered(group: ShardGroup, whole: torch.Tensor) -> None:
        group.publish(0, whole, whole[: len(whole) // group.count].clone())
        group.wait()

    found: dict[str, Any] = {}
    for name, call, group in (
        ("reduce", reduced, none),
        ("scatter", reduced, everywhere),
        ("gather", gathered, everywhere),
        ("nested", reduced, in_host),
    ):
        wholes = [torch.ones(size // 4) for size in SIZES]
        times = [_median_s(partial(call, group, whole)) for whole in wholes]
        found[name] = list(zip(SIZES, times, strict=True))
    found["alone"] = []
    for _ in range(ALONE_BLOCKS):
        dist.barrier()
        found["alone"].append(arm.block())
    return found


def _median_s(call: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        started = time.perf_counter()
        call()
        slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return statistics.median(times)


def be_a_rank(path: Path) -> int:
    """Do the job described in the JSON file `path`; write the answer beside it."""
    job = json.loads(path.read_text())

    def run(info: RankInfo, device: torch.device) -> int:
        torch.set_num_threads(1)
        with ExitStack() as stack:
            return measure(info, stack)

    def measure(info: RankInfo, stack: ExitStack) -> int:
        alone = Arm({"alone": True}, job, info, stack)
        arms = {name: Arm(asked, job, info, stack) for name, asked in job["arms"].items()}
        answer = calibrate(alone, job, info)
        answer["buckets"] = {name: arm.buckets for name, arm in arms.items()}
        answer["blocks"] = blocks = {name: [] for name in arms}
        order = list(arms)
        for number in range(job["rounds"]):
            started, shift = time.monotonic(), number % len(order)
            in_turn = order[shift:] + order[:shift]
            for name in in_turn if number % 2 else reversed(in_turn):
                dist.barrier()
                blocks[name].append(arms[name].block())
            if info.rank == 0:
                left = (job["rounds"] - number - 1) * (time.monotonic() - started) / 60
                said = f"{job['name']}: round {number + 1} of {job['rounds']}"
                print(f"{said}, about {left:.1f} min left", flush=True)
        path.with_name(f"rank_{info.rank}.json").write_text(json.dumps(answer))
        dist.barrier()
        return 0

    return in_session(run, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(be_a_rank(Path(sys.argv[1])))
