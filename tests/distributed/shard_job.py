"""What test_sharded_optimizer.py runs on N ranks at once: `shard_job.py CONFIG OUTPUT`.

Every rank writes OUTPUT/ranks_<N>/rank_<n>.pt: what short runs of a small BERT left. Every number
of ranks trains on the same MICRO_BATCHES an update. Four ranks leave checkpoints in OUTPUT, with
which two go on.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlperf_bert.build import make_model
from mlperf_bert.build_step import build_step
from mlperf_bert.checkpoint import CheckpointState, load_checkpoint, save_checkpoint
from mlperf_bert.config import RunConfig
from mlperf_bert.config_io import load_config
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.shards import Samples
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session
from mlperf_bert.distributed.shard_group import ShardGroup
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.step import EagerStep
from mlperf_bert.warm_up import warm_up

CPU = torch.device("cpu")
MICRO_BATCHES, SEQUENCES, MASKED = 4, 2, 2  # of an update, of each, of each sequence
STEPS = 50
RULES = ("adamw", "lamb")
DTYPES = {"float64": torch.float64, "fp32": torch.float32}
POLICIES = ("none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce")
BUCKETS = "clip.policy=bucket_before_allreduce"
EACH_FORWARD = "clip.accumulation=each_forward"
BUCKET_STEPS = 10  # those of runs that clip bucket by bucket
SAVED_AT, LAST = 4, 8
VOCABULARY = "ab"
SPOILT_BY = {2: float("nan"), 3: float("inf"), 5: 1e30}  # by step; the last: its square overflows
SPOILT_STEPS = max(SPOILT_BY) + 1
SMALL = (
    *("model.num_layers=1", "data.max_seq_length=16", "parallel.bucket_cap_mb=0.01"),
    *("run.max_steps=100", "schedule.decay_steps=100"),
    *("clip.max_norm=2.0", f"parallel.local_batch_size={SEQUENCES}"),
)


@dataclass(frozen=True)
class Run:
    """One model, its optimizer and step, on this rank."""

    config: RunConfig
    info: RankInfo
    model: nn.Module
    optimizer: FlatOptimizer
    step: EagerStep

    def micro_batches(self, step: int) -> tuple[UnpaddedBatch, ...]:
        """This rank's share of an update's."""
        share = self.config.parallel.grad_accum_steps
        mine = range(self.info.rank * share, (self.info.rank + 1) * share)
        return tuple(micro_batch(step, number, share) for number in mine)

    def steps(self, first: int, last: int) -> dict[str, Tensor]:
        """Take them; of each, the update's loss, what was clipped here, and what was skipped."""
        results = [
            self.step(number, self.micro_batches(number)) for number in range(first, last + 1)
        ]
        losses = torch.stack([result.loss.double() for result in results])
        if self.info.world_size > 1:
            dist.all_reduce(losses)
        return {
            "losses": losses / self.info.world_size,
            "clipped": torch.stack([result.clip.clipped_fraction for result in results]),
            "skipped": torch.stack([result.clip.skip for result in results]),
        }


def nodes(info: RankInfo) -> tuple[str, ...]:
    """The ranks as config options."""
    local = info.local_world_size
    return (f"parallel.nodes={info.world_size // local}", f"parallel.ranks_per_node={local}")


def modes(info: RankInfo) -> tuple[str, ...]:
    """Those that are not the same on so many ranks and nodes."""
    by_node = ("shard_node",) if info.local_world_size < info.world_size else ()
    return ("flat", "shard_world", *by_node)


def start(
    config: Path,
    info: RankInfo,
    overrides: Sequence[str],
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> Run:
    """Of a config file with SMALL and `overrides`."""
    share = f"parallel.grad_accum_steps={MICRO_BATCHES // info.world_size}"
    case = load_config(config, (*SMALL, share, *nodes(info), *overrides))
    model = make_model(case, seed, CPU).to(dtype)
    return Run(case, info, model, *build_step(model, case, info, CPU))


def micro_batch(step: int, number: int, forwards: int) -> UnpaddedBatch:
    """Random words in sequences of several lengths; `forwards` are those of a rank and update."""
    random = np.random.default_rng([step, number])
    lengths = random.integers(4, 12, SEQUENCES)
    places = [np.sort(random.permutation(length)[:MASKED]) for length in lengths]
    samples = Samples(
        input_ids=random.integers(0, 69, lengths.sum()),
        lengths=lengths,
        segment_b_start=lengths // 2,
        masked_positions=np.concatenate(places),
        masked_ids=random.integers(0, 8, MASKED * SEQUENCES),  # fewer words: there is what to learn
        masked_counts=np.full(SEQUENCES, MASKED),
        next_sentence_label=random.integers(0, 2, SEQUENCES),
    )
    sequences = forwards * SEQUENCES  # of the mean over ranks, as the step plan has it
    return make_batch(samples, mlm_denominator=MASKED * sequences, nsp_denominator=sequences)


def trained(run: Run, last: int) -> dict[str, Any]:
    """What steps 1 to `last` leave."""
    found: dict[str, Any] = run.steps(1, last)
    return {
        **found,
        "weights": run.optimizer.exact_weights(),
        "model": copy.deepcopy(run.model.state_dict()),
        "updates": float(run.optimizer.scalar_state()["updates"]),
    }


def state_elements(optimizer: FlatOptimizer) -> int:
    """Of the state that this rank holds beside the model's own weights."""
    owned = (optimizer.shard.masters, *optimizer.flat_state().values())
    return sum(tensor.numel() for tensor in owned)


def spoilt(config: Path, info: RankInfo, overrides: Sequence[str]) -> dict[str, Any]:
    """A run in which the last rank's gradient is bad: one tensor's, in a step's first forward."""
    run = start(config, info, overrides)
    calls = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal calls
        step, forward = divmod(calls, run.config.parallel.grad_accum_steps)
        calls += 1
        bad = SPOILT_BY.get(step + 1) if forward == 0 else None
        return gradient if bad is None else torch.full_like(gradient, bad)

    if info.rank == info.world_size - 1:
        dict(run.model.named_parameters())["bert.pooler.dense.bias"].register_hook(hook)
    return trained(run, SPOILT_STEPS)


def warmed_up_and_skipped(config: Path, info: RankInfo, overrides: Sequence[str]) -> dict[str, Any]:
    """Weights at the start, after the warm-up, and after a skipped step."""
    run = start(config, info, overrides)
    found = {"at first": copy.deepcopy(run.model.state_dict())}
    warm_up(run.config, run.step, run.model, run.optimizer, CPU)
    found["warmed up"] = copy.deepcopy(run.model.state_dict())
    found["updates"] = run.optimizer.scalar_state()["updates"].clone()
    bias = dict(run.model.named_parameters())["bert.pooler.dense.bias"]
    bias.register_hook(lambda gradient: gradient * torch.nan)
    found["skip"] = run.steps(1, 1)["skipped"]
    found["skipped"] = copy.deepcopy(run.model.state_dict())
    return found


def order_of_events(run: Run) -> list[str]:
    """In one update: "ready" for each gradient that becomes whole, "sent" for each bucket."""
    events: list[str] = []
    for parameter in run.model.parameters():
        parameter.register_hook(lambda gradient: events.append("ready"))
    reduce = ShardGroup.reduce

    def recording(group: ShardGroup, whole: Tensor, piece: Tensor) -> None:
        events.append("sent")
        reduce(group, whole, piece)

    ShardGroup.reduce = recording  # type: ignore[method-assign]
    try:
        run.steps(1, 1)
    finally:
        ShardGroup.reduce = reduce  # type: ignore[method-assign]
    return events


def save(run: Run, directory: Path) -> dict[str, Any]:
    """Train to SAVED_AT, save there, and go on."""
    run.steps(1, SAVED_AT)
    state = CheckpointState(
        step=SAVED_AT, samples=0, seed=1, mlm_accuracy=None, vocabulary_sha256=VOCABULARY
    )
    if run.info.rank == 0:
        directory.mkdir()
    dist.barrier()
    save_checkpoint(directory, run.optimizer, run.config, state, run.info, CPU)
    return {"saved": run.optimizer.exact_weights(), **go_on(run)}


def go_on(run: Run) -> dict[str, Any]:
    """From SAVED_AT to LAST."""
    losses = run.steps(SAVED_AT + 1, LAST)["losses"]
    return {"losses": losses, "weights": run.optimizer.exact_weights()}


def load_and_go_on(run: Run, directory: Path) -> dict[str, Any]:
    """With a checkpoint in place of the run's own beginning."""
    state = load_checkpoint(run.optimizer, directory, VOCABULARY, run.info)
    assert state.step == SAVED_AT
    found = {
        "saved": run.optimizer.exact_weights(),
        "model": copy.deepcopy(run.model.state_dict()),
        "updates": float(run.optimizer.scalar_state()["updates"]),
    }
    return {**found, **go_on(run)}


SAVED = {  # by directory: rule, config options, dtype
    **{rule: ((f"optim.name={rule}",), torch.float64) for rule in RULES},
    "bf16": (("model.precision=bf16",), torch.float32),
}


def all_cases(config: Path, output: Path, info: RankInfo) -> dict[str, Any]:
    """Everything that test_sharded_optimizer.py looks at."""
    seen: dict[str, Any] = {}
    for mode in ("ddp", *modes(info)):
        parallel = f"parallel.data_parallel={mode}"
        for rule in RULES:
            for name, dtype in DTYPES.items():
                run = start(config, info, (parallel, f"optim.name={rule}"), dtype)
                seen[f"{mode} {rule} {name}"] = trained(run, STEPS)
        seen[f"{mode} state"] = state_elements(run.optimizer)
        seen[f"{mode} parts"] = len(run.optimizer.parts)
    for mode in modes(info):
        parallel = f"parallel.data_parallel={mode}"
        for name, options in (("buckets", (BUCKETS,)), ("forwards", (BUCKETS, EACH_FORWARD))):
            run = start(config, info, (parallel, *options), torch.float64)
            seen[f"{mode} {name}"] = trained(run, BUCKET_STEPS)
        for precision in ("bf16", "fp16"):
            options = (parallel, f"model.precision={precision}")
            seen[f"{mode} {precision} skip"] = warmed_up_and_skipped(config, info, options)
        for policy in POLICIES:
            clip = f"clip.policy={policy}"
            seen[f"{mode} {policy} events"] = order_of_events(start(config, info, (parallel, clip)))
            for accumulation, forwards in accumulations(policy).items():
                options = (parallel, clip, accumulation, forwards)
                seen[f"{mode} {policy} {accumulation} spoilt"] = spoilt(config, info, options)
        seen |= saved_or_loaded(config, output, info, mode)
    return seen


def saved_or_loaded(config: Path, output: Path, info: RankInfo, mode: str) -> dict[str, Any]:
    """Four ranks save, and go on; fewer go on from there."""
    seen = {}
    for name, (options, dtype) in SAVED.items():
        case = (f"parallel.data_parallel={mode}", *options)
        if info.world_size < MICRO_BATCHES:
            run = start(config, info, case, dtype, seed=2)
            seen[f"{mode} {name} loaded"] = load_and_go_on(run, output / name)
        elif mode == "shard_world":
            run = start(config, info, case, dtype)
            seen[f"{mode} {name} saved"] = save(run, output / name)
    return seen


def accumulations(policy: str) -> dict[str, str]:
    """What of an update a policy may clip, and of how many forwards."""
    accumulated = {"clip.accumulation=accumulated": "parallel.grad_accum_steps=1"}
    each = {EACH_FORWARD: "parallel.grad_accum_steps=2"} if policy in POLICIES[2:] else {}
    return accumulated | each


def main(config: Path, output: Path) -> int:
    """Do everything one after the other, in one process group."""

    def work(info: RankInfo, device: torch.device) -> int:
        seen = all_cases(config, output, info)
        folder = output / f"ranks_{info.world_size}"
        folder.mkdir(exist_ok=True)
        torch.save(seen, folder / f"rank_{info.rank}.pt")
        return 0

    return in_session(work, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
