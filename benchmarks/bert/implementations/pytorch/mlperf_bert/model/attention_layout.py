"""Where the sequences of one batch lie, computed once and shared by all layers.

Shape letters: B sequences, T tokens, R queries.
"""

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from torch import Tensor

from mlperf_bert.model.padded_slots import (
    Groups,
    Padded,
    Rows,
    build_groups,
    build_rows,
    pad_groups,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Queries:
    """The R rows of a batch's T tokens whose context is wanted, sequence by sequence."""

    rows: Tensor  # int64 [R], ascending
    cu_seqlens: Tensor  # int32 [B + 1]: cu_seqlens[i] .. cu_seqlens[i + 1] are of sequence i
    lengths: tuple[int, ...]  # host copy: how many of each sequence
    max_length: int  # of each sequence at most, in this and all batches of the same shape


class AttentionLayout:
    """Sequence bounds of one batch; each policy's indices are made on first use, then kept.

    Args:
        lengths: tokens of each of the B sequences, on the host; zeros at the end are allowed.
        cu_seqlens: int32 [B + 1] on the model's device.
        max_length: tokens of the longest sequence that may come. Packed rows are as long, and CUDA
            kernels are started for it, whatever the batch holds: one shape for all.
    """

    def __init__(self, lengths: tuple[int, ...], cu_seqlens: Tensor, max_length: int) -> None:
        self.lengths = lengths
        self.cu_seqlens = cu_seqlens
        self.max_length = max_length
        self.queries: Queries | None = None

    def for_queries(self, queries: Queries) -> Self:
        """The same keys and values, with R rows of the tokens as queries in place of all T."""
        other = copy(self)  # with what is already known of the keys
        other.queries = queries
        return other

    def select(self, x: Tensor) -> Tensor:
        """Rows [R, ...] of the queries, of [T, ...]; all where every token is one."""
        return x if self.queries is None else x.index_select(0, self.queries.rows)

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """Queries of each sequence, on the host."""
        return self.lengths if self.queries is None else self.queries.lengths

    @property
    def cu_queries(self) -> Tensor:
        """int32 [B + 1]: query rows cu_queries[i] .. cu_queries[i + 1] are of sequence i."""
        return self.cu_seqlens if self.queries is None else self.queries.cu_seqlens

    @property
    def max_queries(self) -> int:
        """Queries of one sequence, at most."""
        return self.max_length if self.queries is None else self.queries.max_length

    @cached_property
    def groups(self) -> Groups:
        """Sequences of similar length together; built on the host, then copied."""
        return build_groups(self.lengths, self.cu_seqlens.device)

    @property
    def query_groups(self) -> Padded:
        """How queries are padded, in the groups of the keys."""
        return self.groups.keys if self.queries is None else self._own_query_groups

    @cached_property
    def _own_query_groups(self) -> Padded:
        device = self.cu_seqlens.device
        return pad_groups(self.groups.sequences, self.query_lengths, device)[0]

    @property
    def rows(self) -> Rows:
        """Several sequences a row; built on the host, then copied."""
        return self._rows_of_tokens if self.queries is None else self._rows_of_queries

    @cached_property
    def _rows_of_tokens(self) -> Rows:
        return build_rows(self.lengths, None, self.max_length, self.cu_seqlens.device)

    @cached_property
    def _rows_of_queries(self) -> Rows:
        return build_rows(self.lengths, self.query_lengths, self.max_length, self.cu_seqlens.device)
