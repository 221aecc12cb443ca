"""The sub-command `system`: describe this machine as MLPerf requires, or check descriptions."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bert_tools.common.machine import Machine, read_machine
from bert_tools.package.system_description import (
    Software,
    default_name,
    describe,
    read_description,
    unknown_fields,
)
from mlperf_bert.errors import ConfigError, say_error
from mlperf_bert.files import write_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `system`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser("describe", help="print a description of this machine")
    new.set_defaults(act=_describe)
    new.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write; its name is the system's"
    )
    new.add_argument("--submitter", help="submitter (default: as in configs)")
    new.add_argument("--nodes", type=int, default=1, help="number of such machines (default: 1)")
    there = commands.add_parser("check", help="check descriptions")
    there.set_defaults(act=_check)
    there.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON files")


def run(args: argparse.Namespace) -> int:
    """Describe or check; one line on stderr per problem. Returns 0, or 2 if there is one.

    Raises ConfigError for unusable options, DataError if --out cannot be written.
    """
    status: int = args.act(args)
    return status


def _check(args: argparse.Namespace) -> int:
    status = 0
    for path in args.files:
        for error in read_description(path, str(path))[1]:
            say_error(error)
            status = error.exit_status
    return status


def _describe(args: argparse.Namespace) -> int:
    from mlperf_bert.config.sections import MlperfSection

    if args.nodes < 1:
        raise ConfigError("--nodes", f"is {args.nodes}", "count from 1")
    if args.out and args.out.exists():  # it may have been filled in by hand
        raise ConfigError("--out", f"{args.out} exists", "name a new file, or remove that one")
    machine = read_machine()
    software = _software(machine)
    description = describe(
        machine,
        software,
        name=args.out.stem if args.out else default_name(machine, software, args.nodes),
        submitter=args.submitter or MlperfSection().submission_org,
        nodes=args.nodes,
    )
    text = json.dumps(description, indent=4) + "\n"
    if args.out:
        write_file(args.out, text.encode())
    else:
        print(text, end="")
    print("assumed, please mend: division, status", file=sys.stderr)
    unknown = ", ".join(unknown_fields(description))
    print(f"not known, please fill in: {unknown or 'nothing'}", file=sys.stderr)
    return 0


def _software(machine: Machine) -> Software:
    import platform

    import torch
    from torch.distributed import is_nccl_available

    has_gpus = torch.cuda.is_available()
    gpus = range(torch.cuda.device_count() if has_gpus else 0)
    versions: Any = torch  # torch does not type these
    nccl = versions.cuda.nccl.version() if has_gpus and is_nccl_available() else ()
    cudnn = versions.backends.cudnn.version() if has_gpus else None
    return Software(
        framework=f"PyTorch {torch.__version__}",
        stack={
            "Python": platform.python_version(),
            "CUDA": torch.version.cuda or "",
            "cuDNN": str(cudnn or ""),
            "NCCL": ".".join(str(part) for part in nccl),
            "NVIDIA driver": machine.driver or "",
        },
        gpus=[torch.cuda.get_device_name(gpu) for gpu in gpus],
        gpu_memory_bytes=torch.cuda.get_device_properties(0).total_memory if has_gpus else 0,
    )
