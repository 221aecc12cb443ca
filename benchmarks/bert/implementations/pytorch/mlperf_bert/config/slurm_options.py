"""The options of `sbatch` that a config stands for: `mlperf_bert config --slurm FILE`."""

import re
from pathlib import Path

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig

# What neither the shell, which splits and expands the line, nor sbatch's --export takes apart.
_PLAIN = re.compile(r"[\w./@%+=:~-]*")


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
