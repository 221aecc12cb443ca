"""Writer of a run's MLPerf log, and the only emitter of MLPerf records.

The records and their order are a superset that MLCommons' checkers accept under rulesets 2.0.0 to
5.0.0 in both divisions (2.0.0 and 2.1.0 closed: only for BERT-large's 24 layers). `samples` is
always the number of sequences trained so far, which MLPerf's BERT rules put into the field
`epoch_num`.
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

# The checkers search whole lines for these words, so only records of these names may hold them
# (mlperf_logging.rcp_checker); a metric called "train_samples_per_s" would be read as a count.
RESERVED_WORDS = (
    "global_batch_size",
    "submission_benchmark",
    "eval_accuracy",
    "eval_error",
    "train_samples",
    "run_stop",
)

# A clock that is kept in step over the network drifts by less.
LEAST_JUMP_S, LEAST_JUMP_SHARE = 1.0, 1e-3

# Frames from mllog to the caller of a public method: `_record`, the method, its caller.
_CALLER_DEPTH = 3


class MlperfLog:
    """One MLPerf log file, written by rank 0; every method does nothing elsewhere.

    Call the methods in the order of their definition, `eval_*` and `tracked_stats` repeatedly. Each
    record is on disk when its method returns, and names the calling line.

    `path` is created in an existing directory. All ranks but one pass None and write nothing, since
    the seed of a run may be logged only once. Raises ConfigError if the file exists, cannot be
    created or written, or mlperf_logging is not installed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._handler: logging.FileHandler | None = None
        self._logger: Any = None
        self._begun = time.time(), time.monotonic()
        if path is not None:
            try:  # first, so that a failure leaves no empty file
                from mlperf_logging.mllog.mllog import MLLogger
            except ImportError:
                remedy = "run in the checkout: tools/venv.sh"
                raise ConfigError("mlperf_logging", "is not installed", remedy) from None
            self._handler = _open_new(path)
            # Created directly, not by logging.getLogger: private, and without a parent to
            # pass records to. So mllog does not print to stdout, its default, and logs do not
            # mix.
            logger = logging.Logger("mlperf_log", logging.INFO)
            logger.addHandler(self._handler)
            # Paths inside the package are logged relative to it, so that its place stays
            # private.
            root = re.escape(str(Path(mlperf_bert.__file__).resolve().parent.parent))
            self._logger = MLLogger(logger, root_dir=root)

    def init_start(self, *, cache_cleared: bool) -> None:
        """Untimed initialisation begins; `cache_cleared` if the page cache was dropped before."""
        self._record("event", "cache_clear", cache_cleared)
        self._record("start", "init_start")

    def submission(self, config: RunConfig) -> None:
        """Submitter, system, division; before `init_stop`, whose time limit the division sets."""
        self._record("event", "submission_benchmark", "bert")
        self._record("event", "submission_division", config.mlperf.division)
        self._record("event", "submission_org", _free_text("submission_org", config))
        self._record("event", "submission_platform", _free_text("submission_platform", config))
        self._record("event", "submission_status", config.mlperf.submission_status)

    def hyperparameters(self, config: RunConfig, seed: int) -> None:
        """Seed, batch size and all hyper-parameters of the rules."""
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
        """Records that only `mlperf_bert package` reads; other checkers ignore unknown keys.

        `resumed_from` has step and samples of the checkpoint that the run continues, if any;
        `initial_weights` says if they were loaded from a given checkpoint or drawn at random.
        """
        self._record("event", "quality_target", config.eval.target_accuracy)
        self._record("event", "rules_enforced", config.mlperf.enforce_rules)
        self._record("event", "resumed", resumed_from is not None, **(resumed_from or {}))
        self._record("event", "initial_weights", initial_weights)
        self._record("event", "number_of_nodes", number_of_nodes)
        self._record("event", "number_of_ranks", number_of_ranks)

    def weights_initialization(self, tensor_names: Iterable[str]) -> None:
        """One record for each initialised tensor, by its name in the reference model.

        Closed rulesets 1.1.0 to 2.1.0 require BERT-large's 398, each once.
        """
        for name in tensor_names:
            self._record("event", "weights_initialization", tensor=name)

    def init_stop(self) -> None:
        """Initialisation ends, before any training or evaluation sample is read."""
        self._record("end", "init_stop")

    def run_start(self) -> None:
        """The clock starts, with the only epoch and the only block of the run."""
        self._record("start", "run_start")
        self._record("start", "epoch_start", epoch_num=1)
        self._record("start", "block_start", first_epoch_num=1, epoch_count=1)

    def eval_start(self, samples: int) -> None:
        """An evaluation after `samples` trained sequences begins."""
        self._record("start", "eval_start", epoch_num=samples, samples_count=samples)

    def eval_accuracy(self, samples: int, value: float) -> None:
        """The masked-LM accuracy (0 .. 1) after `samples` trained sequences."""
        self._record("event", "eval_accuracy", value, epoch_num=samples, samples_count=samples)

    def eval_stop(self, samples: int) -> None:
        """The evaluation after `samples` trained sequences is over."""
        self._record("end", "eval_stop", epoch_num=samples, samples_count=samples)

    def tracked_stats(self, samples: int, throughput: float) -> None:
        """`throughput` in trained sequences per second since the last such record."""
        stats = {"throughput": throughput}
        self._record("event", "tracked_stats", stats, epoch_num=samples, samples_count=samples)

    def run_stop(
        self, samples: int, eval_samples: int, status: Literal["success", "aborted"]
    ) -> None:
        """The clock stops: the target was reached (`success`) or not, or there is none (`aborted`).

        `samples` were trained in the whole run, `eval_samples` are in the evaluation set.
        """
        self._record("end", "block_stop", first_epoch_num=1, epoch_count=1)
        self._record("end", "epoch_stop", epoch_num=1)
        self._record("event", "train_samples", samples)
        self._record("event", "eval_samples", eval_samples)
        self._record("end", "run_stop", status=status)
        if self._logger is not None:
            _say_if_set(*self._begun)

    def close(self) -> None:
        """Close the file; no record may follow."""
        if self._handler is not None:
            with suppress(OSError):  # a full disk, which a record has reported already
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
            problem = f"cannot be written ({error.strerror}), and a log with a gap proves nothing"
            remedy = "free space on that disk, then go on with --resume auto"
            raise ConfigError(str(self._path), problem, remedy) from None


def _say_if_set(wall_s: float, monotonic_s: float) -> None:
    """Say if the clock was set since it showed `wall_s`: the log's times then mean nothing."""
    passed = time.monotonic() - monotonic_s
    jump = time.time() - wall_s - passed
    if abs(jump) > max(LEAST_JUMP_S, LEAST_JUMP_SHARE * passed):
        way = "back" if jump < 0 else "ahead"
        say(
            f"warning: the clock of this machine jumped {way} by {abs(jump):,.0f} s during the run "
            "(it was set, or the machine slept), so the times in the log are wrong; do not submit "
            "this run"
        )


def hyperparameters(config: RunConfig) -> Mapping[str, int | float | str]:
    """MLPerf key -> value, as named by the rules for BERT.

    The keys say "lamb" for every optimizer, because the BERT rules have no others; `opt_name` names
    the optimizer. Rulesets use different names for epsilon.
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
    """Appends lines to a file that it created; raises errors that logging would only print."""

    _error: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a whole line or nothing, and nothing after a failed line. Raises OSError."""
        if self._error is not None:  # mllog catches the first error and logs that
            raise self._error
        assert self.stream is not None
        file = self.stream.fileno()
        try:
            with whole_or_nothing(file):
                super().emit(record)
        except OSError as error:
            self._error = error
            os.dup2(os.open(os.devnull, os.O_WRONLY), file)  # drops the pending rest
            raise

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        raise  # logging calls this inside its `except`


def _open_new(path: Path) -> logging.FileHandler:
    try:
        return _NewFileHandler(path, mode="x", encoding="ascii")
    except FileExistsError:
        remedy = "a log is never overwritten: choose another run directory"
        raise ConfigError(str(path), "exists", remedy) from None
    except OSError as error:
        problem = f"cannot be created ({error.strerror})"
        raise ConfigError(str(path), problem, "choose a directory you can write to") from None


def _free_text(field: Literal["submission_org", "submission_platform"], config: RunConfig) -> str:
    text: str = getattr(config.mlperf, field)
    reserved = [word for word in RESERVED_WORDS if word in text]
    if reserved or not text:
        problem = f"is {text!r}"
        remedy = "give a name that is not empty and holds no word of the MLPerf log format"
        raise ConfigError(f"mlperf.{field}", problem, remedy)
    return text
