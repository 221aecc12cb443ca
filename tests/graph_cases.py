"""A small model, its step or evaluator, eager or captured, and batches: on a CPU or a GPU."""

from dataclasses import replace

import numpy as np
import torch

from bert_tools.bench.training_run import synthetic_samples
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import make_batch, pad
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.model.bert import BertForPretraining, make_model
from step_cases import make_step

CPU = torch.device("cpu")
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")
SEQUENCES, LONGEST, MASKED = 4, 32, 5
SMALL = StaticShape(
    tokens=96, sequences=SEQUENCES, masked=20, max_seqlen=LONGEST, max_masked=MASKED
)
LARGE = replace(SMALL, tokens=160)


class Run:
    """A small model with its optimizer and step."""

    def __init__(self, config_path, *overrides, shapes=(), device=CPU):
        self.config = load_config(
            config_path,
            (
                *(f"parallel.local_batch_size={SEQUENCES}", "run.max_steps=100"),
                *("schedule.decay_steps=100", "model.initializer_range=0.2", *overrides),
            ),
        )
        self.model = make_model(self.config, 1, device)
        self.optimizer, self.step = make_step(self.model, self.config, ONE_RANK, device, shapes)

    def losses(self, steps, change=lambda batch: batch):
        device = self.model.step.device
        return [float(self.step(step, (change(batch_of(step)).to(device),)).loss) for step in steps]

    @property
    def weights(self):
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])


def small_model(seed, device=CPU, **changes):
    """A small model for the synthetic data; its guesses differ between samples."""
    config = ModelSection(
        vocab_size=69,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    return BertForPretraining(replace(config, **changes), device, seed=seed)


def evaluator_of(data, num_tokens=600, **changes):
    """An evaluator of the held-out set, on one rank unless `changes` differ."""
    index = LengthIndex.open(data / "eval")
    reader = SampleReader(data / "eval", index.manifest)
    alone = {"rank": 0, "world_size": 1, "device": CPU, "precision": "fp32"}
    return Evaluator(index, reader, tokens_per_micro_batch=num_tokens, **{**alone, **changes})


def batch_of(step):
    lengths = np.random.default_rng(step).integers(5, LONGEST, SEQUENCES)
    samples = synthetic_samples(lengths, vocab_size=69, max_predictions=MASKED, seed=step)
    return make_batch(
        samples,
        1000 * step + np.arange(SEQUENCES),
        mlm_denominator=len(samples.masked_ids),
        nsp_denominator=SEQUENCES,
    )


def to_large(batch):
    return pad(batch, LARGE)


def to_smallest(batch):
    return pad(batch, SMALL if batch.input_ids.shape[0] <= SMALL.tokens else LARGE)


def state_of(run):
    state = {
        **run.model.state_dict(),
        **run.optimizer.changed_by_step(),
        **run.model.fp8_state(),
        "random stream": torch.get_rng_state(),
    }
    if run.model.step.is_cuda:
        state["random stream of the GPU"] = torch.cuda.get_rng_state()
    return {name: tensor.clone() for name, tensor in state.items()}


def captured(function):
    """A graph of the function, and where its results lie; kernels are compiled before."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        function()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results
