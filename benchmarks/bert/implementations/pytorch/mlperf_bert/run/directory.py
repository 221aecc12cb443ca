"""The files of one run: created once, never overwritten, and continued by a resumed run.

`<run-dir>/result_<i>.txt` is the MLPerf log; `<run-dir>/run_<i>/` holds everything else. Its
`environment.json` has versions, machine, ranks and commit, but no secrets and no user paths.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mlperf_bert import git_commit
from mlperf_bert.config.files import config_to_toml
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_rank_zero
from mlperf_bert.errors import ConfigError, UserError, typed
from mlperf_bert.files import is_there, names_in, write_file
from mlperf_bert.run.outcome import RunOutcome

_ASIDE = "interrupted"
_OF_AN_ATTEMPT = ("config.toml", "environment.json", "outcome.json")


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

    @property
    def outcome(self) -> Path:
        """The outcome, written when the run ends."""
        return self.run / "outcome.json"

    @property
    def exists(self) -> bool:
        """True if a run of this number was started here. Raises UnreadableError."""
        return is_there(self.mlperf_log) or is_there(self.run)

    def refuse_links(self) -> None:
        """Raise ConfigError if a link would send the run's output elsewhere.

        Only names that are neither created anew nor renamed to are checked.
        """
        grown = (self.run / name for name in ("stdout.log", "metrics.jsonl"))
        folders = (self.run, self.checkpoints, self.run / _ASIDE)
        for path in (self.mlperf_log, *folders, *grown):
            if os.path.islink(path):
                remedy = "remove it: a run does not write through links"
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
        """On rank 0 create folders, `config.toml`, `environment.json` and a copy of `vocabulary`.

        With that copy, checkpoints can be exported after the directory is moved.

        If it `continues` an existing run, the old files are kept in `interrupted`. A new run's
        files are removed again if this or the body raises a UserError. Raises ConfigError or
        DataError if a new run exists already or the place cannot be written.
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

    def write_outcome(self, info: RankInfo, outcome: RunOutcome) -> None:
        """On rank 0 write the outcome. Raises DataError on every rank if that fails."""
        on_rank_zero(info, lambda: write_file(self.outcome, outcome.to_json()))

    @property
    def logs(self) -> list[Path]:
        """MLPerf logs of this run: the log of its last attempt, then those of interrupted ones."""
        folder = self.run / _ASIDE
        aside = [folder / name for name in names_in(folder)]
        of_this_run = [path for path in aside if path.match(f"{self.mlperf_log.stem}_*.txt")]
        return [path for path in (self.mlperf_log, *of_this_run) if is_there(path)]

    def _make(self, made: list[Path], continues: bool) -> None:
        """Create the folders, and note in `made` that the run's folder exists."""
        if self.exists and not continues:
            remedy = "give a new directory, or go on with it by --resume auto"
            raise ConfigError("--run-dir", f"{self.root} holds run {self.index} already", remedy)
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
        return ConfigError("--run-dir", problem, "give a directory you can write to")

    def _put_aside(self) -> None:
        """Keep the files of an interrupted attempt under the number of the attempt."""
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
        with suppress(OSError):  # a failed removal must not hide the error
            shutil.rmtree(self.run)
            self.mlperf_log.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What may be typed next for a run that `train` was asked for by these options.

    `is_alone` if `train` started the ranks itself; `go_on_by` is the command that continues the
    run, if a script knows a better one.
    """

    directory: RunDirectory
    config: Path
    data: Path
    settings: Sequence[str]
    init_checkpoint: str | None
    is_alone: bool
    go_on_by: str | None

    def at_start(self) -> list[str]:
        """How to watch the run."""
        return _tool("watch it from another terminal", "watch", self.directory.run)

    def at_end(self, outcome: RunOutcome, *, is_saved: bool) -> list[str]:
        """What to do with the run: each a purpose and a command that works when typed."""
        if outcome.stopped_by is not None and is_saved:
            return [self.to_go_on()]
        lines = _tool("see it in a browser", "report", "page", self.directory.run)
        if outcome.status == "success" and is_saved:
            words = ("--checkpoint", self.directory.checkpoints, "The [MASK] was trained on text.")
            lines.append(f"to see what it fills in: {typed('fill', *words)}")
        return lines

    def to_go_on(self) -> str:
        """The command that continues the run from its last checkpoint."""
        if self.go_on_by is not None:
            return f"to go on: {self.go_on_by}"
        words: list[object] = ["train", "--config", self.config, "--data", self.data]
        words += [word for each in self.settings for word in ("--set", each)]
        if self.init_checkpoint:
            words += ["--init-checkpoint", self.init_checkpoint]
        words += ["--run-dir", self.directory.root, "--resume", "auto"]
        if self.directory.index:
            words += ["--run-index", self.directory.index]
        how = "" if self.is_alone else ", as its ranks were started before"
        return f"to go on{how}: {typed(*words)}"


def _tool(purpose: str, *words: object) -> list[str]:
    """A hint that names a command of the tools, if they are installed."""
    return [f"to {purpose}: {typed(*words)}"] if find_spec("bert_tools") else []


def environment(info: RankInfo, device: torch.device) -> dict[str, Any]:
    """The contents of `environment.json`."""
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
