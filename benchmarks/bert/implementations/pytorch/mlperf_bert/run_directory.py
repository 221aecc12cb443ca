"""The files of one run: created once, never written over; continued where it is resumed.

`<run-dir>/result_<i>.txt` is the MLPerf log; `<run-dir>/run_<i>/` holds everything else.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mlperf_bert.config import RunConfig
from mlperf_bert.config_io import config_to_toml
from mlperf_bert.data.atomic import write_file
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_rank_zero
from mlperf_bert.environment import environment
from mlperf_bert.errors import ConfigError, UserError
from mlperf_bert.outcome import RunOutcome

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
        """How the run ended, once it has."""
        return self.run / "outcome.json"

    @property
    def exists(self) -> bool:
        """Whether a run of this number was begun here."""
        return self.mlperf_log.exists() or self.run.exists()

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
        """On rank 0 make the folders, `config.toml`, `environment.json` and a copy of `vocabulary`.

        With that copy, checkpoints can be exported wherever the directory is taken.

        Where it `continues` the run that is here, its own are kept in `interrupted`. Undone where
        the body raises a UserError and the run is new: then it never began. Raises ConfigError
        where a new run exists already or the place cannot be written.
        """
        made_root = not self.root.exists()
        on_rank_zero(info, lambda: self._create(config, seed, info, device, vocabulary, continues))
        try:
            yield
        except UserError:
            if info.rank == 0 and not continues:
                self._remove(made_root)
            raise

    def write_outcome(self, info: RankInfo, outcome: RunOutcome) -> None:
        """On rank 0 say how the run ended. Raises DataError on every rank where that fails."""
        on_rank_zero(info, lambda: write_file(self.outcome, outcome.to_json()))

    @property
    def logs(self) -> list[Path]:
        """MLPerf logs of this run: that of its last attempt, and those of interrupted ones."""
        aside = sorted((self.run / _ASIDE).glob(f"{self.mlperf_log.stem}_*.txt"))
        return [path for path in (self.mlperf_log, *aside) if path.exists()]

    def _create(
        self,
        config: RunConfig,
        seed: int,
        info: RankInfo,
        device: torch.device,
        vocabulary: Path,
        continues: bool,
    ) -> None:
        if self.exists and not continues:
            remedy = "give a new directory, or go on with it by --resume auto"
            raise ConfigError("--run-dir", f"{self.root} holds run {self.index} already", remedy)
        made_root = not self.root.exists()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=continues)
            if continues:
                self._put_aside()
            (self.run / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
            facts = environment(info, device) | {"seed": seed}
            (self.run / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
            (self.run / vocabulary.name).write_bytes(vocabulary.read_bytes())
        except OSError as error:
            if not continues:
                self._remove(made_root)
            raise ConfigError(
                "--run-dir", f"{self.root}: {error.strerror}", "give a directory you can write to"
            ) from None

    def _put_aside(self) -> None:
        """Keep what an interrupted attempt said of itself, by the number of the attempt."""
        folder = self.run / _ASIDE
        folder.mkdir(exist_ok=True)
        own = (self.mlperf_log, *(self.run / name for name in _OF_AN_ATTEMPT))
        number = 0
        while any((folder / f"{each.stem}_{number}{each.suffix}").exists() for each in own):
            number += 1
        for each in own:
            if each.exists():
                each.rename(folder / f"{each.stem}_{number}{each.suffix}")

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
