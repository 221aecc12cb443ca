"""What test_exchange.py runs on four ranks at once: `exchange_job.py CONFIG DATA OUTPUT`.

Every rank writes what it saw to OUTPUT/rank_<n>.json; runs leave their own directories there.
"""

import hashlib
import json
import sys
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import StepPlanner, make_planner
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.exchange import ExchangeSource
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.data.token_packets import token_dtype
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import check_nodes, in_session, make_exchange_group
from mlperf_bert.parts.build import Run, build
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.train import train

SIZES = ("parallel.nodes=2", "parallel.ranks_per_node=2", "parallel.local_batch_size=4")
POLICIES = ("none", "exchange_local", "exchange_global", "presort_local", "presort_global")
BATCH_CASES = {
    f"{policy} {deal}": (f"data.balance={policy}", f"data.deal={deal}")
    for policy in POLICIES
    for deal in ("snake", "one_direction")
}
TRAIN_CASES = {
    **{policy: (f"data.balance={policy}",) for policy in POLICIES},
    **{
        f"per_rank {policy}": (f"data.balance={policy}", "optim.loss_normalization=per_rank")
        for policy in ("none", "exchange_global")
    },
}
WITHOUT_EXTRAS = ("checkpoint.save=never", "eval.interval_samples=1000000")
STEPS = range(1, 6)


class BrokenReader(SampleReader):
    """Cannot read on rank 3, from the second step on."""

    reads = 0

    def read(self, ids: np.ndarray) -> Samples:
        """Read, or fail."""
        self.reads += 1
        if dist.get_rank() == 3 and self.reads > 1:
            raise DataError("shard", "is broken", "mend it")
        return super().read(ids)


def digest(batch: UnpaddedBatch) -> str:
    """One digest of all that a batch holds, types included."""
    contents = hashlib.sha256()
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            value = (str(value.dtype), value.tolist())
        contents.update(repr(value).encode())
    return contents.hexdigest()


def open_planned(config: RunConfig, data: Path) -> tuple[StepPlanner, SampleReader]:
    """The planner of a config, and a reader of its samples."""
    index = LengthIndex.open(data / "train")
    return make_planner(config, index, seed=5), SampleReader(data / "train", index.manifest)


def planned_batches(
    config: RunConfig, data: Path, info: RankInfo, steps: range = STEPS
) -> list[str]:
    """Digests of what the plan, the policy's single-process definition, gives to this rank."""
    planner, reader = open_planned(config, data)
    found = []
    for plan in map(planner.plan, steps):
        for forward in range(plan.counts.shape[1]):
            batch = make_batch(
                reader.read(plan.ids_of(info.rank, forward)),
                plan.ids_of(info.rank, forward),
                mlm_denominator=float(plan.mlm_denominators[info.rank, forward]),
                nsp_denominator=float(plan.nsp_denominators[info.rank, forward]),
            )
            found.append(digest(batch))
    return found


def exchanged_batches(config: RunConfig, data: Path, info: RankInfo) -> list[str]:
    """Digests of what this rank gets by exchange."""
    planner, reader = open_planned(config, data)
    group = make_exchange_group(config.data.balance, info, config.parallel.ranks_per_node)
    assert group is not None
    token = token_dtype(config.model.vocab_size)
    source = ExchangeSource(reader, info.rank, group, config.data.deal, token)
    found = []
    for plan in map(planner.plan, STEPS):
        found += map(digest, source.micro_batches(plan))
    source.close()
    return found


def error_of_a_broken_reader(config: RunConfig, data: Path, info: RankInfo) -> str:
    """What this rank says when rank 3 cannot read."""
    planner, reader = open_planned(config, data)
    broken = BrokenReader(reader.set_dir, reader.manifest)
    group = make_exchange_group("exchange_global", info, config.parallel.ranks_per_node)
    assert group is not None
    source = ExchangeSource(broken, info.rank, group, "snake", "<u2")
    source.micro_batches(planner.plan(1))
    try:
        source.micro_batches(planner.plan(2))
    except DataError as error:
        return str(error)
    finally:
        source.close()
    return ""


def error_of_other_nodes(info: RankInfo) -> str:
    """What this rank says when it is on a node that the config does not know."""
    try:
        elsewhere = replace(info, node_rank=1 - info.node_rank)
        check_nodes("data.balance", "exchange_local", elsewhere, 2)
    except ConfigError as error:
        return str(error)
    return ""


def main(config_path: Path, data: Path, output: Path) -> int:
    """Do everything one after the other, in one process group."""

    def run_rank(info: RankInfo, device: torch.device) -> int:
        config = load_config(config_path, SIZES)
        seen = {
            "broken": error_of_a_broken_reader(config, data, info),
            "nodes": error_of_other_nodes(info),
        }
        sizes = (*SIZES, "parallel.grad_accum_steps=2")
        for name, settings in BATCH_CASES.items():
            case = load_config(config_path, (*sizes, *settings))
            seen[name] = planned_batches(case, data, info)
            if case.data.balance.startswith("exchange_"):
                seen[f"{name} received"] = exchanged_batches(case, data, info)
        (output / f"rank_{info.rank}.json").write_text(json.dumps(seen))
        for name, settings in TRAIN_CASES.items():
            case = load_config(config_path, (*SIZES, *settings, *WITHOUT_EXTRAS))
            run = Run(
                config=case,
                seed=int(case.run.seed),
                info=info,
                device=device,
                data_dir=data,
                directory=RunDirectory(output / name, 0),
            )
            parts = build(run)
            with parts.reporter, closing(parts.metrics_file), closing(parts.log):
                train(parts)
        return 0

    return in_session(run_rank, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
