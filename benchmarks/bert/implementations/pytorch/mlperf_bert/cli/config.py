"""The sub-command `config`: all of a config, one value, what it means, or options of sbatch."""

import argparse
import re
import subprocess
import textwrap
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.options import FILE_OR_NAME, add_init_checkpoint, add_set, find_config
from mlperf_bert.config.run_config import RunConfig, is_bert_large

if TYPE_CHECKING:
    from mlperf_bert.evaluation.convergence import ExpectedSamples

# What neither the shell, which splits and expands the line, nor sbatch's --export takes apart.
_PLAIN = re.compile(r"[\w./@%+=:~-]*")
_LABEL_WIDTH, _WIDTH = 16, 100
_MOST_POINTS = 40  # evaluation points that are listed
_RCP_KIND = {
    "point": "the reference convergence point of this batch",
    "between": "between reference convergence points",
    "smallest": "the smallest reference convergence point, for want of one of this batch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `config`."""
    parser.add_argument("config", type=find_config, metavar="FILE", help=FILE_OR_NAME)
    add_set(parser)
    add_init_checkpoint(parser)
    answer = parser.add_mutually_exclusive_group()
    answer.add_argument("--get", metavar="SECTION.KEY", help="print this value only")
    answer.add_argument("--explain", action="store_true", help="print what it means, in words")
    answer.add_argument("--slurm", action="store_true", help="print sbatch's options, on one line")
    text = "print nothing, but refuse what a run on this data may not begin with"
    answer.add_argument("--check-start", type=Path, metavar="DATA", help=text)


def run(args: argparse.Namespace) -> int:
    """Check the config and print what was asked for. Raises ConfigError."""
    from mlperf_bert.config.files import config_to_toml, config_value, load_config

    config = load_config(args.config, args.set, args.init_checkpoint)
    if args.check_start:
        from mlperf_bert.checkpoint.first_weights import check_first_weights

        check_first_weights(config, args.check_start)
    elif args.explain:
        print(in_words(config))
    elif args.slurm:
        print(sbatch_options(config, args.config))
    elif args.get:
        print(config_value(config, args.get))
    else:
        print(config_to_toml(config), end="")
    return 0


def sbatch_options(config: RunConfig, path: Path) -> str:
    """One line of options, for `sbatch $(mlperf_bert config --slurm FILE) run_and_time.sh`.

    One task a rank, with `data.loader = "mpi_readers"` one more for its reader; GPUs only where
    `run.device` asks for them and SLURM does not say that it counts none. Raises ConfigError for a
    path that would not survive the shell.
    """
    file = str(path.absolute())
    plain = _PLAIN.match(file)
    if plain is None or plain.end() != len(file):
        bad = file[plain.end() if plain else 0]
        remedy = "move it to a path of letters, digits, / and . _ - + @ % = : ~"
        raise ConfigError(file, f"has {bad!r} in its path, which sbatch would misread", remedy)
    parallel = config.parallel
    options = [
        f"--job-name={path.stem}",
        f"--nodes={parallel.nodes}",
        f"--ntasks-per-node={config.processes_per_node}",
    ]
    if config.run.device == "cuda" and not slurm_counts_no_gpus():
        options.append(f"--gpus-per-node={parallel.ranks_per_node}")
    return " ".join([*options, f"--export=ALL,CONFIG={file}"])


def slurm_counts_no_gpus() -> bool:
    """Whether SLURM answers, and none of its nodes has a generic resource `gpu`.

    sbatch then refuses to give any, and whole nodes come with theirs. Without SLURM here: no.
    """
    command = ["sinfo", "--noheader", "--format=%G"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and not re.search(r"\bgpu\b", done.stdout)


def in_words(config: RunConfig) -> str:
    """Lines of text; nothing in them that the config does not hold or imply."""
    lines = []
    for label, text in _facts(config):
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"{label:<{_LABEL_WIDTH}}",
            subsequent_indent=" " * _LABEL_WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def evaluation_steps(config: RunConfig) -> list[int]:
    """Steps after which a run that never reaches its target evaluates, in order.

    Point k lies at ceil(k * interval / global batch), as in the rules, and the last step is one.
    """
    batch, last = config.parallel.global_batch_size, config.max_steps
    steps = range(1, last + 1)
    return [step for step in steps if step == last or config.evaluation_is_due(step * batch)]


def _facts(config: RunConfig) -> Iterator[tuple[str, str]]:
    from mlperf_bert.data.sampler import default_quantiles
    from mlperf_bert.evaluation.convergence import expected_samples

    parallel, optim = config.parallel, config.optim
    batch, steps = parallel.global_batch_size, config.max_steps
    yield "division", f"{config.mlperf.division}, {optim.name}, model in {config.model.precision}"
    nodes, ranks = _count(parallel.nodes, "node"), _count(parallel.ranks_per_node, "rank")
    yield "world size", f"{parallel.world_size:,}: {nodes} of {ranks}"
    yield (
        "global batch",
        f"{_count(batch, 'sequence')}: {parallel.world_size:,} x {parallel.local_batch_size} "
        f"(local batch) x {parallel.grad_accum_steps} (accumulation)",
    )
    if config.data.sampler == "quantile":
        quantiles = config.data.quantiles
        number = default_quantiles(batch) if quantiles == "auto" else quantiles
        yield "sampler", f"quantile: {batch // number} from each of {_count(number, 'quantile')}"
    else:
        yield "sampler", config.data.sampler
    yield "learning rate", _schedule(config)
    yield (
        "stop",
        f"at {config.eval.target_accuracy} masked-LM accuracy, or after {_count(steps, 'step')} "
        f"({steps * batch:,} samples)",
    )
    points = evaluation_steps(config)
    rule = " (MLPerf's rule)" if config.eval.interval_samples == "mlperf" else ""
    listed = ", ".join(map(str, points[:_MOST_POINTS]))
    more = f" ... {points[-1]}" if len(points) > _MOST_POINTS else ""
    yield (
        "evaluation",
        f"every {config.eval_interval_samples:,} samples{rule} and where the run stops",
    )
    yield "", f"{len(points)} times, at steps {listed}{more}"
    is_closed = config.mlperf.division == "closed"
    if is_closed and optim.name == "lamb" and is_bert_large(config.model):
        yield "rules' samples", _rules_samples(config, expected_samples(batch))


def _schedule(config: RunConfig) -> str:
    schedule, rate = config.schedule, config.optim.learning_rate
    warm_up = "no warm-up"
    if schedule.warmup_steps:
        ends = max(schedule.warmup_steps + schedule.start_warmup_step, 0)
        warm_up = f"warm-up of {_count(schedule.warmup_steps, 'step')} that starts at step "
        warm_up += f"{schedule.start_warmup_step} and ends at {ends}"
    power = "linear" if schedule.power == 1 else f"power {schedule.power:g}"
    return (
        f"{rate:g}; {warm_up}; {power} decay to {schedule.end_learning_rate:g} "
        f"at step {schedule.decay_steps:,} ({schedule.form})"
    )


def _rules_samples(config: RunConfig, expected: "ExpectedSamples | None") -> str:
    if expected is None:
        return "not known: no reference convergence point reaches this batch"
    batch = config.parallel.global_batch_size
    mean_steps, least_steps = ceil(expected.mean / batch), ceil(expected.minimum / batch)
    text = (
        f"the reference runs needed {expected.mean:,.0f} ({mean_steps:,} steps), "
        f"{_RCP_KIND[expected.kind]}; ten runs pass with a mean of {expected.minimum:,.0f} "
        f"({least_steps:,} steps) at least; what to expect: mlperf_bert plan cluster --config"
    )
    if mean_steps > config.max_steps:
        text += "; the run stops before that: raise schedule.decay_steps"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
