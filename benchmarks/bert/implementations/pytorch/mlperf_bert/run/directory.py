"""Create the files of a run. Files are never overwritten, and a resumed run continues them.

`<run-dir>/result_<i>.txt` is the MLPerf log, and `<run-dir>/run_<i>/` has all other files. Its file
`environment.json` describes the versions, the machine, the ranks and the commit, without secrets or
the user's paths.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from mlperf_bert import git_commit
from mlperf_bert.config.files import config_to_toml
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_rank_zero
from mlperf_bert.errors import ConfigError, UserError
from mlperf_bert.files import is_there, names_in, write_file, write_json
from mlperf_bert.run.outcome import RunOutcome
from mlperf_bert.run.paths import RunPaths

_ASIDE = "interrupted"
_OF_AN_ATTEMPT = ("config.toml", "environment.json", "outcome.json")


class RunDirectory(RunPaths):
    """The directory of run number `index` in `root`, with methods that create its files."""

    __slots__ = ()

    def refuse_links(self) -> None:
        """Raise ConfigError if a symbolic link would redirect the run's output.

        The method does not check files that the run replaces atomically, because that does not
        follow links.
        """
        grown = (self.run / name for name in ("stdout.log", "metrics.jsonl"))
        folders = (self.run, self.checkpoints, self.run / _ASIDE)
        for path in (self.mlperf_log, *folders, *grown):
            if os.path.islink(path):
                remedy = "remove the link, because a run does not write through links"
                raise ConfigError(str(path), "is a symbolic link", remedy)

    @contextmanager
    def begun(
        self,
        config: RunConfig,
        seed: int,
        info: RankInfo,
        device: torch.device,
        *,
        vocabulary: Path,
        continues: bool = False,
    ) -> Iterator[None]:
        """Create the run's directories and first files on rank 0, for use in a `with` block.

        The first files are `config.toml`, `environment.json` and a copy of `vocabulary`. The copy
        allows checkpoints to be exported after the directory was moved. If `continues` is True, the
        run exists, and its old files are moved to the folder `interrupted`. If the creation or the
        with block raises a UserError, the files of a new run are removed again.

        Raises ConfigError or DataError if a new run already exists or nothing can be written.
        """
        made: list[Path] = []

        def create() -> None:
            self._make(made, continues)
            self._describe(config, seed, info, device, vocabulary)

        try:
            on_rank_zero(info, create)
            yield
        except UserError:
            if made and not continues:
                self._remove()
            raise

    def write_started_from(self, checkpoint: Path) -> None:
        """Write the path of the checkpoint of another run from which this new run starts."""
        write_file(self.started_from, write_json({"checkpoint": str(checkpoint.absolute())}))

    def write_outcome(self, info: RankInfo, outcome: RunOutcome) -> None:
        """Write the run's outcome on rank 0. Raises DataError on every rank if that fails."""
        on_rank_zero(info, lambda: write_file(self.outcome, outcome.to_json()))

    @property
    def logs(self) -> list[Path]:
        """The MLPerf logs of this run: the log of the last attempt, and those of earlier ones."""
        folder = self.run / _ASIDE
        aside = [folder / name for name in names_in(folder)]
        of_this_run = [path for path in aside if path.match(f"{self.mlperf_log.stem}_*.txt")]
        return [path for path in (self.mlperf_log, *of_this_run) if is_there(path)]

    def _make(self, made: list[Path], continues: bool) -> None:
        """Create the run's directories, and append `self.run` to `made` once it exists."""
        if self.exists and not continues:
            remedy = "use a new directory, or resume the run with --resume auto"
            raise ConfigError("--run-dir", f"{self.root} already has run {self.index}", remedy)
        try:
            self.run.mkdir(parents=True, exist_ok=continues)
            made.append(self.run)
            self.checkpoints.mkdir(exist_ok=continues)
            if continues:
                self._put_aside()
        except OSError as error:
            raise self._not_written(error) from None

    def _describe(
        self, config: RunConfig, seed: int, info: RankInfo, device: torch.device, vocabulary: Path
    ) -> None:
        facts = environment(info, device) | {"seed": seed}
        write_file(self.run / "config.toml", config_to_toml(config).encode())
        write_file(self.run / "environment.json", f"{json.dumps(facts, indent=1)}\n".encode())
        try:
            contents = vocabulary.read_bytes()
        except OSError as error:
            raise self._not_written(error) from None
        write_file(self.run / vocabulary.name, contents)

    def _not_written(self, error: OSError) -> ConfigError:
        problem = f"{self.root}: {error.strerror}"
        return ConfigError("--run-dir", problem, "use a directory that you can write to")

    def _put_aside(self) -> None:
        """Move an interrupted attempt's files to `interrupted`, and add a number to their names."""
        folder = self.run / _ASIDE
        folder.mkdir(exist_ok=True)
        own = (self.mlperf_log, *(self.run / name for name in _OF_AN_ATTEMPT))
        number = 0
        while any(is_there(folder / f"{each.stem}_{number}{each.suffix}") for each in own):
            number += 1
        for each in own:
            if is_there(each):
                each.rename(folder / f"{each.stem}_{number}{each.suffix}")

    def _remove(self) -> None:
        with suppress(OSError):  # A failed removal must not hide the error.
            shutil.rmtree(self.run)
            self.mlperf_log.unlink(missing_ok=True)


def environment(info: RankInfo, device: torch.device) -> dict[str, Any]:
    """Return the contents of `environment.json`, except the seed."""
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
    }


def _versions(*names: str) -> dict[str, str | None]:
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
