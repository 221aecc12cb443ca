"""Short runs of a small BERT that is built as a config says, on any number of ranks."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.shards import Samples
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import make_model
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.step.eager import EagerStep
from step_cases import make_step

CPU = torch.device("cpu")
MICRO_BATCHES, SEQUENCES, MASKED = 4, 2, 2  # of an update, of each, of each sequence
SMALL = (
    *("model.num_layers=1", "data.max_seq_length=16", "parallel.bucket_cap_mb=0.015"),
    *("run.max_steps=100", "schedule.decay_steps=100"),
    *("clip.max_norm=2.5", f"parallel.local_batch_size={SEQUENCES}"),
)


@dataclass(frozen=True)
class Run:
    """One model, its optimizer and step, on this rank."""

    config: RunConfig
    info: RankInfo
    model: nn.Module
    optimizer: FlatOptimizer
    step: EagerStep

    def micro_batches(self, step):
        """This rank's share of an update's."""
        share = self.config.parallel.grad_accum_steps
        mine = range(self.info.rank * share, (self.info.rank + 1) * share)
        return tuple(micro_batch(step, number, share) for number in mine)

    def steps(self, first, last):
        """Take them; of each, the update's loss, what was clipped here, and what was skipped."""
        results = [
            self.step(number, self.micro_batches(number)) for number in range(first, last + 1)
        ]
        losses = torch.stack([result.loss.double() for result in results])
        if self.info.world_size > 1:
            dist.all_reduce(losses)
        return {
            "losses": losses / self.info.world_size,
            "clipped": torch.stack([result.clip.clipped_fraction for result in results]),
            "skipped": torch.stack([result.clip.skip for result in results]),
        }


def start(config, info, overrides, dtype=torch.float32, seed=1):
    """Start a run of a config file with SMALL and `overrides`."""
    local = info.local_world_size
    ranks = (
        *(f"parallel.nodes={info.world_size // local}", f"parallel.ranks_per_node={local}"),
        f"parallel.grad_accum_steps={MICRO_BATCHES // info.world_size}",
    )
    case = load_config(config, (*SMALL, *ranks, *overrides))
    model = make_model(case, seed, CPU).to(dtype)
    return Run(case, info, model, *make_step(model, case, info, CPU))


def micro_batch(step, number, micro_batches):
    """Random words in sequences of several lengths; `micro_batches` per rank and update."""
    random = np.random.default_rng([step, number])
    lengths = random.integers(4, 12, SEQUENCES)
    places = [np.sort(random.permutation(length)[:MASKED]) for length in lengths]
    samples = Samples(
        input_ids=random.integers(0, 69, lengths.sum()),
        lengths=lengths,
        segment_b_start=lengths // 2,
        masked_positions=np.concatenate(places),
        masked_ids=random.integers(0, 8, MASKED * SEQUENCES),  # fewer words: there is what to learn
        masked_counts=np.full(SEQUENCES, MASKED),
        next_sentence_label=random.integers(0, 2, SEQUENCES),
    )
    sequences = micro_batches * SEQUENCES  # of the mean over ranks, as the step plan has it
    return make_batch(
        samples,
        number * SEQUENCES + np.arange(SEQUENCES),
        mlm_denominator=MASKED * sequences,
        nsp_denominator=sequences,
    )
