"""The sections of a run's config, as frozen dataclasses. Derived values are properties.

Every field is a setting `section.field` of a TOML file. Its annotation has the type, the range of a
number and the meaning, as in `Annotated[int, Bounds(1, 10), "What it sets."]`. `config list` and
docs/reference/settings.md show all three. Ranges are wide, because they state what this software
can handle, not what is sensible. Each section checks its values when it is built. `run_config.py`
combines the sections.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from mlperf_bert.config.bounds import SMALLEST, UNLIMITED, Bounds, check_bounds
from mlperf_bert.errors import ConfigError

Architecture = Literal["bert", "modern"]
# The published name of each architecture.
ARCHITECTURES: dict[Architecture, str] = {"bert": "BERT", "modern": "ModernBERT"}
AttentionName = Literal["auto", "reference", "grouped", "flash", "triton"]
KernelsName = Literal["auto", "reference", "fused"]
Objective = Literal["mlm_nsp", "mlm"]
Masking = Literal["static", "dynamic"]
SamplerName = Literal["uniform", "quantile", "stratified_6_3_2_5", "stratified_4_2_2_4"]
BalancePolicy = Literal[
    "none", "exchange_global", "exchange_local", "presort_local", "presort_global"
]
CountsPerRank = Literal["equal", "unequal"]
LossNormalization = Literal["global", "per_rank"]
Precision = Literal["fp32", "bf16", "bf16_autocast", "fp8"]
DataParallel = Literal["ddp", "flat", "zero1_node", "zero1"]
AllreduceDtype = Literal["as_gradients", "bf16"]
StepMode = Literal["eager", "captured"]
OptimImplementation = Literal["ours", "apex"]
ClipPolicy = Literal["none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce"]
# Clip policies whose result does not depend on which rank has which samples.
CLIPPED_TOGETHER = frozenset(("none", "after_allreduce"))
# Samplers of the published 1,024-GPU runs (arXiv 2402.02447).
PUBLISHED_STRATA = frozenset(("stratified_6_3_2_5", "stratified_4_2_2_4"))
MAX_PREDICTIONS = 76  # masked positions per sample, as in MLPerf's data
# Settings that only ModernBERT's layers use.
OF_MODERN = ("attention_window", "global_attention_every", "rope_base_global", "rope_base_local")
TOKEN_TYPES = 2  # a pair has two segments, and each has its own embedding


STORED_MASKING_RATE = 0.15  # of every prepared set, as in BERT
# Rates from 0.15 to 0.3 are usual. Above 0.4, the shortest sequences have too few tokens to mask.
MASKING_RATES = Bounds(0.05, 0.4)

MOST_BATCH = 2**20  # sequences per update, because samplers keep several numbers for each
_MOST_PARAMETERS = 2**36  # 256 GiB of fp32 weights
_MOST_STEPS = 10**7  # 80 MB, because the device holds the learning rates of all steps
_STEPS = Bounds(1, _MOST_STEPS)
_STEPS_OR_NONE = Bounds(0, _MOST_STEPS)
_MOST_SAMPLES = 10**13
_SAMPLES = Bounds(1, _MOST_SAMPLES)
_SAMPLES_OR_NONE = Bounds(0, _MOST_SAMPLES)
_SEED = Bounds(0, 2**63 - 1)
_DROPOUT = Bounds(0.0, 0.999)
_BETA = Bounds(0.0, 0.999999999)
_FROM_ZERO, _ABOVE_ZERO = Bounds(0.0, UNLIMITED), Bounds(SMALLEST, UNLIMITED)


class _Section:
    """Base class of sections, which raises ConfigError if a number is outside its bounds."""

    __slots__ = ()

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Section").lower()
        check_bounds(self, lambda field: f"{section}.{field}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSection(_Section):
    """The device, the length and the start of a run.

    With `step_mode = "captured"`, every micro-batch is padded to a capacity that was planned before
    training. On CUDA each update is then replayed as one CUDA graph. `init_state = "training"`
    starts a further phase of training from another run's checkpoint
    (docs/concepts/encoder_recipe.md).
    """

    max_steps: Annotated[
        int | Literal["schedule"],
        _STEPS,
        "Number of steps after which the run ends if it has not reached its target. "
        "'schedule' means schedule.decay_steps.",
    ] = "schedule"
    seed: Annotated[
        int | Literal["random"],
        _SEED,
        "Seed of the weights, the sample order and dropout. 'random' draws one and logs it.",
    ] = "random"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        "Device of every rank. 'auto' uses a GPU if the machine has one, and otherwise the CPU.",
    ] = "auto"
    log_interval_steps: Annotated[
        int, _STEPS, "Number of steps between two progress lines and records of metrics."
    ] = 20
    warm_up_steps: Annotated[
        int,
        Bounds(0, 10_000),
        "Number of untimed steps before the clock starts. Their effect on the weights is undone.",
    ] = 3
    step_mode: Annotated[
        StepMode,
        "'eager' runs each step as PyTorch code. 'captured' pads micro-batches to planned sizes, "
        "and replays each update as one CUDA graph on a GPU.",
    ] = "eager"
    hang_timeout_s: Annotated[
        float,
        Bounds(0.1, 604_800.0),
        "Seconds that a rank waits for other ranks, for data, or for the end of a step or an "
        "evaluation (on a CPU: of a batch of it), before it ends the run. "
        "The slowest rank must have started by then.",
    ] = 600.0
    slurm_minutes: Annotated[
        int,
        Bounds(1, 100_000),
        "Minutes of a SLURM job's time limit for one run, start-up included.",
    ] = 240
    init_checkpoint: Annotated[
        str, "Directory of the checkpoint whose weights the run starts from. '' draws new weights."
    ] = ""
    init_state: Annotated[
        Literal["weights", "training"],
        "'weights' loads only the weights of run.init_checkpoint. 'training' also loads the "
        "optimizer's state.",
    ] = "weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection(_Section):
    """The shape, precision and kernels of the encoder. The defaults are BERT-large.

    `architecture = "modern"` is ModernBERT (arXiv 2412.13663, `model/modern.py`). It has rotary
    position embeddings instead of a table of learned ones, and no token types. One in every
    `global_attention_every` layers is global, which means that a token attends to its whole
    sequence. In the other layers a token attends to `attention_window // 2` tokens on each side.
    """

    architecture: Annotated[
        Architecture, "Architecture of the encoder. 'modern' is ModernBERT (arXiv 2412.13663)."
    ] = "bert"
    vocab_size: Annotated[int, Bounds(1, 2**22), "Number of tokens in the vocabulary."] = 30522
    hidden_size: Annotated[
        int, Bounds(1, 2**16), "Width of the encoder's layers. It must be a multiple of num_heads."
    ] = 1024
    num_layers: Annotated[int, Bounds(1, 1000), "Number of encoder layers."] = 24
    num_heads: Annotated[int, Bounds(1, 1024), "Number of attention heads in each layer."] = 16
    intermediate_size: Annotated[
        int, Bounds(1, 2**18), "Width of the feed-forward block in each layer."
    ] = 4096
    max_position_embeddings: Annotated[
        int, Bounds(1, 2**20), "Longest sequence, in tokens, that the model can process."
    ] = 512
    hidden_dropout: Annotated[
        float, _DROPOUT, "Probability of dropping an output of the embeddings and of each block."
    ] = 0.1
    attention_dropout: Annotated[
        float, _DROPOUT, "Probability of dropping an attention weight."
    ] = 0.1
    layer_norm_epsilon: Annotated[
        float, Bounds(0.0, 1.0), "Constant added to the variance in layer normalization."
    ] = 1e-12
    initializer_range: Annotated[
        float, Bounds(0.0, 100.0), "Standard deviation of newly drawn weights."
    ] = 0.02
    attention: Annotated[
        AttentionName,
        "Implementation of attention. 'auto' chooses 'triton' or 'flash' on a GPU, and 'grouped' "
        "on a CPU. 'reference' is slow and easy to read.",
    ] = "auto"
    precision: Annotated[
        Precision,
        "'bf16' trains 16-bit weights with fp32 master copies. 'bf16_autocast' keeps fp32 weights "
        "and computes in bf16. 'fp8' is 'bf16' with matrix products in FP8.",
    ] = "fp32"
    kernels: Annotated[
        KernelsName,
        "Implementation of the operations around the matrix products, such as normalization. "
        "'auto' uses the fused kernels if they can run.",
    ] = "auto"
    objective: Annotated[
        Objective,
        "Training tasks. 'mlm_nsp' predicts masked words and the next sentence, as in BERT. 'mlm' "
        "predicts only masked words, and the model then has no pooler.",
    ] = "mlm_nsp"
    global_attention_every: Annotated[
        int,
        Bounds(1, 1000),
        "In ModernBERT, one layer in this many attends to the whole sequence.",
    ] = 3
    attention_window: Annotated[
        int,
        Bounds(2, 2**20),
        "Attention window, in tokens, of ModernBERT's layers that do not attend to the whole "
        "sequence.",
    ] = 128
    rope_base_global: Annotated[
        float,
        Bounds(1.0, 1e12),
        "Base of the rotary positions in ModernBERT's layers that attend to whole sequences.",
    ] = 160_000.0
    rope_base_local: Annotated[
        float,
        Bounds(1.0, 1e12),
        "Base of the rotary positions in ModernBERT's layers that attend to a window.",
    ] = 10_000.0

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.hidden_size % self.num_heads:
            problem = f"{self.num_heads} does not divide model.hidden_size ({self.hidden_size})"
            raise ConfigError("model.num_heads", problem, "change one of these two settings")
        if self.architecture == "modern" and self.head_size % 2:
            problem = f"gives the odd head size {self.head_size}, but ModernBERT needs an even size"
            raise ConfigError("model.num_heads", problem, "choose another number of heads")
        if self.architecture == "modern" and self.objective != "mlm":
            problem = f"{self.objective!r} does not work with model.architecture 'modern'"
            remedy = "use 'mlm', because ModernBERT has no sentence pairs"
            raise ConfigError("model.objective", problem, remedy)
        for name in OF_MODERN:
            default = ModelSection.__dataclass_fields__[name].default
            if self.architecture == "bert" and getattr(self, name) != default:
                remedy = "remove this setting, or set model.architecture to 'modern'"
                raise ConfigError(f"model.{name}", "has no effect on BERT", remedy)
        count = self.num_parameters
        if count > _MOST_PARAMETERS:
            problem = f"gives {count:,} parameters, but at most {_MOST_PARAMETERS:,} are possible"
            raise ConfigError("model.hidden_size", problem, "use fewer or narrower layers")

    @property
    def head_size(self) -> int:
        """Number of channels per attention head."""
        return self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the word embedding (vocabulary size, rounded up to a multiple of 8)."""
        return -(-self.vocab_size // 8) * 8

    @property
    def num_parameters(self) -> int:
        """Number of parameters of a `BertForPretraining` with these settings."""
        hidden, wide, vocabulary = self.hidden_size, self.intermediate_size, self.padded_vocab_size
        if self.architecture == "modern":  # its first layer has no norm before the attention
            layer = 4 * hidden**2 + 3 * hidden * wide + 2 * hidden
            return (vocabulary + hidden + 2) * hidden + self.num_layers * layer + vocabulary
        dense = hidden * (hidden + 1)
        tables = (vocabulary + self.max_position_embeddings + TOKEN_TYPES) * hidden
        layer = 4 * dense + 2 * hidden * wide + wide + hidden + 4 * hidden
        heads = dense + 2 * hidden + vocabulary
        if self.objective == "mlm_nsp":
            heads += dense + 2 * hidden + 2
        return tables + 2 * hidden + self.num_layers * layer + heads

    def is_global(self, layer: int) -> bool:
        """Return True if every token attends to its whole sequence in layer number `layer`."""
        return self.architecture == "bert" or layer % self.global_attention_every == 0

    @property
    def reach(self) -> int:
        """Number of tokens on each side within a layer's attention window, or 0 for BERT."""
        return self.attention_window // 2 if self.architecture == "modern" else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection(_Section):
    """The training examples, their order, and their assignment to ranks (docs/concepts/data.md).

    With `masking = "dynamic"`, the masks that `prepare` stored are first undone, and each batch
    gets new masks. The held-out set always keeps its stored masks
    (docs/concepts/encoder_recipe.md).
    """

    corpus: Annotated[
        Literal["prepared", "embedded"],
        "'prepared' is data that you prepared. 'embedded' is a small corpus made from the "
        "documentation of your own Python.",
    ] = "prepared"
    max_seq_length: Annotated[
        int, Bounds(8, 65_535), "Longest training example in tokens, special tokens included."
    ] = 512
    max_predictions: Annotated[
        int, Bounds(1, 65_535), "Largest number of masked positions in an example."
    ] = MAX_PREDICTIONS
    masking: Annotated[
        Masking,
        "'static' uses the masks stored by `prepare`. 'dynamic' draws new masks each time an "
        "example is trained on.",
    ] = "static"
    masking_rate: Annotated[
        float, MASKING_RATES, "Fraction of the tokens that dynamic masking masks."
    ] = STORED_MASKING_RATE
    sampler: Annotated[
        SamplerName,
        "How batches are drawn. 'uniform' shuffles all examples. 'quantile' gives every batch the "
        "same mix of lengths. The stratified samplers are those of the published 1,024-GPU runs "
        "(arXiv 2402.02447).",
    ] = "uniform"
    skip_samples: Annotated[
        int,
        _SAMPLES_OR_NONE,
        "Number of examples to skip at the start because an earlier phase has trained on them.",
    ] = 0
    balance: Annotated[
        BalancePolicy,
        "How a batch is divided among ranks, so that each gets about the same number of tokens. "
        "'presort_global' balances best and needs no communication.",
    ] = "none"
    counts_per_rank: Annotated[
        CountsPerRank,
        "Whether all micro-batches have the same number of sequences. 'unequal' balances small "
        "micro-batches better.",
    ] = "equal"
    loader: Annotated[
        Literal["thread", "dali", "mpi_readers"],
        "What reads the examples. 'thread' is a thread of each rank, 'dali' is NVIDIA DALI, and "
        "'mpi_readers' is a second process per rank, which needs MPI.",
    ] = "thread"

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.masking == "static" and self.masking_rate != STORED_MASKING_RATE:
            problem = (
                f"{self.masking_rate} does not work with data.masking 'static', because prepared "
                f"sets have a masking rate of {STORED_MASKING_RATE}"
            )
            raise ConfigError("data.masking_rate", problem, "set data.masking to 'dynamic'")
        needed = int(self.masking_rate * self.max_seq_length)  # 76 of 512, as in MLPerf
        if self.masking == "dynamic" and needed > self.max_predictions:
            problem = (
                f"{self.max_predictions} is too small, because data.masking_rate needs {needed}"
            )
            remedy = f"use {needed}, or lower data.masking_rate"
            raise ConfigError("data.max_predictions", problem, remedy)
        if self.skip_samples and self.sampler in PUBLISHED_STRATA:
            problem = f"{self.skip_samples} does not work with data.sampler {self.sampler!r}"
            remedy = "use 0, or set data.sampler to 'uniform' or 'quantile'"
            raise ConfigError("data.skip_samples", problem, remedy)

    @property
    def dupe_factor(self) -> int:
        """Number of passes over the embedded corpus. Each pass stores new masks.

        Dynamic masking needs only one pass.
        """
        return 10 if self.masking == "static" else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSection(_Section):
    """The ranks, and how they share a global batch.

    The global batch is nodes x ranks_per_node x local_batch_size x grad_accum_steps sequences.
    """

    nodes: Annotated[int, Bounds(1, 2**16), "Number of machines."] = 1
    ranks_per_node: Annotated[
        int, Bounds(1, 256), "Number of training processes per machine, usually one per GPU."
    ] = 1
    local_batch_size: Annotated[
        int, Bounds(1, MOST_BATCH), "Number of sequences in a micro-batch of one rank."
    ]
    grad_accum_steps: Annotated[
        int, Bounds(1, 2**16), "Number of micro-batches that each rank computes per update."
    ] = 1
    bucket_cap_mb: Annotated[
        float, Bounds(1e-6, 1e6), "Size in MiB at which a bucket of gradients is sent."
    ] = 25.0
    share_gpu: Annotated[
        Literal["refuse", "allow"],
        "Whether more ranks than GPUs may run on a machine. They then communicate over gloo.",
    ] = "refuse"
    data_parallel: Annotated[
        DataParallel,
        "What averages gradients. 'ddp' is PyTorch's DistributedDataParallel, and 'flat' is this "
        "project's reducer. 'zero1_node' and 'zero1' use the reducer too, and shard the "
        "optimizer's state over the ranks of a node or of the job.",
    ] = "ddp"
    allreduce_dtype: Annotated[
        AllreduceDtype,
        "Data type in which ranks send gradients. 'as_gradients' keeps their own data type.",
    ] = "as_gradients"

    network_gb_s: Annotated[
        float | Literal["unknown"],
        Bounds(1e-6, 1e6),
        "Bandwidth of a node's network ports in GB/s, in one direction. `network-test` fails if an "
        "all-reduce over several nodes reaches less than a quarter of it.",
    ] = "unknown"

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per optimizer update, over all ranks."""
        return self.world_size * self.grad_accum_steps

    @property
    def global_batch_size(self) -> int:
        """Number of sequences per optimizer update, over all ranks."""
        return self.num_micro_batches * self.local_batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSection(_Section):
    """The optimizer and its constants."""

    name: Annotated[
        Literal["adamw", "lamb", "muon"],
        "Update rule. 'muon' is for the weight matrices. AdamW updates all other weights.",
    ]
    implementation: Annotated[
        OptimImplementation,
        "What computes the updates. 'ours' is this project's kernels, and 'apex' is NVIDIA apex's.",
    ] = "ours"
    learning_rate: Annotated[
        float, _FROM_ZERO, "Highest learning rate, which is reached at the end of the warm-up."
    ]
    beta_1: Annotated[
        float,
        _BETA,
        "Decay rate of the mean of past gradients. Muon's matrices use a momentum of 0.95 instead.",
    ] = 0.9
    beta_2: Annotated[float, _BETA, "Decay rate of the mean of past squared gradients."] = 0.999
    epsilon: Annotated[float, _ABOVE_ZERO, "Constant added to the denominator of an update."] = 1e-6
    weight_decay: Annotated[
        float,
        _FROM_ZERO,
        "Decoupled weight decay. It is multiplied by the learning rate, and does not apply to "
        "biases and normalization weights.",
    ] = 0.01
    loss_normalization: Annotated[
        LossNormalization,
        "'global' gives every masked token of the batch the same weight. 'per_rank' averages the "
        "mean losses of all ranks' micro-batches.",
    ] = "global"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSection(_Section):
    """The schedule of the learning rate, a linear warm-up and a decay (`optim/schedule.py`)."""

    decay_steps: Annotated[
        int,
        _STEPS,
        "Step at which the decay of the learning rate ends. It must follow the warm-up.",
    ]
    form: Annotated[
        Literal["continuous", "published", "wsd"],
        "'continuous' decays linearly after the warm-up. 'published' does the same, but jumps at "
        "the end of the warm-up as in the published 1,024-GPU runs. 'wsd' keeps the rate "
        "constant, and lowers it at the end.",
    ] = "continuous"
    warmup_steps: Annotated[
        int, _STEPS_OR_NONE, "Number of steps in which the learning rate rises linearly."
    ] = 0
    start_warmup_step: Annotated[
        int,
        Bounds(-_MOST_STEPS, _MOST_STEPS),
        "Step at which the warm-up starts. If it is negative, the run starts partway through the "
        "warm-up.",
    ] = 0
    end_learning_rate: Annotated[float, _FROM_ZERO, "Learning rate after schedule.decay_steps."] = (
        0.0
    )
    cooldown_steps: Annotated[
        int,
        _STEPS_OR_NONE,
        "Number of steps at the end in which the learning rate falls, with schedule.form 'wsd'.",
    ] = 0

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        warm_up_end = self.warmup_steps + self.start_warmup_step
        if self.decay_steps <= max(warm_up_end, self.warmup_steps):
            problem = f"{self.decay_steps} is before the end of the warm-up"
            remedy = f"use more than {max(warm_up_end, self.warmup_steps):,} steps"
            raise ConfigError("schedule.decay_steps", problem, remedy)
        if self.form != "wsd" and self.cooldown_steps:
            problem = f"{self.cooldown_steps} does not work with schedule.form {self.form!r}"
            raise ConfigError("schedule.cooldown_steps", problem, "use 0, or set the form to 'wsd'")
        if warm_up_end + self.cooldown_steps > self.decay_steps:
            problem = f"{self.cooldown_steps} starts the cool-down before the warm-up ends"
            remedy = "use fewer steps, or raise schedule.decay_steps"
            raise ConfigError("schedule.cooldown_steps", problem, remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSection(_Section):
    """The norm that gradient clipping limits, and its limit (`distributed/clipping.py`)."""

    policy: Annotated[
        ClipPolicy,
        "Which gradient norm is limited. 'after_allreduce' limits that of the averaged gradient. "
        "'whole_before_allreduce' and 'bucket_before_allreduce' limit that of each rank's whole "
        "gradient, or of each of its buckets, before the ranks average them.",
    ] = "after_allreduce"
    max_norm: Annotated[
        float, _ABOVE_ZERO, "Largest L2 norm of the gradient. A longer gradient is scaled down."
    ] = 1.0
    bucket_limit: Annotated[
        Literal["by_size", "equal_share"],
        "Limit of a bucket with clip.policy 'bucket_before_allreduce'. 'by_size' gives larger "
        "buckets a higher limit. 'equal_share' is max_norm / sqrt(22), as in the published "
        "1,024-GPU runs.",
    ] = "by_size"

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.bucket_limit == "equal_share" and self.policy != "bucket_before_allreduce":
            problem = f"'equal_share' does not work with clip.policy {self.policy!r}"
            remedy = "set clip.policy to 'bucket_before_allreduce'"
            raise ConfigError("clip.bucket_limit", problem, remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSection(_Section):
    """The evaluations, and the accuracy that ends the run."""

    target_accuracy: Annotated[
        float | Literal["none"],
        Bounds(1e-6, 0.999999),
        "Masked-word accuracy on held-out data, as a fraction, at which the run ends. "
        "'none' trains for run.max_steps.",
    ]
    interval_samples: Annotated[
        int | Literal["mlperf"],
        _SAMPLES,
        "Number of training sequences between two evaluations. 'mlperf' uses MLPerf's formula, "
        "which depends on the batch size.",
    ] = "mlperf"

    @property
    def target(self) -> float | None:
        """The target accuracy as a fraction, or None for a run without a target."""
        return None if self.target_accuracy == "none" else self.target_accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class MlperfSection(_Section):
    """The submission's entries in the MLPerf log, and whether MLPerf's rules are enforced."""

    division: Annotated[
        Literal["closed", "open"],
        "MLPerf's category. 'closed' fixes the model and the rules, and 'open' leaves both free.",
    ] = "open"
    submission_org: Annotated[str, "Name of the submitting organization."] = "unnamed"
    submission_platform: Annotated[str, "Name of the system that is measured."] = "unnamed"
    submission_status: Annotated[
        Literal["onprem", "cloud", "preview", "research"], "MLPerf's availability category."
    ] = "onprem"
    enforce_rules: Annotated[
        bool,
        "Whether a closed run that breaks MLPerf's rules is an error. Only tests set it to false.",
    ] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection(_Section):
    """The interval between checkpoints, and the number to keep (docs/reference/reliability.md)."""

    interval_steps: Annotated[
        int | Literal["auto", "never"],
        _STEPS_OR_NONE,
        "Number of steps between two checkpoints. 'auto' saves about every ten minutes and at the "
        "end, 0 at the end only, and 'never' saves nothing.",
    ] = "auto"
    keep_last: Annotated[
        int, Bounds(1, 10**6), "Number of checkpoints to keep. Older ones are deleted."
    ] = 2
