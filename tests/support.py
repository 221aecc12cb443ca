"""Paths and small data sets that several tests share."""

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import bert_tools
import mlperf_bert
from mlperf_bert.__main__ import main

REPOSITORY = Path(__file__).parents[1]
PACKAGE = Path(mlperf_bert.__file__).parent
TOOLS = Path(bert_tools.__file__).parent
CONFIGS = PACKAGE / "configs"
NUM_WORDS = 64
REDUCED = (  # what makes a command of the README that trains end soon
    " --set eval.target_accuracy=0.01 --set eval.interval_samples=500"
    " --set schedule.warmup_steps=20 --set mlperf.enforce_rules=false"
)


def load_study(folder, name):
    """A script beside its log, as a module; it finds its neighbours as when it is started."""
    path = str(REPOSITORY / "logs" / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)


def run_study(tool, *words):
    """The exit status of a script's `main` with these arguments."""
    usual = sys.argv
    sys.argv = [f"{tool.__name__}.py", *map(str, words)]
    try:
        tool.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = usual
    return 0


def run_cli(*arguments, **environ):
    """Run `python -m mlperf_bert ...` in a process of its own, with one CPU thread."""
    return run_process(sys.executable, "-m", "mlperf_bert", *arguments, **environ)


def sets_of(*settings):
    """The words of a command that set these."""
    return [word for setting in settings for word in ("--set", setting)]


def run_process(*command, limit_s=280, **environ):
    """Run a command with its output captured; after `limit_s` it counts as hanging."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "PMI_", "MPI_", "OMPI_"))
    }
    settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **environ}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=inherited | settings,
        timeout=limit_s,
        check=False,
    )


def refusal(capsys, *words):
    """The one line of a command that is refused, run in this process."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mlperf_bert: error: ") and error.count("\n") == 1, error
    return error


@cache
def oldest_python():
    """The oldest Python 3 from 3.6 on of this machine, with which a login node may have to do."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(6, sys.version_info.minor):
        found = [*pyenv.glob(f"3.{minor}.*/bin/python3"), shutil.which(f"python3.{minor}")]
        for program in map(str, filter(None, found)):
            version = run_process(program, "-c", "import sys; print(sys.version_info[:2])").stdout
            if version == f"(3, {minor})\n":
                return program
    return sys.executable


def write_program(path, text):
    """A script that stands for a program of the machine."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def contents(directory):
    """Name below a directory -> what the file holds."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def write_synthetic_text(path, num_documents, seed):
    """Documents of made-up words, each of which foretells the next, so that models can learn."""
    rng = random.Random(seed)
    documents = []
    for _ in range(num_documents):
        lines = []
        for _ in range(rng.randint(2, 6)):
            word = rng.randrange(NUM_WORDS)
            words = []
            for _ in range(rng.randint(3, 12)):
                words.append(f"w{word}")
                word = (3 * word + rng.randrange(2)) % NUM_WORDS
            lines.append(" ".join(words))
        documents.append("\n".join(lines) + "\n")
    path.write_text("\n".join(documents), encoding="utf-8")


def make_synthetic_data(directory):
    """A data directory with train/ and eval/ of a few hundred short examples each."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = directory / "words.txt"
    vocabulary.write_text("\n".join([*special, *(f"w{n}" for n in range(NUM_WORDS))]) + "\n")
    for name, documents, seed in (("train", 150, 1), ("eval", 40, 2)):
        text = directory / f"{name}.txt"
        write_synthetic_text(text, documents, seed)
        prepare_small(
            [text],
            vocabulary,
            directory / name,
            max_seq_length=32,
            max_predictions=5,
            dupe_factor=2,
            with_baseline=True,
        )
    return directory


def prepare_small(texts, vocabulary, out, *, workers=1, with_baseline=False, **settings):
    """`prepare_text`, quietly, in this process if not told otherwise."""
    from mlperf_bert.data.index import ShardSettings  # many tests need neither numpy nor numba
    from mlperf_bert.prepare.build import prepare_text

    how = ShardSettings(**{"seed": 12345, **settings})
    places = (texts, vocabulary, out)
    return prepare_text(*places, how, workers=workers, with_baseline=with_baseline, quiet=True)


TINY_CONFIG = """
[run]
max_steps = 20
seed = 11
device = "cpu"
log_interval_steps = 1
[model]
vocab_size = 69
hidden_size = 32
num_layers = 2
num_heads = 2
intermediate_size = 64
max_position_embeddings = 32
hidden_dropout = 0.0
attention_dropout = 0.0
[data]
max_seq_length = 32
max_predictions = 5
[parallel]
local_batch_size = 16
[optim]
name = "adamw"
learning_rate = 3e-3
epsilon = 1e-6
[schedule]
warmup_steps = 5
decay_steps = 20
[eval]
target_accuracy = 0.99
interval_samples = 160
[mlperf]
enforce_rules = false
"""


def make_tiny_inputs(directory):
    """Synthetic data, and a config of 20 steps that fits it, as the fixtures of those names."""
    config = directory / "tiny.toml"
    config.write_text(TINY_CONFIG, encoding="utf-8")
    return make_synthetic_data(directory), config


def copy_checkout(target):
    """Copy what git knows or would take of this repository, with this environment as its .venv."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file() or (REPOSITORY / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name, follow_symlinks=False)
    (target / ".venv").symlink_to(sys.prefix)
    return target


def run_shell(command, directory, timeout):
    """Run a line of the README in `directory`, as a user's shell would."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=directory,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def metrics_records(run_dir, index=0):
    """The records of a run, one an interval."""
    lines = (run_dir / f"run_{index}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def metrics_losses(run_dir, index=0):
    """Their losses."""
    return [record["loss"] for record in metrics_records(run_dir, index)]


def mlperf_records(log, key=None):
    """The records of an MLPerf log, or those of one key."""
    lines = log.read_text(encoding="ascii").splitlines()
    records = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    return [record for record in records if key in (None, record["key"])]


def snapshot(directory):
    """Everything in a directory: which file or link it is, what it holds and since when."""
    found = {}
    for path in sorted(directory.rglob("*")):
        state = path.lstat()
        found[str(path)] = (state.st_ino, state.st_mode)
        if path.is_file():
            found[str(path)] = (state.st_ino, state.st_mode, state.st_mtime_ns)
            found[f"{path}: contents"] = path.read_bytes()
    return found
