"""What a run ran on: versions, machine, ranks and commit. No secrets, no user paths."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from mlperf_bert.distributed.launch import RankInfo


def environment(info: RankInfo, device: torch.device) -> dict[str, Any]:
    """What goes into `environment.json`."""
    return {
        "schema_version": 1,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": git_commit(),
        "python": platform.python_version(),
        "packages": _versions("torch", "numpy", "h5py", "safetensors", "mlperf-logging"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "cpu_threads_per_rank": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "world_size": info.world_size,
        "ranks_on_node": info.local_world_size,
        "launcher": info.launcher,
        "binding": info.binding,
    }


def _versions(*names: str) -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def git_commit() -> str | None:
    """The commit of the tree this package runs from, with `-dirty` where it was changed."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
