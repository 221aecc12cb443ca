"""What `plan cluster` is asked: options checked, and turned into jobs, drawn steps and a run."""

from dataclasses import dataclass, replace
from typing import Literal

from bert_tools.plan.cluster.constants import Constants
from bert_tools.plan.cluster.machine import AcceleratorName, MatrixPrecision, make_machine
from bert_tools.plan.cluster.run import RunInputs, RunTime, mean_step_ms, run_time, simulate_steps
from bert_tools.plan.cluster.software import (
    Sharding,
    Software,
    SoftwareName,
    software,
    with_capture,
    with_optimizer,
)
from bert_tools.plan.cluster.step import Job, StepTiming
from bert_tools.plan.cluster.workload import Dealing, Workload, draw_steps
from bert_tools.plan.sample_index import SampleIndex
from bert_tools.plan.samples_to_target import Estimate, samples_to_target
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import (
    BalancePolicy,
    ClipPolicy,
    ModelSection,
    SamplerName,
)

MOST_RANKS = 200_000
MOST_SEQUENCES = 2**23  # of a global batch, each held in memory several times
MOST_DRAWS = 1000
_MOST_DRAWN_RANKS = 200_000  # of all draws of a step together
MOST_RANKS_OF_A_NODE = 576  # the most that NVLink's maker names for one domain
_LEAST_GB_S, _MOST_GB_S = 0.01, 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One machine, program and recipe. Names are those of the options and of the config."""

    nodes: int
    gpus_per_node: int
    local_batch_size: int
    accelerator: AcceleratorName = "a100"
    node_gb_s: float | None = None
    program: SoftwareName = "ours"
    capture: Literal["on", "off"] | None = None
    sharding: Sharding | None = None
    precision: MatrixPrecision = "bf16"
    sampler: SamplerName = "uniform"
    balance: BalancePolicy = "presort_global"
    clip: ClipPolicy = "bucket_before_allreduce"
    recipe: str = "closed_lamb"
    samples: float | None = None
    start_up_s: float = 0.0
    skipped_steps: int = 0
    evaluation_interval: int | None = None  # samples; None: by the rules
    draws: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        _check_counts(self)
        machine = make_machine(self.accelerator, 1, 1)
        if not machine.accelerator.peak_tflops(self.precision):
            problem = f"{self.precision}: {self.accelerator} has no such units"
            raise ConfigError("--precision", problem, "use bf16, or another accelerator")
        if self.node_gb_s is not None and not _LEAST_GB_S <= self.node_gb_s <= _MOST_GB_S:
            problem = f"is {self.node_gb_s:g}"
            remedy = f"set it within {_LEAST_GB_S:g} .. {_MOST_GB_S:g} GB/s"
            raise ConfigError("--node-bandwidth", problem, remedy)

    @property
    def world_size(self) -> int:
        """Accelerators."""
        return self.nodes * self.gpus_per_node

    @property
    def software(self) -> Software:
        """The program with what was asked of it."""
        program = software(self.program)
        if self.capture is not None and self.capture != program.capture:
            program = with_capture(program, self.capture)
        if self.sharding is not None:
            program = replace(program, sharding=self.sharding)
        return with_optimizer(program, "lamb" if self.recipe.startswith("closed") else "adam")

    @property
    def dealing(self) -> Dealing:
        """How batches are drawn and dealt."""
        return Dealing(
            local_batch_size=self.local_batch_size,
            sampler=self.sampler,
            balance=self.balance,
            seed=self.seed,
        )

    @property
    def global_batch_size(self) -> int:
        """Sequences a step."""
        return self.world_size * self.dealing.sequences(self.software.layout)

    def job(self, constants: Constants) -> Job:
        """As the simulator takes it."""
        machine = make_machine(self.accelerator, self.nodes, self.gpus_per_node, self.node_gb_s)
        return Job(
            machine=machine,
            program=self.software,
            constants=constants,
            model=ModelSection(),
            precision=self.precision,
            clip=self.clip,
        )

    def works(self, index: SampleIndex) -> list[Workload]:
        """Drawn steps; fewer where there are very many ranks."""
        draws = max(1, min(self.draws, _MOST_DRAWN_RANKS // self.world_size))
        return draw_steps(index, self.dealing, self.software, self.nodes, self.gpus_per_node, draws)

    def estimate(self) -> Estimate:
        """Samples to the target: given, or what the recipe needs at this batch."""
        if self.samples is None:
            return samples_to_target(self.global_batch_size, self.recipe)
        given = self.samples
        return Estimate(samples=given, low=given, high=given, source="given", in_range=True)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Drawn steps of one question, and the run that they make up."""

    question: Question
    timings: list[StepTiming]
    works: list[Workload]
    run: RunTime
    estimate: Estimate

    @property
    def sequences_per_s(self) -> float:
        """Over steps, evaluations and start-up left out."""
        return 1e3 * self.question.global_batch_size / self.run.step_ms

    @property
    def imbalance_tokens(self) -> float:
        """Largest over mean of the ranks' real tokens, mean over draws."""
        each = [float(work.real_tokens.max() / work.real_tokens.mean()) for work in self.works]
        return sum(each) / len(each)

    @property
    def padding_fraction(self) -> float:
        """Tokens computed beyond the real ones, over the real ones."""
        real = sum(float(work.real_tokens.sum()) for work in self.works)
        return sum(float(work.tokens.sum()) for work in self.works) / real - 1

    @property
    def parts_ms(self) -> dict[str, float]:
        """Where a step goes on the mean rank, ms; the sum is the step."""
        names = self.timings[0].parts
        return {
            name: sum(float(timing.parts[name].mean()) for timing in self.timings)
            / len(self.timings)
            for name in names
        }

    def mean_ms(self, name: Literal["communication_ms", "exposed_ms"]) -> float:
        """Of a property of the steps, mean over draws."""
        return sum(float(getattr(timing, name)) for timing in self.timings) / len(self.timings)


def answer(question: Question, index: SampleIndex, constants: Constants) -> Answer:
    """Simulate what is asked. Raises ConfigError where the batch cannot be drawn."""
    job, works, estimate = question.job(constants), question.works(index), question.estimate()
    timings = simulate_steps(job, works, question.seed)
    inputs = RunInputs(
        global_batch_size=question.global_batch_size,
        samples=estimate.samples,
        start_up_s=question.start_up_s,
        skipped_steps=question.skipped_steps,
        evaluation_interval=question.evaluation_interval or "mlperf",
    )
    run = run_time(job, mean_step_ms(timings), inputs)
    return Answer(question=question, timings=timings, works=works, run=run, estimate=estimate)


def _check_counts(question: Question) -> None:
    for name in ("nodes", "gpus_per_node", "local_batch_size", "draws"):
        _check_at_least(question, name, 1)
    for name in ("start_up_s", "skipped_steps", "seed"):
        _check_at_least(question, name, 0)
    for name in ("samples", "evaluation_interval"):
        if getattr(question, name) is not None:
            _check_at_least(question, name, 1)
    if question.gpus_per_node > MOST_RANKS_OF_A_NODE:
        problem = f"is {question.gpus_per_node:,}"
        remedy = f"set it to {MOST_RANKS_OF_A_NODE} at most: larger nodes are not modelled"
        raise ConfigError("--gpus-per-node", problem, remedy)
    if question.world_size > MOST_RANKS:
        problem = f"makes {question.world_size:,} ranks"
        raise ConfigError("--nodes", problem, f"keep them to {MOST_RANKS:,}")
    if question.global_batch_size > MOST_SEQUENCES:
        problem = f"makes a global batch of {question.global_batch_size:,} sequences"
        raise ConfigError("--local-batch-size", problem, f"keep it to {MOST_SEQUENCES:,}")
    if question.draws > MOST_DRAWS:
        raise ConfigError("--draws", f"is {question.draws}", f"set it to {MOST_DRAWS} at most")


def _check_at_least(question: Question, name: str, least: int) -> None:
    value, most = getattr(question, name), 1e12
    if not least <= value <= most:
        option = "--" + name.replace("_", "-")
        raise ConfigError(option, f"is {value:g}", f"set it within {least} .. {most:g}")
