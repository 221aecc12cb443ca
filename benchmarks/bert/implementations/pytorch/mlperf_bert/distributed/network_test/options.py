"""What `doctor` was asked to look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlperf_bert.config.run_config import RunConfig

DeviceName = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """`config` and `data` are those of the run to come, where they were given.

    `timeout_s`: for one check, and for a rank to come. `command`: the words that say the same to
    another process of this command.
    """

    config: RunConfig | None = None
    data: Path | None = None
    device: DeviceName = "auto"
    timeout_s: float = 60.0
    command: tuple[str, ...] = ()

    @property
    def wanted_device(self) -> DeviceName:
        """The config's device unless --device says otherwise."""
        if self.device == "auto" and self.config is not None:
            return self.config.run.device
        return self.device

    @property
    def share_gpu(self) -> Literal["refuse", "allow"]:
        """Whether ranks may share GPUs: as the config says.

        Without one nobody knows what is to run, and half of `mpi_readers`' processes use none.
        """
        if self.config is None or self.config.data.loader == "mpi_readers":
            return "allow"
        return self.config.parallel.share_gpu
