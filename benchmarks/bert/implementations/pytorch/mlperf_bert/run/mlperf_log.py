"""Write a run's MLPerf log. No other module writes MLPerf records.

MLCommons' checkers accept these records under rulesets 2.0.0 to 5.0.0 in both divisions. In the
closed division, rulesets 2.0.0 and 2.1.0 accept them only if the model has as many layers as
BERT-large (24). `samples` is always the number of sequences trained so far, which MLPerf's BERT
rules call `epoch_num`.
"""

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import mlperf_bert
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError, say
from mlperf_bert.files import whole_or_nothing

# The checkers search whole lines for these words, so no other record may have them
# (mlperf_logging.rcp_checker). A metric called "train_samples_per_s" would be read as a count.
RESERVED_WORDS = (
    "global_batch_size",
    "submission_benchmark",
    "eval_accuracy",
    "eval_error",
    "train_samples",
    "run_stop",
)

# A clock that is synchronized over the network drifts by less.
LEAST_JUMP_S, LEAST_JUMP_SHARE = 1.0, 1e-3

# Frames from mllog to the caller of a public method: `_record`, the method, its caller.
_CALLER_DEPTH = 3


class MlperfLog:
    """The MLPerf log file of a run, which rank 0 writes.

    Call the methods in the order of their definition. `eval_*` and `tracked_stats` may be called
    repeatedly. When a method returns, its records are in the file. Each record contains the line of
    code that called the method.

    `path` is a new file in an existing directory. On other ranks it is None, and all methods do
    nothing, because the seed of a run may be logged only once. Raises ConfigError if the file
    exists or cannot be written, or if mlperf_logging is not installed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._handler: logging.FileHandler | None = None
        self._logger: Any = None
        self._begun = time.time(), time.monotonic()
        if path is not None:
            try:  # The import comes first, so that a failure leaves no empty file.
                from mlperf_logging.mllog.mllog import MLLogger
            except ImportError:
                remedy = "install mlperf_logging with tools/venv.sh in the repository"
                raise ConfigError("mlperf_logging", "is not installed", remedy) from None
            self._handler = _open_new(path)
            # The logger is not from logging.getLogger, so that it is private and has no parent.
            # Otherwise mllog would print to stdout, its default, and logs could mix.
            logger = logging.Logger("mlperf_log", logging.INFO)
            logger.addHandler(self._handler)
            # Paths in the package are logged relative to it, so that its location stays private.
            root = re.escape(str(Path(mlperf_bert.__file__).resolve().parent.parent))
            self._logger = MLLogger(logger, root_dir=root)

    def init_start(self, *, cache_cleared: bool) -> None:
        """Record whether the page cache was cleared, and that untimed initialization starts."""
        self._record("event", "cache_clear", cache_cleared)
        self._record("start", "init_start")

    def submission(self, config: RunConfig) -> None:
        """Record the submitter, the system and the division of the submission.

        The division limits the time until `init_stop`.
        """
        self._record("event", "submission_benchmark", "bert")
        self._record("event", "submission_division", config.mlperf.division)
        self._record("event", "submission_org", _free_text("submission_org", config))
        self._record("event", "submission_platform", _free_text("submission_platform", config))
        self._record("event", "submission_status", config.mlperf.submission_status)

    def hyperparameters(self, config: RunConfig, seed: int) -> None:
        """Record the seed, the batch size and all hyper-parameters that the rules require."""
        self._record("event", "seed", seed)
        for key, value in hyperparameters(config).items():
            self._record("event", key, value)

    def conditions(
        self,
        config: RunConfig,
        *,
        number_of_nodes: int,
        number_of_ranks: int,
        resumed_from: Mapping[str, int] | None,
        initial_weights: Literal["checkpoint", "random"],
    ) -> None:
        """Record the facts about the run that only `mlperf_bert package` reads. Other checkers
        ignore them.

        `resumed_from` has the step and the samples of the checkpoint from which the run resumes, or
        is None. `initial_weights` tells whether the run's first weights came from a checkpoint or
        were randomly initialized.
        """
        self._record("event", "quality_target", config.eval.target_accuracy)
        self._record("event", "rules_enforced", config.mlperf.enforce_rules)
        self._record("event", "resumed", resumed_from is not None, **(resumed_from or {}))
        self._record("event", "initial_weights", initial_weights)
        self._record("event", "number_of_nodes", number_of_nodes)
        self._record("event", "number_of_ranks", number_of_ranks)

    def weights_initialization(self, tensor_names: Iterable[str]) -> None:
        """Record the name of each initialized tensor in the reference model.

        In the closed division, rulesets 1.1.0 to 2.1.0 require the 398 tensors of BERT-large.
        """
        for name in tensor_names:
            self._record("event", "weights_initialization", tensor=name)

    def init_stop(self) -> None:
        """Record the end of initialization. Call this before any sample is read."""
        self._record("end", "init_stop")

    def run_start(self) -> None:
        """Record the start of the run's clock and of its only epoch and block."""
        self._record("start", "run_start")
        self._record("start", "epoch_start", epoch_num=1)
        self._record("start", "block_start", first_epoch_num=1, epoch_count=1)

    def eval_start(self, samples: int) -> None:
        """Record the start of an evaluation after `samples` trained sequences."""
        self._record("start", "eval_start", epoch_num=samples, samples_count=samples)

    def eval_accuracy(self, samples: int, value: float) -> None:
        """Record the masked-LM accuracy (0 .. 1) after `samples` trained sequences."""
        self._record("event", "eval_accuracy", value, epoch_num=samples, samples_count=samples)

    def eval_stop(self, samples: int) -> None:
        """Record the end of the evaluation after `samples` trained sequences."""
        self._record("end", "eval_stop", epoch_num=samples, samples_count=samples)

    def tracked_stats(self, samples: int, throughput: float) -> None:
        """Record the throughput since the previous call, in sequences per second."""
        stats = {"throughput": throughput}
        self._record("event", "tracked_stats", stats, epoch_num=samples, samples_count=samples)

    def run_stop(
        self, samples: int, eval_samples: int, status: Literal["success", "aborted"]
    ) -> None:
        """Record the end of the run's clock.

        `status` is `success` if the run reached its target, and otherwise `aborted`. `samples` is
        the number of sequences trained in the whole run, and `eval_samples` the number of sequences
        in the evaluation set.
        """
        self._record("end", "block_stop", first_epoch_num=1, epoch_count=1)
        self._record("end", "epoch_stop", epoch_num=1)
        self._record("event", "train_samples", samples)
        self._record("event", "eval_samples", eval_samples)
        self._record("end", "run_stop", status=status)
        if self._logger is not None:
            _say_if_set(*self._begun)

    def close(self) -> None:
        """Close the file. No record may follow."""
        if self._handler is not None:
            with suppress(OSError):  # The disk is full, which a record already reported.
                self._handler.close()
            self._logger = None

    def _record(
        self, kind: Literal["event", "start", "end"], key: str, value: Any = None, **metadata: Any
    ) -> None:
        if self._logger is None:
            return
        try:
            getattr(self._logger, kind)(key, value, metadata, stack_offset=_CALLER_DEPTH)
        except OSError as error:
            problem = f"cannot be written ({error.strerror}), and MLPerf rejects a log with a gap"
            remedy = "free some disk space, and then resume the run with --resume auto"
            raise ConfigError(str(self._path), problem, remedy) from None


def _say_if_set(wall_s: float, monotonic_s: float) -> None:
    """Warn if the system clock was set after it showed `wall_s`.

    The times in the log are wrong after such a change.
    """
    passed = time.monotonic() - monotonic_s
    jump = time.time() - wall_s - passed
    if abs(jump) > max(LEAST_JUMP_S, LEAST_JUMP_SHARE * passed):
        way = "back" if jump < 0 else "ahead"
        say(
            f"warning: the clock of this machine jumped {way} by {abs(jump):,.0f} s during the "
            "run, because it was set or the machine was suspended; the times in the log are "
            "wrong, so do not submit this run"
        )


def hyperparameters(config: RunConfig) -> Mapping[str, int | float | str]:
    """Return the hyperparameters under the MLPerf keys that the BERT rules define.

    The keys contain "lamb" for every optimizer, because the BERT rules have no other keys.
    `opt_name` is the name of the actual optimizer. Epsilon has two keys, because it has different
    names in different rulesets.
    """
    optim, schedule = config.optim, config.schedule
    return {
        "global_batch_size": config.parallel.global_batch_size,
        "gradient_accumulation_steps": config.parallel.grad_accum_steps,
        "max_sequence_length": config.data.max_seq_length,
        "max_predictions_per_seq": config.data.max_predictions,
        "opt_name": optim.name,
        "opt_base_learning_rate": optim.learning_rate,
        "opt_end_learning_rate": schedule.end_learning_rate,
        "opt_epsilon": optim.epsilon,
        "opt_lamb_epsilon": optim.epsilon,
        "opt_lamb_beta_1": optim.beta_1,
        "opt_lamb_beta_2": optim.beta_2,
        "opt_lamb_weight_decay_rate": optim.weight_decay,
        "opt_lamb_learning_rate_decay_poly_power": 1.0,
        "opt_learning_rate_training_steps": schedule.decay_steps,
        "opt_learning_rate_warmup_steps": schedule.warmup_steps,
        "num_warmup_steps": schedule.warmup_steps,
        "start_warmup_step": schedule.start_warmup_step,
    }


class _NewFileHandler(logging.FileHandler):
    """A logging handler that writes to a new file, and raises errors instead of printing them."""

    _error: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as a whole line, or write nothing. Raises OSError.

        After one failure, the handler writes no further lines.
        """
        if self._error is not None:  # mllog catches the first error and tries to log it.
            raise self._error
        assert self.stream is not None
        file = self.stream.fileno()
        try:
            with whole_or_nothing(file):
                super().emit(record)
        except OSError as error:
            self._error = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)  # drops the rest of the line
            raise

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        raise  # logging calls this in its `except`.


def _open_new(path: Path) -> logging.FileHandler:
    try:
        return _NewFileHandler(path, mode="x", encoding="ascii")
    except FileExistsError:
        remedy = "use another run directory, because a log is never overwritten"
        raise ConfigError(str(path), "already exists", remedy) from None
    except OSError as error:
        problem = f"cannot be created ({error.strerror})"
        raise ConfigError(str(path), problem, "use a directory that you can write to") from None


def _free_text(field: Literal["submission_org", "submission_platform"], config: RunConfig) -> str:
    text: str = getattr(config.mlperf, field)
    reserved = [word for word in RESERVED_WORDS if word in text]
    if reserved or not text:
        problem = f"is {text!r}"
        remedy = "use a name that is not empty and contains no reserved word of MLPerf logs "
        remedy += f"({', '.join(RESERVED_WORDS)})"
        raise ConfigError(f"mlperf.{field}", problem, remedy)
    return text
