"""Small jobs for tests of the cluster simulator, with constants that are easy to reckon with."""

from dataclasses import replace

import numpy as np

from bert_tools.plan.cluster.machine import Constants, default_constants, make_machine
from bert_tools.plan.cluster.software import Software, programs, with_capture
from bert_tools.plan.cluster.step import Job, StepTiming, simulate_step
from bert_tools.plan.cluster.workload import Workload, even_workload
from mlperf_bert.config.sections import ClipPolicy

# No overheads: what is left is work and messages.
FREE = replace(
    default_constants(),
    kernel_overhead_us=0.0,
    host_launch_us=0.0,
    jitter_fraction=0.0,
    link_latency_us=0.0,
    network_latency_us=0.0,
    collective_start_us=0.0,
    overlap_slowdown=0.0,
    sync_us=0.0,
)
OURS = programs()["ours"]
EAGER = with_capture(OURS, "off")


def job(
    nodes: int = 2,
    gpus: int = 4,
    *,
    clip: ClipPolicy = "none",
    constants: Constants = FREE,
    program: Software = EAGER,
    node_gb_s: float | None = None,
) -> Job:
    return Job(
        machine=make_machine("a100", nodes, gpus, node_gb_s),
        program=program,
        constants=constants,
        precision="bf16",
        clip=clip,
    )


def even(ranks: int, sequences: int = 4, length: int = 256, program: Software = EAGER) -> Workload:
    return even_workload(ranks, sequences, length, 38, program)


def uneven(tokens: list[int], program: Software = EAGER) -> Workload:
    """Ranks of one sequence each, all cut from `even_workload` but for its tokens."""
    parts = [even_workload(1, 1, length, 38, program) for length in tokens]
    arrays = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("tokens", "real_tokens", "attended", "masked", "sequences")
    ]
    return Workload(*arrays)


def simulate(of: Job, work: Workload) -> StepTiming:
    return simulate_step(of, work, np.ones(work.world_size))
