"""The files of one run: created once, never written over.

`<run-dir>/result_<i>.txt` is the MLPerf log; `<run-dir>/run_<i>/` holds everything else.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlperf_bert.config import RunConfig
from mlperf_bert.config_io import config_to_toml
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_rank_zero
from mlperf_bert.errors import ConfigError, UserError


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of run number `index` below `root`."""

    root: Path
    index: int

    @property
    def mlperf_log(self) -> Path:
        """The MLPerf log."""
        return self.root / f"result_{self.index}.txt"

    @property
    def run(self) -> Path:
        """Folder of this run's own files."""
        return self.root / f"run_{self.index}"

    @property
    def checkpoints(self) -> Path:
        """Folder of this run's checkpoints."""
        return self.run / "checkpoints"

    def create(self, config: RunConfig, seed: int, info: RankInfo, device: torch.device) -> None:
        """Make the folders, `config.toml` and `environment.json`. Rank 0 only.

        Raises ConfigError where this run exists already or the place cannot be written.
        """
        if self.mlperf_log.exists() or self.run.exists():
            raise ConfigError(
                "--run-dir", f"{self.root} holds run {self.index} already", "give a new directory"
            )
        made_root = not self.root.exists()
        try:
            self.checkpoints.mkdir(parents=True)
            (self.run / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
            facts = environment(info, device) | {"seed": seed}
            (self.run / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            self._remove(made_root)
            raise ConfigError(
                "--run-dir", f"{self.root}: {error.strerror}", "give a directory you can write to"
            ) from None

    @contextmanager
    def created(
        self, config: RunConfig, seed: int, info: RankInfo, device: torch.device
    ) -> Iterator[None]:
        """`create` on rank 0, undone where the body raises a UserError: the run never began."""
        made_root = not self.root.exists()
        on_rank_zero(info, lambda: self.create(config, seed, info, device))
        try:
            yield
        except UserError:
            if info.rank == 0:
                self._remove(made_root)
            raise

    def _remove(self, with_root: bool) -> None:
        with suppress(OSError):  # what cannot be removed must not hide the error
            shutil.rmtree(self.run)
            self.mlperf_log.unlink(missing_ok=True)
            if with_root:
                self.root.rmdir()


def default_root(config_path: Path) -> Path:
    """`runs/<utc>-<config>` below the current directory."""
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return Path("runs") / f"{utc}-{config_path.stem}"


def environment(info: RankInfo, device: torch.device) -> dict[str, Any]:
    """What the run ran on: versions, machine, ranks and commit. No secrets, no user paths."""
    return {
        "schema_version": 1,
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git_commit(),
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


def _git_commit() -> str | None:
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
