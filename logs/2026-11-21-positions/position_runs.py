"""Runs of study_positions.py: two phases of training, accuracy by position as it goes on."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mlperf_bert.common.atomic import make_directory, replaced_file, write_file
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.gather import Gatherer
from mlperf_bert.data.index import ShardSettings
from mlperf_bert.data.loader import DirectSource
from mlperf_bert.data.open_data import RunData, open_data
from mlperf_bert.distributed.launch import read_rank_info
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.heads import correct_predictions
from mlperf_bert.parts.build import build_step, make_model
from mlperf_bert.prepare.corpus import prepare_embedded
from mlperf_bert.step.eager import EagerStep, forward

CPU = torch.device("cpu")
IMPLEMENTATION = Path(__file__).parents[2] / "benchmarks" / "bert" / "implementations" / "pytorch"
CONFIG = IMPLEMENTATION / "configs" / "cpu_tiny.toml"
WORK = "work"  # below --out: prepared sets, and weights after first phases
MASKED_SHARE = 0.15
RANGES_OF_SHORT = 4  # accuracy is counted in this many ranges up to the short length
FIRST_RATE, SECOND_RATE = 2e-3, 1.4e-3  # highest learning rate of a phase
EVALUATIONS = 16  # evenly spaced over a run
# An arm of the second phase, and the first phase whose weights it starts from.
FIRST_PHASE_OF = {"raw": "first_short", "tiled": "first_short", "long": "first_long"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What all runs have in common: lengths in tokens, phases in steps, batches in sequences."""

    short: int = 32
    long: int = 128
    first_steps: int = 3000
    first_batch: int = 32  # of the short first phase; the long one has as many tokens a step
    second_steps: int = 2000
    second_batch: int = 16
    vocab_size: int = 2048
    hidden_size: int = 128

    def __post_init__(self) -> None:
        if self.short % RANGES_OF_SHORT or self.short >= self.long:
            problem = f"is {self.short}, the long length {self.long}"
            remedy = f"set it to a multiple of {RANGES_OF_SHORT} below that"
            raise ConfigError("--short", problem, remedy)

    @property
    def range_width(self) -> int:
        """Positions that are counted together."""
        return self.short // RANGES_OF_SHORT


def next_run(out: Path, seeds: int) -> tuple[str, int] | None:
    """The first run, by seed and arm, that is not finished: its name and its seed."""
    for seed in range(seeds):
        for arm, first in FIRST_PHASE_OF.items():
            if result_path(out, arm, seed).exists():
                continue
            return (arm if weights_path(out, first, seed).exists() else first), seed
    return None


def result_path(out: Path, run: str, seed: int) -> Path:
    """Where a run's JSON lies."""
    return out / f"seed_{seed}_{run}.json"


def weights_path(out: Path, first: str, seed: int) -> Path:
    """Where the weights after a first phase lie: written last, so they say that it is finished."""
    return out / WORK / f"seed_{seed}_{first}.safetensors"


def run_and_store(study: Study, run: str, seed: int, out: Path) -> None:
    """Run one first phase or one arm; write its JSON, of a first phase also its weights."""
    short, long = (open_set(study, out, length) for length in (study.short, study.long))
    if short.train.manifest.vocabulary_sha256 != long.train.manifest.vocabulary_sha256:
        raise DataError(
            str(out / WORK), "the vocabulary depends on the length", "delete that directory"
        )
    data = short if run == "first_short" else long
    is_first = run not in FIRST_PHASE_OF
    length = data.train.manifest.max_seq_length
    first_batch = _first_batch(study, data, short) if is_first else None
    config = phase_config(study, seed, length, first_batch)
    model = make_model(config, seed, CPU)
    if not is_first:
        start_from(model, weights_path(out, FIRST_PHASE_OF[run], seed))
    if run == "tiled":
        tile_positions(model.bert.embeddings.position_embeddings.weight, study.short)
    counter = PositionCounter(data, study.range_width)
    result = {
        "schema_version": 1,
        "run": run,
        "seed": seed,
        "study": asdict(study),
        "vocabulary_sha256": data.train.manifest.vocabulary_sha256,
        "context_free_accuracy": context_free_accuracy(data),
        "global_batch_size": config.parallel.global_batch_size,
        "masked": counter.masked,
        "evaluations": [
            {"samples": step * config.parallel.global_batch_size, **counter(model)}
            for step in train(model, config, data)
        ],
    }
    write_file(result_path(out, run, seed), json.dumps(result).encode())
    if is_first:
        with replaced_file(weights_path(out, run, seed)) as temporary:
            save_file(dict(model.state_dict()), temporary)


def open_set(study: Study, out: Path, length: int) -> RunData:
    """The embedded corpus at one of the two lengths, made where it is not there."""
    directory = out / WORK / f"length_{length}"
    config = load_config(CONFIG, config_overrides(study, length))
    make_directory(directory)
    settings = ShardSettings(
        max_seq_length=length,
        max_predictions=config.data.max_predictions,
        seed=12345,
        dupe_factor=config.data.dupe_factor,
    )
    prepare_embedded(directory, study.vocab_size, settings)
    return open_data(config, directory, rank=0)


def config_overrides(study: Study, length: int) -> list[str]:
    """What cpu_tiny is changed by in every run with sequences of `length`."""
    return [
        f"model.vocab_size={study.vocab_size}",
        f"model.hidden_size={study.hidden_size}",
        f"model.intermediate_size={4 * study.hidden_size}",
        "model.num_heads=4",
        f"model.max_position_embeddings={study.long}",
        f"data.max_seq_length={length}",
        f"data.max_predictions={int(np.ceil(MASKED_SHARE * length))}",
        "parallel.ranks_per_node=1",
        "mlperf.enforce_rules=false",
    ]


def phase_config(study: Study, seed: int, length: int, first_batch: int | None) -> RunConfig:
    """The config of a first phase with that batch, or of a second one where it is None.

    Its learning rate falls to cpu_tiny's lowest over the whole phase.
    """
    if first_batch is not None:
        steps, batch = study.first_steps, first_batch
        rate, warmup_steps = FIRST_RATE, steps // 15
    else:
        steps, batch = study.second_steps, study.second_batch
        rate, warmup_steps = SECOND_RATE, steps // 40
    return load_config(
        CONFIG,
        [
            *config_overrides(study, length),
            f"run.seed={seed}",
            f"run.max_steps={steps}",
            f"parallel.local_batch_size={batch}",
            f"optim.learning_rate={rate}",
            f"schedule.warmup_steps={warmup_steps}",
            f"schedule.decay_steps={steps}",
        ],
    )


def _first_batch(study: Study, data: RunData, short: RunData) -> int:
    """Sequences a step that have as many tokens as `first_batch` short ones, on average."""
    shorter, longer = (float(np.mean(each.train.lengths)) for each in (short, data))
    return round(study.first_batch * shorter / longer)


def context_free_accuracy(data: RunData) -> float:
    """What guessing without context reaches on the held-out set."""
    baseline = data.held_out.manifest.baseline
    assert baseline is not None  # prepare always measures it there
    return baseline.context_free_accuracy


def start_from(model: BertForPretraining, path: Path) -> None:
    """Take the weights of a first phase."""
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        problem = f"holds no weights of this study ({reason})"
        raise DataError(str(path), problem, "delete it") from None


@torch.no_grad()
def tile_positions(rows: Tensor, short: int) -> None:
    """Repeat the first `short` of the position rows [positions, D] over all others, in place."""
    rows.copy_(rows[torch.arange(len(rows)) % short])


class PositionCounter:
    """Counts right answers of the whole held-out set by the masked token's position."""

    def __init__(self, data: RunData, width: int) -> None:
        """Ranges are `width` positions wide, from 0 to the set's longest sequence."""
        order = data.held_out.order_by_length.astype(np.int64)
        gatherer = Gatherer(data.held_out_reader)
        self._batches = [
            gatherer.batch(order[start : start + 64], mlm_denominator=1.0, nsp_denominator=1.0)
            for start in range(0, len(order), 64)
        ]
        self._ranges = [
            batch.position_ids[batch.masked_token_index] // width for batch in self._batches
        ]
        self._num_ranges = -(-data.held_out.manifest.max_seq_length // width)
        self._width = width
        self.masked = self._sums([torch.ones(len(ranges)) for ranges in self._ranges])

    @torch.inference_mode()
    def __call__(self, model: BertForPretraining) -> dict[str, list[Any]]:
        """`correct`, beside `masked`, and the mean norm of the position rows of each range."""
        correct = [
            correct_predictions(forward(model, batch, "fp32"), batch).float()
            for batch in self._batches
        ]
        norms = model.bert.embeddings.position_embeddings.weight.norm(dim=1)
        means = [part.mean().item() for part in norms.split(self._width)]
        return {"correct": self._sums(correct), "row_norms": means[: self._num_ranges]}

    def _sums(self, weights: Sequence[Tensor]) -> list[int]:
        sums = torch.bincount(torch.cat(self._ranges), torch.cat(list(weights)), self._num_ranges)
        return [int(each) for each in sums.tolist()]


def train(model: nn.Module, config: RunConfig, data: RunData) -> Iterator[int]:
    """Train for `run.max_steps` from a new optimizer; yields the steps to evaluate at, from 0."""
    assert isinstance(config.run.seed, int)
    planner = make_planner(config, data.train, config.run.seed)
    source = DirectSource(Gatherer(data.train_reader), rank=0)
    update = make_update(model, config)
    evaluated = evaluation_steps(config.max_steps)
    yield 0
    for step in range(1, config.max_steps + 1):
        update(step, source.micro_batches(planner.plan(step)))
        if step in evaluated:
            yield step


def make_update(model: nn.Module, config: RunConfig) -> EagerStep:
    """The step of a run on this one process."""
    _, step = build_step(model, config, read_rank_info({}), torch.device("cpu"))
    return step


def evaluation_steps(last: int) -> set[int]:
    """Steps after which to evaluate: evenly spaced, and three more within the first interval."""
    interval = last / EVALUATIONS
    numbers = [0.125, 0.25, 0.5, *range(1, EVALUATIONS + 1)]
    return {max(1, round(number * interval)) for number in numbers}
