"""The measured rows of `plan balance` as a table to read."""

from collections.abc import Sequence

from bert_tools.plan.balance_rows import BalanceRow, LeftOut, Question
from bert_tools.plan.sample_index import SampleIndex

_COLUMNS = (
    *(("sampler", "<"), ("policy", "<"), ("imbalance", ">"), ("in cost", ">"), ("idle", ">")),
    *(("capacity", ">"), ("waste", ">"), ("masked", ">"), ("ladder", ">")),
    *(("exchanged", ">"), ("planning", ">")),
)
_LEGEND = (
    "imbalance: tokens of the slowest rank over the ranks' mean, mean over draws +- standard error",
    "in cost: the same of cost_a * L + cost_b * L^2; idle: time a rank waits for the slowest",
    "capacity: tokens/sequences/masked positions that hold a forward in a run of {run};",
    "waste: room of it beyond the mean forward, of tokens and of masked positions;",
    "ladder: of tokens, where each forward takes the smallest of 12 capacities 2 % apart",
    "exchanged: bytes a rank gets from others in a step; planning: median of a step on one core",
)


def in_words(
    index: SampleIndex, question: Question, rows: Sequence[BalanceRow], left_out: Sequence[LeftOut]
) -> str:
    """The whole answer, a line of column names over aligned rows."""
    cells = [[name for name, _ in _COLUMNS], *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [
        "  ".join(
            f"{text:{side}{width}}"
            for text, width, (_, side) in zip(line, widths, _COLUMNS, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join(
        [
            f"{question.nodes} nodes of {question.gpus_per_node} GPUs, {question.local_batch_size} "
            f"sequences a rank, {question.draws} draws, balanced by {question.balance_model}",
            f"{len(index.lengths):,} samples, mean length {index.mean_length:.2f} of at most "
            f"{index.max_length}: {index.source}",
            *_quantiles_in_words(rows),
            "",
            *table,
            "",
            *(line.format(run=_run_in_words(question, rows)) for line in _LEGEND),
            *_padded_in_words(rows),
            *(f"left out: {each.sampler} ({each.reason})" for each in left_out),
        ]
    )


def _cells(row: BalanceRow) -> list[str]:
    exchanged = row.exchanged_bytes_per_rank
    return [
        row.sampler,
        row.policy_in_words,
        f"{row.imbalance_tokens:.4f} +- {row.imbalance_tokens_error:.4f}",
        f"{row.imbalance_cost:.4f}",
        f"{row.idle_fraction:.2%}",
        f"{row.capacity_tokens}/{row.capacity_sequences}/{row.capacity_masked}",
        f"{row.capacity_waste:.2%}",
        f"{row.capacity_waste_masked:.2%}",
        f"{row.capacity_waste_ladder:.2%}",
        f"{exchanged / 1e6:.3f} MB" if exchanged else "0",
        f"{row.planning_ms:.2f} ms",
    ]


def _run_in_words(question: Question, rows: Sequence[BalanceRow]) -> str:
    basis = {"exact": "all drawn", "bound": "a bound from the draws"}[rows[0].capacity_basis]
    return f"{question.steps:,} steps ({basis})"


def _quantiles_in_words(rows: Sequence[BalanceRow]) -> list[str]:
    return sorted({f"quantile: {row.quantiles} quantiles" for row in rows if row.quantiles})


def _padded_in_words(rows: Sequence[BalanceRow]) -> list[str]:
    packets = {row.policy: row.padded_bytes_per_rank for row in rows if row.padded_bytes_per_rank}
    return [
        f"published packets of padded rows would take {num_bytes / 1e6:.3f} MB by {policy}"
        for policy, num_bytes in packets.items()
    ]
