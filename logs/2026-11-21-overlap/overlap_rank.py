"""What one of the two ranks does: calibrate the link, then time every mode in turn.

Part of measure_overlap.py.
"""

import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bert_tools.bench.synthetic import synthetic_samples
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import make_batch
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session
from mlperf_bert.model.bert import BertForPretraining
from overlap_link import throttle
from overlap_modes import BUCKET_CAP_MB, MODES, Record, Setting, Step, Watch

VOCABULARY = 2048
SEQUENCE_LENGTH = 128
BATCH_SIZE = 6
MAX_PREDICTIONS = 20
WARM_UP_ROUNDS = 3
CALIBRATION_STEPS = 7
ALONE = ", alone"  # ends the name of a mode that sends nothing

# Modes by vocabulary. In BERT's own the embedding, ready last, is half of all that is sent.
CASES = {
    VOCABULARY: tuple(MODES),
    30522: ("none", "bucket_before_allreduce", "whole_before_allreduce"),
}
FEWEST_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Calibration:
    """How the link's rate was found."""

    gradient_bytes: int
    backward_s: float  # median of a few steps, the slower rank's; nothing was sent meanwhile
    bits_per_s: float
    all_reduce_s: float  # of all buckets at this rate, nothing computed meanwhile


def be_a_rank(num_rounds: int, out: Path) -> int:
    """Measure all cases among the ranks; rank 0 reports, each writes `out`/rank_<n>.json.

    `num_rounds` are for the case that bars go by.
    """

    def run(info: RankInfo, device: torch.device) -> int:
        torch.set_num_threads(1)
        groups = [dist.new_group([rank]) for rank in range(info.world_size)]
        alone = groups[info.rank]
        watch = Watch()
        with watch.on_collectives():
            setting = make_setting(VOCABULARY, info.rank, watch)
            calibration = calibrate(setting, alone)
            report(info, f"link: {calibration.bits_per_s / 1e6:.0f} Mbit/s")
            cases = []
            for vocabulary, modes in CASES.items():
                setting = make_setting(vocabulary, info.rank, watch)
                rounds = num_rounds if vocabulary == VOCABULARY else FEWEST_ROUNDS
                records = measure(setting, modes, alone, rounds, info)
                cases.append({"vocabulary": vocabulary, "records": records})
                gc.collect()  # the case's models
        answer = {"calibration": asdict(calibration), "cases": cases}
        (out / f"rank_{info.rank}.json").write_text(json.dumps(answer, default=asdict))
        return 0

    return in_session(run, "cpu", "refuse")


def make_setting(vocabulary: int, rank: int, watch: Watch) -> Setting:
    """The model's shape, and a batch of this rank: equal lengths, words of its own."""
    model = ModelSection(
        vocab_size=vocabulary,
        hidden_size=256,
        num_layers=8,
        num_heads=4,
        intermediate_size=1024,
    )
    samples = synthetic_samples(
        np.full(BATCH_SIZE, SEQUENCE_LENGTH, dtype=np.int64),
        vocab_size=vocabulary,
        max_predictions=MAX_PREDICTIONS,
        seed=rank,
    )
    num_masked = int(samples.masked_counts.sum())
    ids = np.arange(BATCH_SIZE)
    batch = make_batch(samples, ids, mlm_denominator=num_masked, nsp_denominator=BATCH_SIZE)
    return Setting(model, batch, watch)


def calibrate(setting: Setting, alone: dist.ProcessGroup) -> Calibration:
    """Limit the link so that all buckets take as long as a backward; the same on both ranks.

    Two ranks exchange each byte of a gradient once in each direction, which gives a first rate;
    a measured all-reduce at that rate corrects it.
    """
    step = MODES["none"](setting, alone)
    for _ in range(WARM_UP_ROUNDS):
        step()
    times = [timed(step, setting.watch).backward_s for _ in range(CALIBRATION_STEPS)]
    backward_s = slower_rank(statistics.median(times))
    model = BertForPretraining(setting.model, torch.device("meta"))
    gradient_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    bits_per_s = 8 * gradient_bytes / backward_s
    all_reduce_s = 0.0
    for _ in range(2):
        if all_reduce_s:
            bits_per_s *= all_reduce_s / backward_s
        throttle(bits_per_s)
        all_reduce_s = time_all_reduce(gradient_bytes)
    return Calibration(gradient_bytes, backward_s, bits_per_s, all_reduce_s)


def time_all_reduce(num_bytes: int) -> float:
    """Seconds that as many bytes take in parts of a bucket's size, a median."""
    sizes = range(0, num_bytes // 4, int(BUCKET_CAP_MB * 2**20) // 4)
    parts = torch.zeros(num_bytes // 4).tensor_split(list(sizes)[1:])
    times = []
    for _ in range(CALIBRATION_STEPS):
        dist.barrier()
        start = time.perf_counter()
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
        times.append(time.perf_counter() - start)
    return slower_rank(statistics.median(times))


def slower_rank(seconds: float) -> float:
    """The larger of the ranks' numbers."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure(
    setting: Setting,
    modes: Sequence[str],
    alone: dist.ProcessGroup,
    num_rounds: int,
    info: RankInfo,
) -> dict[str, list[Record]]:
    """Records of these modes by name, over both ranks and alone, `num_rounds` each.

    A round is one step of each mode. The next one begins one mode later and goes the other way
    round, so that no mode has always the same place or follows always the same.
    """
    both = dist.group.WORLD
    assert both is not None
    steps = {name: MODES[name](setting, both) for name in modes}
    steps |= {name + ALONE: MODES[name](setting, alone) for name in modes}
    records: dict[str, list[Record]] = {name: [] for name in steps}
    order = list(steps)
    for number in range(-WARM_UP_ROUNDS, num_rounds):
        began = time.perf_counter()
        shift = number % len(order)
        in_turn = order[shift:] + order[:shift]
        for name in in_turn if number % 2 else reversed(in_turn):
            dist.barrier()
            record = timed(steps[name], setting.watch)
            if number >= 0:
                records[name].append(record)
        seconds = time.perf_counter() - began
        which = f"round {number + 1} of {num_rounds}" if number >= 0 else "warm-up"
        report(info, f"vocabulary {setting.model.vocab_size:,}, {which}: {seconds:.1f} s")
    dist.barrier()  # the last all-reduces' ends are noted
    return records


def timed(step: Step, watch: Watch) -> Record:
    """Run one step; what was noted. The ends of its all-reduces may come a little later."""
    watch.record = Record()
    watch.mark("start")
    step()
    watch.mark("end")
    return watch.record


def report(info: RankInfo, text: str) -> None:
    """Say how far this is, on one rank."""
    if info.rank == 0:
        print(text, flush=True)
