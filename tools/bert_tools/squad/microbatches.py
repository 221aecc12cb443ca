"""Which windows each update learns from, cut into microbatches: one plan for every engine.

The plan is a function of lengths and settings; every rank makes the whole of it before the first
update and can build any microbatch, so only hidden states travel. The cut is that of the presort
data plane (`data/balance.py`): equal counts, similar tokens.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.data.balance import TOKENS, Balance
from mlperf_bert.data.capacity import CapacityPlan, StaticShape
from mlperf_bert.data.sampler import Int64Array, permute

_BY_TOKENS = Balance(policy="presort_global")


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """U updates of M microbatches of b windows."""

    windows: Int64Array  # [U, M, b]: numbers of windows
    tokens: Int64Array  # [U, M]

    @classmethod
    def make(
        cls, lengths: Int64Array, *, updates: int, global_batch: int, microbatches: int, seed: int
    ) -> Self:
        """Each epoch is a permutation of all windows; epochs follow each other without a gap.

        Args:
            lengths: tokens of each window of the set.
            updates: U.
            global_batch: windows of an update; a multiple of `microbatches`.
            microbatches: M.
            seed: of the order.
        """
        windows = np.stack(
            [
                _cut(drawn, lengths, microbatches)
                for drawn in _in_order(len(lengths), updates, global_batch, seed)
            ]
        )
        return cls(windows, lengths[windows].sum(axis=2))

    @property
    def num_updates(self) -> int:
        """U."""
        return len(self.windows)

    @property
    def num_samples(self) -> int:
        """Windows of all updates."""
        return self.windows.size

    def capacity(self, max_length: int) -> int:
        """Tokens of a row that holds any microbatch: exact, as all updates are planned."""
        plan = CapacityPlan(
            tokens=int(self.tokens.max()),
            sequences=self.windows.shape[2],
            masked=0,
            basis="exact",
        )
        return StaticShape.of(plan, max_seqlen=max_length, max_masked=0).tokens


def _in_order(num_windows: int, updates: int, global_batch: int, seed: int) -> Int64Array:
    """Numbers of windows [updates, global batch], epoch after epoch."""
    key = derive_seed(seed, "squad order")
    count = updates * global_batch
    epochs = -(-count // num_windows)
    in_epoch = np.arange(num_windows, dtype=np.int64)
    order = np.concatenate(
        [permute(in_epoch, num_windows, (key, epoch)) for epoch in range(epochs)]
    )
    return order[:count].reshape(updates, global_batch)


def _cut(drawn: Int64Array, lengths: Int64Array, microbatches: int) -> Int64Array:
    """The windows of an update as [M, b], similar tokens in each row."""
    cost = TOKENS(lengths[drawn].astype(np.float64))
    assignment = _BY_TOKENS(cost.reshape(microbatches, 1, -1))
    return drawn[assignment.places].reshape(microbatches, -1)


def evaluation_batches(lengths: Int64Array, tokens: int) -> list[Int64Array]:
    """All windows, the longest first, in batches of at most so many tokens (or one window)."""
    batches: list[list[int]] = []
    room = 0
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        if length > room:
            batches.append([])
            room = max(tokens, length)
        batches[-1].append(number)
        room -= length
    return [np.array(batch, dtype=np.int64) for batch in batches]
