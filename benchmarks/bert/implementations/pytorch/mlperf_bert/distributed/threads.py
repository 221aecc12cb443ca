"""The CPU threads of a rank."""

import os
from collections.abc import Mapping

import torch

from mlperf_bert.common.machine import usable_cpus
from mlperf_bert.distributed.launch import RankInfo, positive


def set_cpu_threads(
    info: RankInfo, environ: Mapping[str, str] = os.environ, *, own_cores: int | None = None
) -> int:
    """Give this rank its share of the node's cores, as torch CPU threads; return their number.

    Taken from, first found: OMP_NUM_THREADS (not under torchrun, which sets it to 1 by itself);
    SLURM_CPUS_PER_TASK in an srun step; `own_cores`, those this rank was bound to; the cores this
    process may run on divided by the ranks of the node. Raises ConfigError where a variable is
    not a number above zero.
    """
    if info.launcher != "torchrun" and "OMP_NUM_THREADS" in environ:
        # OpenMP allows one number for each nesting level; the outermost counts.
        outermost = environ["OMP_NUM_THREADS"].split(",")[0]
        threads = positive("OMP_NUM_THREADS", outermost)
    elif info.launcher == "slurm" and "SLURM_CPUS_PER_TASK" in environ:
        threads = positive("SLURM_CPUS_PER_TASK", environ["SLURM_CPUS_PER_TASK"])
    else:
        threads = own_cores or max(1, len(usable_cpus()) // info.local_world_size)
    torch.set_num_threads(threads)
    return threads
