"""The configuration of one run: all sections, complete and checked.

The sections are in `config_sections`; `config_io` reads and writes TOML. Cross-field checks are in
`config_checks` and say which option to change.
"""

import sys
from dataclasses import dataclass

from mlperf_bert.config.checks import check_closed_rules, check_shapes
from mlperf_bert.config.sections import (
    CheckpointSection,
    ClipSection,
    DataSection,
    EvalSection,
    MlperfSection,
    ModelSection,
    OptimSection,
    ParallelSection,
    RunSection,
    ScheduleSection,
)

# Raised whenever the embedded corpus, its vocabulary or the format of prepared sets changes,
# so that older sets are not mistaken for what this program makes.
EMBEDDED_RECIPE = "2"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run, complete and checked. Raises ConfigError where two settings contradict."""

    run: RunSection
    model: ModelSection
    data: DataSection
    parallel: ParallelSection
    optim: OptimSection
    schedule: ScheduleSection
    clip: ClipSection
    eval: EvalSection
    mlperf: MlperfSection
    checkpoint: CheckpointSection

    @property
    def max_steps(self) -> int:
        """Steps after which a run that has not reached its target ends."""
        steps = self.run.max_steps
        return self.schedule.decay_steps if steps == "schedule" else steps

    @property
    def eval_interval_samples(self) -> int:
        """Samples between two evaluations: set, or MLPerf's formula (rules, section 7)."""
        if self.eval.interval_samples != "mlperf":
            return self.eval.interval_samples
        samples = 0.05 * (230.23 * self.parallel.global_batch_size + 3_000_000)
        return int(samples // 25_000) * 25_000

    def evaluation_is_due(self, samples: int) -> bool:
        """Whether the step that ends at `samples` passed a multiple of the evaluation interval."""
        interval = self.eval_interval_samples
        return samples // interval > (samples - self.parallel.global_batch_size) // interval

    @property
    def processes_per_node(self) -> int:
        """What a launcher starts on a node: the ranks, and a reader process beside each."""
        return self.parallel.ranks_per_node * (2 if self.data.loader == "mpi_readers" else 1)

    @property
    def cost_coefficients(self) -> tuple[float, float]:
        """Linear and quadratic cost of a token; "flops" counts the encoder's multiply-adds."""
        if self.data.cost_b != "flops":
            return self.data.cost_a, self.data.cost_b
        return self.data.cost_a, self.data.cost_a * self.model.attention_share

    @property
    def embedded_corpus_name(self) -> str:
        """Directory name for the embedded corpus: all that its contents depend on."""
        objective = "" if self.model.objective == "mlm_nsp" else f"-{self.model.objective}"
        python = ".".join(str(number) for number in sys.version_info[:3])
        return (
            f"embedded-{EMBEDDED_RECIPE}-py{python}-v{self.model.vocab_size}"
            f"-s{self.data.max_seq_length}-p{self.data.max_predictions}-d{self.data.dupe_factor}"
            f"{objective}"
        )

    def __post_init__(self) -> None:
        check_shapes(self)
        if self.mlperf.division == "closed" and self.mlperf.enforce_rules:
            check_closed_rules(self)
