"""What a run of a config may expect where no prepared set is at hand: lengths, shapes. No torch."""

import numpy as np

from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import Balance
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.choose_capacity import plan_shapes
from mlperf_bert.data.choose_sampler import make_sampler
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.shards import IntArray
from mlperf_bert.data.step_plan import StepPlanner

SHORTEST = 5  # [CLS] word [SEP] word [SEP]
MASKED_SHARE = 0.15  # of a sequence's tokens
PLANNED_SAMPLES = 2**16  # of which a run's shapes are planned


def real_lengths(count: int, max_length: int, seed: int) -> IntArray:
    """Published lengths, int64 [count]; for another maximum than theirs, in proportion."""
    published = wikipedia_lengths()
    scaled = published.draw_evenly(count, seed) * max_length
    return np.maximum(-(-scaled // published.max_length), SHORTEST)


def masked_counts_of(lengths: IntArray, most: int) -> IntArray:
    """Masked positions of sequences of these lengths, `most` at most."""
    counts: IntArray = np.clip(np.rint(MASKED_SHARE * lengths), 1, most).astype(np.int64)
    return counts


def run_shapes(config: RunConfig) -> tuple[StaticShape, ...]:
    """What a captured run of `config` pads its forwards to, planned as a run does."""
    longest, most_masked = config.data.max_seq_length, config.data.max_predictions
    parallel = config.parallel
    seed = 1 if config.run.seed == "random" else config.run.seed
    count = max(PLANNED_SAMPLES, parallel.global_batch_size)
    lengths = real_lengths(count, longest, derive_seed(seed, "planned lengths"))
    sampler = make_sampler(
        config.data.sampler,
        order_by_length=np.argsort(lengths, kind="stable"),
        length_histogram=np.bincount(lengths, minlength=longest + 1).tolist(),
        global_batch_size=parallel.global_batch_size,
        seed=derive_seed(seed, "sampler"),
        quantiles=config.data.quantiles,
    )
    planner = StepPlanner(
        sampler,
        lengths.astype(np.uint16),
        masked_counts_of(lengths, most_masked).astype(np.uint8),
        world_size=parallel.world_size,
        grad_accum_steps=parallel.grad_accum_steps,
        balance=Balance(
            policy=config.data.balance,
            ranks_per_node=parallel.ranks_per_node,
            deal=config.data.deal,
            counts=config.data.counts_per_rank,
        ),
    )
    return plan_shapes(planner, config.max_steps, max_seqlen=longest, max_masked=most_masked)
