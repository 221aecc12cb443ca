"""The sub-command `config`: print a whole config, one value, its meaning, or options for sbatch."""

import argparse
import re
import subprocess
import textwrap
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.options import (
    FILE_OR_NAME,
    SHIPPED,
    add_init_checkpoint,
    add_set,
    find_config,
)
from mlperf_bert.config.run_config import RunConfig, is_bert_large
from mlperf_bert.config.sections import ARCHITECTURES

if TYPE_CHECKING:
    from mlperf_bert.evaluation.convergence import ExpectedSamples

# Characters that neither the shell (it splits and expands the line) nor sbatch's --export splits.
_PLAIN = re.compile(r"[\w./@%+=:~-]*")
_LABEL_WIDTH, _WIDTH = 16, 100
_MOST_POINTS = 40  # evaluation points to list
_RCP_KIND = {
    "point": "the reference convergence point of this batch",
    "between": "between reference convergence points",
    "smallest": "the smallest reference convergence point, for want of one of this batch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the questions, which are sub-commands of `config`."""
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    for name, text in (
        ("show", "check a config and print it complete"),
        ("explain", "say in words what a config means"),
        ("get", "print one value"),
        ("slurm", "print sbatch's options on one line"),
        ("check-start", "print nothing; refuse what a run may not begin with"),
    ):
        question = questions.add_parser(name, help=text)
        question.add_argument("config", type=find_config, metavar="FILE", help=FILE_OR_NAME)
        if name == "get":
            question.add_argument("key", metavar="SECTION.KEY", help="the value to print")
        if name == "check-start":
            text = "directory with train/ and eval/"
            question.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
        add_set(question)
        add_init_checkpoint(question)


def run(args: argparse.Namespace) -> int:
    """Check the config and print the answer. Raises ConfigError."""
    from mlperf_bert.checkpoint.first_weights import take_model
    from mlperf_bert.config.files import config_to_toml, config_value, load_config

    config = load_config(args.config, args.set, args.init_checkpoint, take_model)
    if args.question == "check-start":
        from mlperf_bert.checkpoint.first_weights import check_first_weights

        check_first_weights(config, args.data)
    elif args.question == "explain":
        print(in_words(config))
    elif args.question == "slurm":
        print(sbatch_options(config, args.config))
    elif args.question == "get":
        print(config_value(config, args.key))
    else:
        print(config_to_toml(config), end="")
    return 0


def sbatch_options(config: RunConfig, path: Path) -> str:
    """The options for `sbatch $(mlperf_bert config slurm FILE) run_and_time.sh`, on one line.

    One task for each rank, and a second one for its reader with `data.loader = "mpi_readers"`. GPUs
    are requested only if `run.device` needs them and SLURM counts GPUs here. A shipped config goes
    by its name if the shell would split or expand its path. Raises ConfigError for another such
    path.
    """
    file = str(path.absolute())
    if path.parent == SHIPPED and not _PLAIN.fullmatch(file):
        file = path.stem
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
    """True if SLURM answers and none of its nodes has a generic resource `gpu`.

    sbatch then refuses requests for GPUs, and a whole node comes with its GPUs. False without
    SLURM.
    """
    command = ["sinfo", "--noheader", "--format=%G"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and not re.search(r"\bgpu\b", done.stdout)


def in_words(config: RunConfig) -> str:
    """The meaning of a config in lines of text, from the config alone."""
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
    """Evaluation steps of a run that never reaches its target, in order.

    Point k lies at step ceil(k * interval / global batch), as in the rules; the last step is added.
    """
    batch, last = config.parallel.global_batch_size, config.max_steps
    steps = range(1, last + 1)
    return [step for step in steps if step == last or config.evaluation_is_due(step * batch)]


def _facts(config: RunConfig) -> Iterator[tuple[str, str]]:
    from mlperf_bert.data.sampler import default_quantiles
    from mlperf_bert.evaluation.convergence import expected_samples

    parallel, optim = config.parallel, config.optim
    batch, steps = parallel.global_batch_size, config.max_steps
    model, start = config.model, config.run
    yield "division", f"{config.mlperf.division}, {optim.name}"
    layers = f"{_count(model.num_layers, 'layer')} of {model.hidden_size:,}"
    yield "model", f"{ARCHITECTURES[model.architecture]}, {layers}, in {model.precision}"
    if start.init_checkpoint:
        yield "begins with", f"the {start.init_state} of {start.init_checkpoint}"
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
    if config.data.skip_samples:
        yield "", f"begins behind the first {_count(config.data.skip_samples, 'sample')}"
    yield "learning rate", _schedule(config)
    target = config.eval.target
    at_target = "" if target is None else f"at {target} masked-LM accuracy, or "
    yield "stop", f"{at_target}after {_count(steps, 'step')} ({steps * batch:,} samples)"
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
    decay, when = "linear" if schedule.power == 1 else f"power {schedule.power:g}", "at"
    if schedule.form == "trapezoid" and schedule.cooldown_steps:
        decay = f"in the last {_count(schedule.cooldown_steps, 'step')} a 1 - sqrt"
    elif schedule.form == "trapezoid":
        decay, when = "no cool-down, a sudden", "after"
    return (
        f"{rate:g}; {warm_up}; {decay} decay to {schedule.end_learning_rate:g} "
        f"{when} step {schedule.decay_steps:,} ({schedule.form})"
    )


def _rules_samples(config: RunConfig, expected: "ExpectedSamples | None") -> str:
    if expected is None:
        return "not known: no reference convergence point reaches this batch"
    batch = config.parallel.global_batch_size
    mean_steps, least_steps = ceil(expected.mean / batch), ceil(expected.minimum / batch)
    text = (
        f"the reference runs needed {expected.mean:,.0f} ({mean_steps:,} steps), "
        f"{_RCP_KIND[expected.kind]}; ten runs pass with a mean of {expected.minimum:,.0f} "
        f"({least_steps:,} steps) at least; `plan cluster` says what to expect"
    )
    if mean_steps > config.max_steps:
        text += "; the run stops before that: raise schedule.decay_steps"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
