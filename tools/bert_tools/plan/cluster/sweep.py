"""The same program on ever more nodes: step, throughput and time to the target at every size."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from bert_tools.plan.cluster.constants import Constants
from bert_tools.plan.cluster.question import Answer, Question, answer
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.common.errors import ConfigError

SweepBatch = Literal["local", "global"]
LAST_RANKS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One size. Times of a step are means over ranks and draws; `in_range`: samples are known."""

    nodes: int
    accelerators: int
    local_batch_size: int
    global_batch_size: int
    step_ms: float
    compute_ms: float
    exposed_ms: float
    waiting_ms: float
    sequences_per_s: float
    samples: float
    time_s: float
    in_range: bool


def sweep_nodes(gpus_per_node: int) -> list[int]:
    """Powers of two up to 100,000 accelerators, and that number itself."""
    last = max(1, LAST_RANKS // gpus_per_node)
    nodes = [1]
    while nodes[-1] * 2 < last:
        nodes.append(nodes[-1] * 2)
    return [*nodes, last] if last > 1 else nodes


def sweep(
    question: Question, batch: SweepBatch, index: SampleIndex, constants: Constants
) -> Iterator[SweepRow]:
    """Rows by size. `batch` stays: the local one, or the global one while every rank has some.

    A size whose batch the sampler or the samples cannot serve is left out.
    """
    whole = question.world_size * question.local_batch_size
    for nodes in sweep_nodes(question.gpus_per_node):
        local = question.local_batch_size
        if batch == "global":
            ranks = nodes * question.gpus_per_node
            if whole % ranks:
                continue
            local = whole // ranks
        try:
            size = replace(question, nodes=nodes, local_batch_size=local)
            yield _row(answer(size, index, constants))
        except ConfigError:
            continue


def _row(found: Answer) -> SweepRow:
    question, parts = found.question, found.parts_ms
    waiting = parts["wait: slower ranks"] + parts["wait: launches and host syncs"]
    exposed = found.mean_ms("exposed_ms")
    return SweepRow(
        nodes=question.nodes,
        accelerators=question.world_size,
        local_batch_size=question.local_batch_size,
        global_batch_size=question.global_batch_size,
        step_ms=found.run.step_ms,
        compute_ms=found.run.step_ms - waiting - exposed,
        exposed_ms=exposed,
        waiting_ms=waiting,
        sequences_per_s=found.sequences_per_s,
        samples=found.estimate.samples,
        time_s=found.run.seconds,
        in_range=found.estimate.in_range,
    )
