"""The sections of a run's config: frozen and typed; derived values are properties.

Every field is one setting of a TOML file (section.field); `config` puts the sections together.
"""

from dataclasses import dataclass
from typing import Literal

AttentionName = Literal["auto", "reference", "grouped", "packed", "flash", "cudnn", "triton"]
KernelsName = Literal["auto", "reference", "fused"]
HeadName = Literal["full", "chunked"]
Objective = Literal["mlm_nsp", "mlm"]
Masking = Literal["static", "dynamic"]
SamplerName = Literal["uniform", "quantile", "strata", "strata_6_3_2_5", "strata_4_2_2_4"]
BalancePolicy = Literal[
    "none", "exchange_global", "exchange_local", "presort_local", "presort_global"
]
Deal = Literal["snake", "one_direction"]
CountsPerRank = Literal["equal", "unequal"]
BalanceModel = Literal["tokens", "cost"]
LossNormalization = Literal["global", "per_rank"]
Precision = Literal["fp32", "bf16", "bf16_autocast", "fp16", "fp8"]
DataParallel = Literal["ddp", "flat", "shard_node", "shard_world"]
Binding = Literal["auto", "none"]
AllreduceDtype = Literal["as_gradients", "fp32", "bf16", "fp16"]
StepMode = Literal["eager", "captured"]
OptimImplementation = Literal["ours", "apex"]
ClipPolicy = Literal["none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce"]

STORED_MASKING_RATE = 0.15  # of every prepared set: BERT's


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection:
    """What runs where, and for how long at most: `max_steps`, "schedule" for `decay_steps`.

    `step_mode = "captured"` pads every forward to a capacity planned ahead and, on CUDA, replays
    each update as one graph. A rank that waits `hang_timeout_s` for others or for such a graph ends
    the run; so the slowest rank must have started by then. At an evaluation a rank is named that
    needs more than `straggler_factor` times the median for its own work. Every
    `noise_interval_steps` updates the gradient's noise is measured (docs/goodput.md); 0: never.
    """

    max_steps: int | Literal["schedule"] = "schedule"
    seed: int | Literal["random"] = "random"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_interval_steps: int = 20
    warm_up_steps: int = 3
    step_mode: StepMode = "eager"
    hang_timeout_s: float = 600.0
    straggler_factor: float = 1.5
    noise_interval_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """Shape, precision and attention policy of the encoder. Defaults are BERT-large.

    In `bf16` and `fp16` weights and gradients are 16-bit and the optimizer keeps fp32 masters;
    `bf16_autocast` keeps the weights fp32. `fp8` is `bf16` with the encoder's products in FP8.
    `kernels` says who computes what is around the products (`model/blocks.py`); `head = "chunked"`
    trains the masked-LM head in a bounded number of rows at a time. `objective = "mlm"` leaves out
    next-sentence prediction, and with it the pooler (docs/encoder_recipe.md).
    """

    vocab_size: int = 30522
    hidden_size: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_epsilon: float = 1e-12
    initializer_range: float = 0.02
    attention: AttentionName = "auto"
    precision: Precision = "fp32"
    kernels: KernelsName = "auto"
    head: HeadName = "full"
    objective: Objective = "mlm_nsp"

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embedding: the vocabulary rounded up to a multiple of 8."""
        return -(-self.vocab_size // 8) * 8

    @property
    def attention_share(self) -> float:
        """Multiply-adds of a token per token it attends to, over those of everything else."""
        # Per token of one layer: 4 D^2 + 2 D F in products, 2 D per attended token.
        return 2 / (4 * self.hidden_size + 2 * self.intermediate_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Which examples, in which order, and who computes what (docs/data.md).

    `dupe_factor` matters to the embedded corpus only. `masking = "dynamic"` masks every sequence
    anew each time it is trained on, `masking_rate` of its tokens; what was masked by `prepare` is
    then put back first, and stays masked in the held-out set (docs/encoder_recipe.md).
    `balance_model` says what a policy makes
    even: tokens, or cost_a * L + cost_b * L**2 of a sequence of L tokens; `bench cost` measures
    both coefficients. `exchange_window_steps` is how many steps the readers of `mpi_readers`
    exchange at a time.
    """

    corpus: Literal["prepared", "embedded"] = "prepared"
    max_seq_length: int = 512
    max_predictions: int = 76
    masking: Masking = "static"
    masking_rate: float = STORED_MASKING_RATE
    dupe_factor: int = 10
    sampler: SamplerName = "uniform"
    quantiles: int | Literal["auto"] = "auto"
    balance: BalancePolicy = "none"
    deal: Deal = "snake"
    counts_per_rank: CountsPerRank = "equal"
    balance_model: BalanceModel = "tokens"
    loader: Literal["thread", "dali", "mpi_readers"] = "thread"
    exchange_window_steps: int = 4
    cost_a: float = 1.0
    cost_b: float | Literal["flops"] = "flops"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSection:
    """Ranks, and how a global batch is cut into forward passes.

    `share_gpu = "allow"` lets more ranks run on a machine than it has GPUs, talking over gloo.
    `binding = "auto"` gives each rank cores and memory near its GPU.
    `data_parallel` says who averages gradients: torch's DistributedDataParallel, or a reducer of
    ours, with the optimizer's state whole on every rank or cut over the ranks of a node or all.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    local_batch_size: int
    grad_accum_steps: int = 1
    bucket_cap_mb: float = 25.0
    share_gpu: Literal["refuse", "allow"] = "refuse"
    binding: Binding = "auto"
    data_parallel: DataParallel = "ddp"
    allreduce_dtype: AllreduceDtype = "as_gradients"

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer update over all ranks."""
        return self.world_size * self.local_batch_size * self.grad_accum_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSection:
    """Update rule and its constants; `loss_normalization` says whose mean the loss is.

    The loss scale matters to precision `fp16` alone. `implementation = "apex"` has NVIDIA apex's
    kernels make the updates.
    """

    name: Literal["adamw", "lamb"]
    implementation: OptimImplementation = "ours"
    learning_rate: float
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    loss_normalization: LossNormalization = "global"
    initial_loss_scale: float = 2.0**16
    loss_scale_growth_steps: int = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSection:
    """Polynomial decay after a linear warm-up, in optimizer steps."""

    decay_steps: int
    form: Literal["continuous", "published"] = "continuous"
    warmup_steps: int = 0
    start_warmup_step: int = 0
    end_learning_rate: float = 0.0
    power: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSection:
    """Which gradient norm is limited, and to what (`distributed/clip_policies.py`).

    `bucket_limit = "equal_share"` gives each bucket max_norm / sqrt(bucket_count), 22 in the
    published runs; `accumulation` says what a policy before the all-reduce clips.
    """

    policy: ClipPolicy = "after_allreduce"
    max_norm: float = 1.0
    bucket_limit: Literal["by_size", "equal_share"] = "by_size"
    bucket_count: int = 22
    accumulation: Literal["accumulated", "each_forward"] = "accumulated"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSection:
    """When to evaluate, and the masked-LM accuracy that ends the run.

    `tokens_per_forward` is about how many tokens are evaluated at a time; "auto" is 16,384 on a
    GPU and 4,096 on a CPU, or a rank's share of the held-out set where that is less.
    `overlap = "side_stream"` goes on training while a copy of the weights is evaluated.
    """

    target_accuracy: float
    interval_samples: int | Literal["mlperf"] = "mlperf"
    tokens_per_forward: int | Literal["auto"] = "auto"
    overlap: Literal["none", "side_stream"] = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class MlperfSection:
    """What the log says of the submission; `enforce_rules = false` is for tests only."""

    division: Literal["closed", "open"] = "open"
    submission_org: str = "unnamed"
    submission_platform: str = "unnamed"
    submission_status: Literal["onprem", "cloud", "preview", "research"] = "onprem"
    enforce_rules: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """When a run is saved, and how many of its checkpoints stay (docs/reliability.md).

    `interval_steps` between two, beside the one at the end and one at each best evaluation; "auto"
    is about ten minutes, 0 the end only. The newest `keep_last` stay, and the best.
    """

    save: Literal["end", "never"] = "end"
    interval_steps: int | Literal["auto"] = "auto"
    keep_last: int = 2
