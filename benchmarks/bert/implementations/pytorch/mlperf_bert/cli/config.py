"""The sub-command `config`: all of a config, one value, what it means, or options of sbatch."""

import argparse
import re
from pathlib import Path

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.options import FILE_OR_NAME, add_set, find_config
from mlperf_bert.config.run_config import RunConfig

# What neither the shell, which splits and expands the line, nor sbatch's --export takes apart.
_PLAIN = re.compile(r"[\w./@%+=:~-]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `config`."""
    parser.add_argument("config", type=find_config, metavar="FILE", help=FILE_OR_NAME)
    add_set(parser)
    answer = parser.add_mutually_exclusive_group()
    answer.add_argument("--get", metavar="SECTION.KEY", help="print this value only")
    answer.add_argument("--explain", action="store_true", help="print what it means, in words")
    answer.add_argument("--slurm", action="store_true", help="print sbatch's options, on one line")


def run(args: argparse.Namespace) -> int:
    """Check the config and print what was asked for. Raises ConfigError."""
    from mlperf_bert.config.files import config_to_toml, config_value, load_config

    config = load_config(args.config, args.set)
    if args.explain:
        from mlperf_bert.cli.explain import in_words

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
    `run.device` asks for them. Raises ConfigError for a path that would not survive the shell.
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
    if config.run.device == "cuda":
        options.append(f"--gpus-per-node={parallel.ranks_per_node}")
    return " ".join([*options, f"--export=ALL,CONFIG={file}"])
