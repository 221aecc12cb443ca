"""The sub-command `config`: all of a config, one value, what it means, or options of sbatch."""

import argparse

from mlperf_bert.config.options import FILE_OR_NAME, add_set, find_config


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
        from mlperf_bert.config.slurm_options import sbatch_options

        print(sbatch_options(config, args.config))
    elif args.get:
        print(config_value(config, args.get))
    else:
        print(config_to_toml(config), end="")
    return 0
