"""Advice to the kernel to read the pages of coming samples, for files not yet in memory.

A sample lies in seven arrays, so reading 16 from a cold file one after the other means about 100
waits for the disk. Advised ahead, the disk works on many at once while earlier steps train.
"""

import resource
from collections.abc import Sequence

import numpy as np

from mlperf_bert.data.gather import Gatherer
from mlperf_bert.data.shards import IntArray
from mlperf_bert.data.step_plan import StepPlan

ADVISED_STEPS = 2  # first the tables of offsets of a step, one step later what they point at
STEPS_AFTER_A_FAULT = 64


class ReadAhead:
    """Advises for the samples of one rank; called by the loader's thread, step after step.

    Advice for warm files would cost more than gathering from them: seven system calls a sample.
    So it is given only for the first STEPS_AFTER_A_FAULT steps and, from then on, for as many
    after every step in which this thread had to wait for the disk (a major page fault). Reading a
    file for the first time, that is about one unadvised step in 65. Where the operating system
    does not count faults of a thread, only the first steps are advised.
    """

    def __init__(self, gatherer: Gatherer, rank: int) -> None:
        self._gatherer = gatherer
        self._rank = rank
        self._faults = 0
        self._steps_left = STEPS_AFTER_A_FAULT
        self._last_step = 0  # whose tables were advised

    def advise(self, coming: Sequence[StepPlan]) -> None:
        """Advise for the steps that are read next, in their order; one at least.

        Raises DataError where a shard cannot be mapped or its offsets are damaged.
        """
        faults = _major_faults()
        if faults > self._faults:
            self._faults, self._steps_left = faults, STEPS_AFTER_A_FAULT
        if self._steps_left:
            self._steps_left -= 1
            for plan in coming:
                if plan.step > self._last_step:
                    self._advise_tables(plan)
                    self._last_step = plan.step
            self._advise_samples(coming[0])

    def _advise_tables(self, plan: StepPlan) -> None:
        shards = self._gatherer.reader.shards
        numbers, rows = self._locate(plan)
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            for name in ("offsets", "masked_lm_offsets"):
                shards[number].will_need(name, row, row + 2)
            for name in ("segment_b_start", "next_sentence_label"):
                shards[number].will_need(name, row, row + 1)

    def _advise_samples(self, plan: StepPlan) -> None:
        shards = self._gatherer.reader.shards
        numbers, rows = self._locate(plan)
        spans = self._gatherer.spans(numbers, rows)
        for number, span in zip(numbers.tolist(), spans.tolist(), strict=True):
            start, end, masked_start, masked_end = span
            shards[number].will_need("input_ids", start, end)
            for name in ("masked_lm_positions", "masked_lm_ids"):
                shards[number].will_need(name, masked_start, masked_end)

    def _locate(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        """Shard and row of this rank's samples, both int64 [n]."""
        forwards = range(plan.counts.shape[1])
        ids = np.concatenate([plan.ids_of(self._rank, forward) for forward in forwards])
        return self._gatherer.reader.locate(ids)


def _major_faults() -> int:
    """How often this thread waited for a page from disk; 0 where that is not counted."""
    who = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if who is None else resource.getrusage(who).ru_majflt
