"""The job of test_overlap_tool.py on two ranks: `overlap_job.py STUDY OUTPUT`, no namespace.

Each rank writes the records of one round of every mode, of a small model, to OUTPUT/rank_<n>.json.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session

sys.path.insert(0, sys.argv[1])

import overlap_modes
import overlap_rank

SMALL = ModelSection(
    vocab_size=64,
    hidden_size=64,
    num_layers=2,
    num_heads=1,
    intermediate_size=256,
)


def run(info: RankInfo, device: torch.device) -> int:
    """Every mode over both ranks and alone, as the tool does."""
    overlap_modes.BUCKET_CAP_MB = 0.1
    groups = [dist.new_group([rank]) for rank in range(info.world_size)]
    watch = overlap_modes.Watch()
    with watch.on_collectives():
        setting = replace(overlap_rank.make_setting(64, info.rank, watch), model=SMALL)
        modes = tuple(overlap_modes.MODES)
        records = overlap_rank.measure(setting, modes, groups[info.rank], 1, info)
    path = Path(sys.argv[2]) / f"rank_{info.rank}.json"
    path.write_text(json.dumps(records, default=asdict))
    return 0


if __name__ == "__main__":
    sys.exit(in_session(run, "cpu", "refuse"))
